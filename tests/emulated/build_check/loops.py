"""How many instructions the memory-bound kernels execute for each element, from the machine code.

A loop is a branch backwards. Of the ways through one, from the target of that branch to the branch,
the shortest is counted that stores (or, in a kernel that reduces, loads) whole vectors: so an
instance is counted with the cheapest of the formats that it finds at run time, and no vector takes
the way of Inf. Of several loops the cheapest is the kernel's: the others move single elements, or
contain it. A way with a loop inside has no count. A switch (BRX) leads to the places after it that
no other branch leads to.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

BYTES = {"double": 8, "float": 4, "Fp16": 2, "Bf16": 2, "E4m3": 1, "E5m2": 1}
# The kernels that have one such loop: what moves its vectors, and the elements of a round where
# that does not tell, kGroup of cuda/optim/group.cuh, kMxRun of quantize_mx.cuh, kRun of pack.cuh.
KERNELS: dict[str, tuple[str, int | None]] = {
    "unscale_kernel": ("STG", None),
    "grad_stats_kernel": ("LDG", None),
    "amax_kernel": ("LDG", None),
    "quantize_kernel": ("STG", None),
    "dequantize_kernel": ("STG", None),
    "step_kernel": ("STG", 8),
    "quantize_mx_kernel": ("STG", 16),
    "dequantize_mx_kernel": ("STG", 16),
    "pack_kernel": ("LDG", 16),
    "unpack_kernel": ("STG", 16),
}
# Those that compute what they cast, a whole formula, have loops inside (csrc/cuda/fused).
FUSED = re.compile(r"(amax|quantize|quantize_mx)_kernel<(?!Plain<)")
# Ways of their own, by what they must execute and how often, 0 for never:
# {kernel: {name: {opcode: times}}}.
MARKED = {
    "step_kernel<AdamW": {"8-bit states": {"REDUX": 2}},
    "quantize_mx_kernel": {"FP4": {r"STG\.E\.64": 1, r"F2FP\S*E[45]M": 0}},
}
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")
_ADDRESS = re.compile(r"(?<!-)\b0x([0-9a-f]+)\s*$")
_WIDE = {"STG": re.compile(r"STG\S*\.(64|128)"), "LDG": re.compile(r"LDG\S*\.(64|128)")}


class Instruction(NamedTuple):
    opcode: str
    follows: tuple[int, ...]  # indices of what may be executed next; the branch taken last


def parse(sass: str) -> list[Instruction]:
    """The instructions of one kernel, as cuobjdump shows them."""
    lines = [found for found in map(_LINE.search, sass.splitlines()) if found is not None]
    place = {int(found[1], 16): i for i, found in enumerate(lines)}
    joins: dict[str, int] = {}  # where BSYNC of a barrier continues
    code, named = [], set()  # of the places that instructions name
    for i, (_, predicate, opcode, operands) in enumerate(found.groups() for found in lines):
        address = _ADDRESS.search(operands.strip())
        target = place.get(int(address[1], 16)) if address is not None else None
        named |= set() if target is None else {target}
        name, conditional = opcode.split(".")[0], predicate is not None
        if name == "BSSY" and target is not None:
            joins[operands.split(",")[0].strip()] = target
        follows: tuple[int, ...] = (i + 1,) if i + 1 < len(lines) else ()
        if name in ("BRA", "BSYNC"):
            to = joins.get(operands.strip()) if name == "BSYNC" else target
            # BRA P1, 0x10 and BRA.U !UP0, 0x10 are conditional too.
            conditional |= name == "BRA" and re.search(r"\bU?P\d", operands) is not None
            follows = (*(follows if conditional else ()), *(() if to is None else (to,)))
        elif name in ("EXIT", "RET", "BRX"):
            follows = follows if conditional else ()
        code.append(Instruction(opcode, follows))
    return _with_switches(code, named)


def _with_switches(code: list[Instruction], named: set[int]) -> list[Instruction]:
    switches = [i for i, one in enumerate(code) if one.opcode == "BRX"]
    for i, end in itertools.pairwise([*switches, len(code)]):
        starts = [at for at in range(i + 1, end) if at not in code[at - 1].follows]
        code[i] = Instruction("BRX", tuple(at for at in starts if at not in named))
    return code


def way(code: list[Instruction], head: int, last: int, needs: Mapping[str, int]) -> list[int]:
    """The shortest way from `head` to `last` that executes what it must; empty if there is none."""
    patterns = [(re.compile(p), n) for p, n in needs.items() if n]
    never = [re.compile(p) for p, n in needs.items() if not n]
    closed = {head, *(i for i, one in enumerate(code) if any(p.match(one.opcode) for p in never))}
    finds = [tuple(p.match(one.opcode) is not None for p, _ in patterns) for one in code]
    most = tuple(n for _, n in patterns)

    def seen(counts: tuple[int, ...], at: int) -> tuple[int, ...]:
        return tuple(min(c + f, m) for c, f, m in zip(counts, finds[at], most, strict=True))

    start = (head, seen((0,) * len(most), head))
    before: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]] | None] = {start: None}
    queue = [start]
    for at, counts in queue:
        if at == last and counts == most:
            steps, state = [], (at, counts)
            while state is not None:
                steps.append(state[0])
                state = before[state]
            return steps[::-1]
        for following in code[at].follows if at != last else ():
            reached = (following, seen(counts, following))
            if following not in closed and reached not in before:
                before[reached] = (at, counts)
                queue.append(reached)
    return []


def _repeats(code: list[Instruction], steps: list[int]) -> bool:
    """Whether there is a loop inside of a way."""
    seen: set[int] = set()
    for at in steps[1:-1]:
        seen.add(at)
        if any(to in seen for to in code[at].follows):
            return True
    return False


def _elements(name: str, code: list[Instruction], steps: list[int]) -> float:
    word, fixed = KERNELS[name.split("<")[0]]
    if fixed is not None:
        return fixed
    found = (_WIDE[word].match(code[at].opcode) for at in steps)
    moved = sum(int(one[1]) // 8 for one in found if one is not None)
    types = [word for word in re.findall(r"\w+", name) if word in BYTES] or ["float"]
    return moved / BYTES[types[-1 if word == "STG" else 0]]


def per_element(name: str, sass: str) -> dict[str, float]:
    """Of a kernel with this demangled name: {"": instructions, and for each of its marked ways}.
    Empty for a kernel that has no such loop."""
    if name.split("<")[0] not in KERNELS or FUSED.match(name):
        return {}
    code = parse(sass)
    word, _ = KERNELS[name.split("<")[0]]
    loops = [(to, at) for at, one in enumerate(code) for to in one.follows if to <= at]
    ways: dict[str, dict[str, int]] = {"": {}}
    for kernel, marked in MARKED.items():
        ways |= marked if name.startswith(kernel) else {}
    result = {}
    for what, needs in ways.items():
        found = []
        for head, last in loops:
            steps = way(code, head, last, {_WIDE[word].pattern: 1, **needs})
            if steps and not _repeats(code, steps):
                found.append(len(steps) / _elements(name, code, steps))
        if found:
            result[what] = round(min(found), 1)
    return result
