"""The Python blocks of README.md and docs/ run: alone, or after the blocks that they name.

The first line of a block may be `# continues the block above` or `# after "HEADING"`, which is the
last block under that heading; then that one runs first, after those that it needs itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import mixprec
from mixprec.optim import _batches

ROOT = Path(__file__).resolve().parents[2]
PAGES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/*.md"))]
PAGES.append("README.md")

# What is checked after a block, and what a page prints.
CHECKS = {
    ("README.md", "Use it"): "assert loss.isfinite() and scaler.skipped.item() == 0",
    ("docs/tour.md", "Tensors and products"): "assert error < 0.5 and w.grad is not None",
    ("docs/tour.md", "Loss scaling and checkpoints"): "assert scaler.skipped.item() == 0",
    ("docs/memory.md", "What a step keeps"): "assert after.saved_total < 0.5 * before.saved_total",
    ("docs/stats.md", "Monitoring a run"): "assert len(open('numbers.jsonl').readlines()) == 3",
    ("docs/integrations.md", "transformers"): (
        "from safetensors.torch import load_file\n"
        "again = mixprec.optim.fp32_state_dict(model, mixprec.optim.AdamW(model.parameters()))\n"
        "saved = load_file('trained/model.safetensors')\n"
        "assert saved.keys() == again.keys()\n"
        "assert all(torch.equal(saved[name], again[name]) for name in saved)"
    ),
    ("docs/recipes.md", "FP16 outputs that overflow"): "assert clipped['0'] > 0",
}
PRINTED = {
    "docs/tour.md": (
        "fp8: x e4m3/tensor, w e4m3/tensor, g e5m2/tensor",
        "fp8-delayed",
        "the whole model: ",  # the report of freeze
    ),
    "docs/recipes.md": (r" 4\.5\d\d ", r"the whole model: .* \(1[45]%\), nvfp4"),
    "docs/audit.md": (
        r"- 2 \(Linear\): fp32, because mixprec.convert has left it out; 83.5% of the FLOPs",
        r"2       product     fp32      fp32  fp32  tensor dtype  12.6 M      -",
        r"3       product      fp8       fp8  fp32    recipe fp8   393 k      -",
    ),
    "docs/memory.md": (r"plain +int8\n-+\nparameters +2\.1\d MB",),
    "docs/optimizers.md": (r"2\.bias: 1 Inf among 8",),
    "docs/start.md": (r"layers\.1\.linear2 +product +bf16 +bf16 +fp32 +recipe bf16",),
    "docs/troubleshooting.md": (
        r"- 0: 50\.5% of the inputs overflow in fp16",
        r"True 32768\.0\n0\.weight: 16,384 NaN among 16,384",
        "the steps diverge nowhere by more than rounding explains",
        r"100\.0% recipe fp16",
    ),
}


class Block(NamedTuple):
    page: str
    line: int
    heading: str
    code: str


def blocks(page: str, text: str) -> Iterator[Block]:
    heading = ""
    for found in re.finditer(r"^#+ ([^\n]+)$|^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if found[1]:
            heading = found[1]
        elif found[2] == "python":
            yield Block(page, text[: found.start()].count("\n") + 1, heading, found[3])


def chain(block: Block, page: list[Block]) -> list[Block]:
    """What runs for `block`, which is the last."""
    first, before = block.code.partition("\n")[0], page[: page.index(block)]
    if named := re.fullmatch(r'# after "(.+)"', first):
        before = [each for each in before if each.heading == named[1]]
    elif first != "# continues the block above":
        return [block]
    assert before, f"{block.page}:{block.line}: no block before it is meant by {first!r}"
    return [*chain(before[-1], page), block]


def chains(page: list[Block]) -> list[list[Block]]:
    """All blocks, each as often as it has to run."""
    found = [chain(block, page) for block in page]
    continued = {each for one in found for each in one[:-1]}
    return [one for one in found if one[-1] not in continued]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text()
    for one in chains([*blocks(page, text)]):
        torch.manual_seed(0)
        names: dict[str, Any] = {"__name__": "__main__"}
        for block in one:  # the empty lines are for the line numbers of a traceback
            code = "\n" * block.line + block.code + CHECKS.get((page, block.heading), "")
            try:
                exec(compile(code, page, "exec", dont_inherit=True), names)
            except ModuleNotFoundError as error:
                if error.name not in ("transformers", "peft"):
                    raise
                pytest.skip(f"{page}:{block.line} needs {error.name}")
    printed = capsys.readouterr().out
    for pattern in PRINTED.get(page, ()):
        assert re.search(pattern, printed), pattern
    fenced = re.compile(r"^```.*?^```$", re.M | re.S)
    hidden = re.findall(r"^ {4}.*mixprec\..*", fenced.sub("", text), re.M)
    assert not hidden, "code without a fence, which no test runs"


# docs/coming_from.md: the right column of every table runs


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming_from.md").read_text()
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", re.sub(r"\[[^\]]*\]\([^)]*\)", "", cell))


def is_program(text: str) -> bool:
    """A statement, not a name or a value."""
    try:
        (first, *_) = ast.parse(text).body
    except SyntaxError:
        return False
    return not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Name | ast.Constant)


@pytest.mark.parametrize(("library", "text"), SECTIONS, ids=[name for name, _ in SECTIONS])
def test_right_columns_run(
    library: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    ran = 0
    names: dict[str, object] = {"torch": torch, "mixprec": mixprec, "x": torch.randn(8, 32, 64)}
    for row in rows:
        assert len(row) == 2, row
        if any("convert(" in code for code in spans(row[1])) or "model" not in names:
            body, norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)
            layers = {"norm": norm, "body": body, "act": torch.nn.GELU()}
            layers["head"] = torch.nn.Linear(64, 16)
            names["model"] = model = torch.nn.Sequential()
            for name, layer in layers.items():
                model.add_module(name, layer)
        programs = [code for code in spans(row[1]) if is_program(code)]
        for code in programs:
            exec(code, names)
        ran += len(programs)
        assert programs or row[1].strip() == "-" or "](" in row[1], row
    assert ran >= max(4, len(rows) - 1)


# docs/optimizers.md: its table matches what optimizers allocate and check


DOC = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUMEL = 1 << 12  # large enough for what there is once per tensor to be rounded away


def table() -> list[dict[str, str]]:
    text = re.search(r"<!-- bytes -->\n\n(.*?)\n\n<!-- end -->", DOC.read_text(), re.DOTALL)
    assert text is not None
    head, _, *lines = [line.strip("|").split("|") for line in text[1].splitlines()]
    names = [cell.strip() for cell in head]
    return [dict(zip(names, map(str.strip, line), strict=True)) for line in lines]


TABLE = table()


def trained(line: dict[str, str]) -> tuple[torch.nn.Parameter, Any]:
    """A param and its optimizer as in that line of the table, after two steps; grads are kept."""
    written = line["optimizer"].strip("`")
    shape = (16, NUMEL // 16) if written.startswith("Muon") else (NUMEL,)
    param = torch.nn.Parameter(torch.randn(shape).to(DTYPES[line["params"]]))
    optimizer = eval(written, {**vars(mixprec.optim), "torch": torch, "params": [param]})
    for _ in range(2):
        optimizer.zero_grad()
        if line["gradients"] == "fp32 in main_grad":
            param.main_grad = torch.randn(NUMEL)
        else:
            (param.float() * torch.randn(shape)).sum().backward()
            assert param.grad.dtype == DTYPES[line["gradients"]]
        optimizer.step()
    return param, optimizer


def resident(line: dict[str, str]) -> dict[str, float]:
    """Bytes per element that are allocated between two steps."""
    param, optimizer = trained(line)
    grads = [g for g in (param.grad, getattr(param, "main_grad", None)) if g is not None]
    tensors = {"param": [param], "grad": grads, "state": optimizer.state[param].values()}
    sizes = {
        name: round(sum(t.untyped_storage().nbytes() for t in several) / NUMEL, 2)
        for name, several in tensors.items()
    }
    return sizes | {"resident": round(sum(sizes.values()), 2)}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The gradients that steps read before their updates."""
    seen: list[torch.Tensor] = []
    real = _batches.grad_stats_op

    def spy(grads: list[torch.Tensor], *args: Any, **options: Any) -> None:
        seen.extend(grads)
        real(grads, *args, **options)

    monkeypatch.setattr(_batches, "grad_stats_op", spy)
    return seen


@pytest.mark.parametrize(
    "line", TABLE, ids=[f"{x['optimizer']} {x['params']} {x['gradients']}" for x in TABLE]
)
def test_the_table_is_what_is_allocated_and_checked(
    line: dict[str, str], checked: list[torch.Tensor]
) -> None:
    got = resident(line)
    got["checked"] = sum(t.element_size() for t in checked) / 2
    assert got == {name: float(line[name]) for name in got}
