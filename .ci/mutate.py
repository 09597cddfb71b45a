"""make mutate BASE=REV: plant wrong variants of lines changed since REV; print what no test sees.

A variant swaps an operator, min and max, a constant (also a string, dtype or member of an enum and
another of the file), two arguments, local variables (Python); negates a condition, or makes it
false; omits an assignment to an attribute or element, or a call whose result is not used. It is
planted in a copy of the tree, in build/mutate/. A run of the quick tests, or of TESTS, first notes
which functions each calls. A variant in Python runs those of its function; one in csrc, which is
compiled again, those of the op with the first words of the file's name (gemm, for gemm_loops.h) or
of any op: 60 s of them, at random. Kernels of GPUs run tests/emulated. Too long a run counts too.
"""

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CALLS = ROOT / "build" / "mutate" / "calls.jsonl"
NULL = subprocess.DEVNULL
PYTEST = ("-m", "pytest", "-c", "../../pyproject.toml", "--rootdir", "../..")
PAIRS = "+ -,* /,< <=,> >=,== !=,<< >>,& |,&& ||,+= -=,and or,min max,fmin fmax,any all,True False"
OTHER = {a: b for p in PAIRS.split(",") for a, b in (p.split(), p.split()[::-1])}
OTHER |= {"true": "false", "false": "true", "//": "*", "%": "*", "is": "is not", "in": "not in"}
COMMENT = {True: r"\#[^\n]*", False: r"//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*"}
TOKEN = (  # a string, a word, a number, a sign
    r'|("{3}.*?"{3}|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|'
    r"[\w.'])*|<<=|>>=|//|\*\*|[-+*/%&|^=!<>:]=|<<|>>|&&|\|\||->|::|\+\+|--|[^\w\s])"
)
VALUE = re.compile(  # a member after what it is of, a string
    r'(\w+::)(\w+)(?![\w(<:])|(\w+\.)([A-Z][A-Z0-9_]+|b?float\w+|u?int\d+)\b|()("[a-z]\w*")'
)
PLAIN = r'([\w.:"]+(?:->\w+|\[\w+\])?)'  # a variable, a member, a constant
ARGUMENTS = re.compile(rf"(?<=[(\[\s])(?={PLAIN}(,\s+){PLAIN}[,)\]])")
IF = re.compile(r"\b(?:if|while)(?: constexpr)? \(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")
CALL = re.compile(r"(?<=[;{}]\n) +(?!return|using)([\w.:>\[\]-]+(?:\(| [-+*/|&^]?= )[^;{}]*);")
LEFT_OUT = {ast.Assign: (ast.Attribute, ast.Subscript), ast.Expr: ast.Call, ast.AugAssign: ast.AST}
Edit = tuple[int, int, str, str]  # start and end in bytes (sources are read as Latin-1), new, kind
Mutant = tuple[str, int, Edit]  # file, first line of the function, edit
Tests = dict[str, list[tuple[str, float]]]  # of a function, a file, a folder: test and seconds


def of_tokens(text: str, is_python: bool, draw: random.Random) -> Iterator[Edit]:
    tokens = [m for m in re.finditer(COMMENT[is_python] + TOKEN, text, re.M | re.S) if m[1]]
    words, starts = [*(m[1] for m in tokens), ""], {m.start() for m in tokens}
    for i, token in enumerate(tokens):
        word, (start, end) = token[1], token.span()
        around = text[start - 1 : start] + text[end : end + 1]
        called = word[0].isalpha() and (words[i + 1] == "(" or word.lower() in ("true", "false"))
        if word in OTHER and (called or around.isspace()) and words[i - 1] != "template":
            yield start, end, OTHER[word], "constant" if "e" in word else "operator"
        elif word in ("!", "not") or (word == "-" and not text[end : end + 1].isspace()):
            yield start, end, "", "operator"
        elif number := re.fullmatch(r"(\d+)([uUlL]*)|(\d+\.\d*)(f?)", word):
            new = str(int(number[1]) + 1) if number[1] else repr(float(number[3]) * 2 or 1.0)
            for value in (new, "0") if number[1] == "1" else (new,):
                yield start, end, value + (number[2] or number[4] or ""), "constant"
    found = [m for m in VALUE.finditer(text) if m.start() in starts]
    for m in found:
        same = {o[o.lastindex] for o in found if o[o.lastindex - 1] == m[m.lastindex - 1]}
        if others := sorted(same - {m[m.lastindex]}):
            yield *m.span(m.lastindex), draw.choice(others), "constant"
    for m in ARGUMENTS.finditer(text):
        if m.start() in starts and m[1] != m[3]:
            yield m.start(1), m.end(3), m[3] + m[2] + m[1], "arguments"
    for m in () if is_python else CALL.finditer(text):
        yield *m.span(1), "", "statement"
    for m in () if is_python else IF.finditer(text):
        yield *m.span(1), f"!({m[1]})", "condition"
        yield *m.span(1), "false", "condition"


def of_python(text: str, draw: random.Random) -> Iterator[tuple[int, Edit]]:
    """Each after the first line of the function around it, or 0.

    Annotations, imports and errors stay.
    """
    tree, rows = ast.parse(text.encode("latin-1")), [0, *(m.end() for m in re.finditer("\n", text))]

    def span(n: Any) -> tuple[int, int]:
        return rows[n.lineno - 1] + n.col_offset, rows[n.end_lineno - 1] + n.end_col_offset

    edits, kept, functions = [*of_tokens(text, True, draw)], [], [(0, len(text), 0, [])]
    for node in ast.walk(tree):
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        notes += [node] if isinstance(node, (ast.Raise, ast.JoinedStr, ast.ImportFrom)) else []
        kept += [span(n) for n in notes if n]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min(n.lineno for n in [node, *node.decorator_list])
            names = [(n.lineno, n.arg) for n in ast.walk(node) if isinstance(n, ast.arg)]
            stored = (n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store))
            names += [(n.lineno, n.id) for n in stored if isinstance(n, ast.Name)]
            functions.append((*span(node), first, names))
    for node in ast.walk(tree):
        at = span(node) if hasattr(node, "lineno") else (0, 0)
        function = max(f for f in functions if f[0] <= at[0] < f[1])
        for test in getattr(node, "ifs", [getattr(node, "test", None)]):
            if test and not isinstance(node, ast.Assert):
                edits.append((*span(test), f"not ({text[slice(*span(test))]})", "condition"))
                edits += [(*span(test), "False", "condition")] if isinstance(node, ast.If) else []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            known = {name for line, name in function[3] if line < node.lineno} - {"self"}
            if node.id in known and known != {node.id}:
                edits.append((*at, draw.choice(sorted(known - {node.id})), "name"))
        target = getattr(node, "targets", [getattr(node, "value", None)])[0]
        if isinstance(target, LEFT_OUT.get(type(node), ())):
            edits.append((*at, "pass", "statement"))
    for start, end, new, kind in edits:
        if not any(a <= start < b for a, b in kept):
            with suppress(SyntaxError):  # `not in` of a for loop
                ast.parse((text[:start] + new + text[end:]).encode("latin-1"))
                function = max(f for f in functions if f[0] <= start < f[1])
                yield function[2], (start, end, new, kind)


def mutants(base: str, only: list[str], draw: random.Random) -> list[Mutant]:
    """Of the lines that differ from a revision, one of each kind after the other."""
    file, lines, found, count = "", defaultdict(set), [], Counter()
    diff = ["git", "diff", "-U0", "--dst-prefix=b/", base, "--", *only]
    for line in subprocess.check_output(diff, cwd=ROOT, text=True).splitlines():
        if line.startswith("+++ "):
            file = line[6:]
        elif hunk := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            lines[file] |= {*range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1))}
    for file in sorted(f for f in lines if f.endswith((".py", ".h", ".cpp", ".cu", ".cuh"))):
        text, is_python = (ROOT / file).read_text("latin-1"), file.endswith(".py")
        edits = of_python(text, draw) if is_python else zip(repeat(0), of_tokens(text, False, draw))
        for function, edit in sorted({*edits}):
            first, last = (text.count("\n", 0, at) + 1 for at in edit[:2])
            if lines[file] & {*range(first, last + 1)}:
                found.append((file, function, edit))
    draw.shuffle(found)
    turn = {m: count.update([m[2][3]]) or count[m[2][3]] for m in found}
    return sorted(found, key=turn.__getitem__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """As a plugin of pytest: notes which functions of mixprec a test calls, if it passes."""
    called, failed, start = set(), item.session.testsfailed, time.monotonic()

    def note(frame: Any, event: str, arg: Any) -> None:
        if (name := frame.f_code.co_filename.partition("/build/run/")[2]).startswith("mixprec"):
            called.add(f"{name}:{frame.f_code.co_firstlineno}")

    sys.settrace(note)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        if item.session.testsfailed == failed:
            row = [item.nodeid, time.monotonic() - start, sorted(called)]
            with CALLS.open("a") as file:
                file.write(json.dumps(row) + "\n")


def copied(number: int) -> Path:
    """A copy of the working tree, with what is compiled."""
    root, ignored = CALLS.parent / str(number), (ROOT / ".gitignore").read_text()
    shutil.rmtree(root, ignore_errors=True)
    ignore = shutil.ignore_patterns(".git", *ignored.replace("/", "").split())
    shutil.copytree(ROOT, root, ignore=ignore)
    for path in Path(find_spec("mixprec").origin).parent.glob("_C*.so"):
        shutil.copy(path, root / "mixprec")
    (root / "build" / "run").mkdir(parents=True)
    for link in ("build/run/mixprec", "mixprec/bench", "mixprec/triton_kernels"):  # as if installed
        (root / link).symlink_to(root / Path(link).name)
    return root


def run(root: Path, *words: str, folder: str = "build/run", limit: float = 7200, **env: str) -> int:
    """The exit status of a program in Python, which is killed after `limit` seconds."""
    path = f"{root}/build/run:{ROOT}/.ci:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | env
    words = ("timeout", "-s", "KILL", str(limit), sys.executable, *words)
    return subprocess.run(words, cwd=root / folder, env=env, stdout=NULL, stderr=NULL).returncode


def calls(root: Path, workers: str, paths: str) -> Tests:
    CALLS.write_text("")
    words = ["-p", "mutate", "-n", workers, "-m", "not slow and not exhaustive"]
    run(root, *PYTEST, *words, *(f"../../{path}" for path in paths.split()))
    tests: Tests = defaultdict(list)
    if not CALLS.stat().st_size:
        sys.exit(f"make mutate: none of these tests passes as it is: {paths}")
    for test, seconds, called in map(json.loads, CALLS.open()):
        files = {name.partition(":")[0] for name in called}
        for key in {*called, *files, *map(os.path.dirname, files)}:
            tests[key].append((f"../../{test}", seconds))
    return tests


def outcome(m: Mutant, root: Path, tests: Tests) -> str:
    (file, function, (start, end, new, _)), seconds, args = m, 0.0, []
    words, key = Path(file).stem.split("_"), f"{file}:{function}".removesuffix(":0")
    if file.startswith("csrc"):
        ops = [f"mixprec/ops/{'_'.join(words[:n])}.py" for n in range(len(words), 0, -1)]
        key = next((op for op in ops if op in tests), "mixprec/ops")
    for test, takes in random.Random(0).sample(tests[key], len(tests[key])):
        if seconds + takes < 60:
            args, seconds = [*args, test], seconds + takes
    limit, env = 60 + 10 * seconds, {}
    if on_gpu := file.startswith(("csrc/cuda", "triton_kernels")):
        args, limit, env = ["../../tests/emulated"], 7200, {"TRITON_INTERPRET": "1"}
    text = (root / file).read_text("latin-1")
    (root / file).write_text(text[:start] + new + text[end:], "latin-1")
    try:
        compiled = file.startswith("csrc") and not on_gpu
        if compiled and run(root, "setup.py", "build_ext", "--inplace", folder="."):
            return "not compiled"
        killed = args and run(root, *PYTEST, "-x", *args, limit=limit, **env)
        return "killed" if killed else "survived" if args else "survived, not called"
    finally:
        (root / file).write_text(text, "latin-1")


def main(base: str, n: str, seed: str, workers: str, only: str, paths: str) -> None:
    found = mutants(base, only.split(), random.Random(seed))
    found, copies = found[: int(n or len(found))], [copied(k) for k in range(int(workers))]
    tests, count = calls(copies[0], workers, paths), Counter()

    def plant(m: Mutant) -> None:
        (file, _, (start, end, new, kind)), root = m, copies.pop()
        what, text = outcome(m, root, tests), (root / file).read_text("latin-1")
        copies.append(root)
        count[what] += 1
        first, last = (text.count("\n", 0, at) + 1 for at in (start, end))
        print(f"{what}: {file}:{first}: {kind}", flush=True)
        for said in (text, text[:start] + new + text[end:]) if what[:3] == "sur" else ():
            shown = said.split("\n")[first - 1 : last + said.count("\n") - text.count("\n")]
            print("  " + "\n  ".join(shown), flush=True)

    with ThreadPoolExecutor(int(workers)) as pool:
        list(pool.map(plant, sorted(found, key=lambda m: (m[0].startswith("csrc"), m[0]))))
    print("make mutate:", ", ".join(f"{n} {what}" for what, n in count.items()) or "no variants")


if __name__ == "__main__":
    main(*sys.argv[1:])
