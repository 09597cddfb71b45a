"""docs/optimizers.md: its table matches what optimizers allocate and move, and its code runs."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mixprec
from mixprec.optim import SGD, Adam, AdamW, Lion, Muon, _grad_norms, adamw, lion, sgd

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


def called(text: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """`AdamW(params, lr=0.1)` -> AdamW, {"lr": 0.1}"""
    call = ast.parse(text.strip("`"), mode="eval").body
    assert isinstance(call, ast.Call)
    assert [ast.unparse(arg) for arg in call.args] == ["params"]
    options = {}
    for word in call.keywords:
        dtype = isinstance(word.value, ast.Attribute) and getattr(torch, word.value.attr)
        options[word.arg] = dtype or ast.literal_eval(word.value)
    kinds = (AdamW, Adam, SGD, Lion, Muon)
    return {kind.__name__: kind for kind in kinds}[ast.unparse(call.func)], options


def trained(line: dict[str, str], numel: int) -> tuple[torch.nn.Parameter, Any]:
    """A param and its optimizer as in that line of the table, after two steps; grads are kept."""
    kind, options = called(line["optimizer"])
    shape = (16, numel // 16) if kind is Muon else (numel,)
    param = torch.nn.Parameter(torch.randn(shape).to(DTYPES[line["params"]]))
    optimizer = kind([param], **options)
    for _ in range(2):
        optimizer.zero_grad()
        if line["gradients"] == "fp32 in main_grad":
            param.main_grad = torch.randn(numel)
        else:
            (param.float() * torch.randn(shape)).sum().backward()
            assert param.grad.dtype == DTYPES[line["gradients"]]
        optimizer.step()
    return param, optimizer


def resident(line: dict[str, str]) -> dict[str, float]:
    """Bytes per element that are allocated between two steps."""
    param, optimizer = trained(line, NUMEL)
    grads = [g for g in (param.grad, getattr(param, "main_grad", None)) if g is not None]
    tensors = {"param": [param], "grad": grads, "state": optimizer.state[param].values()}
    sizes = {
        name: round(sum(t.untyped_storage().nbytes() for t in several) / NUMEL, 2)
        for name, several in tensors.items()
    }
    return sizes | {"resident": round(sum(sizes.values()), 2)}


class Spy:
    """Records the arguments of the ops of a step, as they were before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.checked: list[torch.Tensor] = []
        self.updates: list[tuple[Callable, list, dict]] = []
        for module, name in (
            (_grad_norms, "grad_stats_"),
            (adamw, "adamw_"),
            (sgd, "sgd_"),
            (lion, "lion_"),
        ):
            patch.setattr(module, name, self.spied(getattr(module, name)))

    def spied(self, real: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> None:
            if real.__name__ == "grad_stats_":
                self.checked += args[0]
            else:
                scales = [t.clone() for t in options["state_scales"]]
                self.updates.append((real, cloned(args), {**options, "state_scales": scales}))
            real(*args, **options)

        return call


def cloned(args: Any) -> list[Any]:
    """In a new list: the lists of tensors and `steps`, all positional."""
    return [[t.clone() for t in a] if isinstance(a, (list, tuple)) else a.clone() for a in args]


def moved(op: Callable, args: list[Any], options: dict[str, Any]) -> tuple[int, int]:
    """Bytes per element that the result depends on, and that the op writes."""

    scales = [t.clone() for t in options["state_scales"]]

    def outcome(change: tuple[int, int] | None = None) -> list[Any]:
        own = cloned(args)
        if change is not None:
            t = own[change[0]][change[1]]
            t.copy_(t ^ 64 if t.dtype == torch.int16 else 1.5 * t + 0.25)
        op(*own, **{**options, "state_scales": [t.clone() for t in scales]})
        return own

    def differ(a: list[Any], b: list[Any], where: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(i, j) for i, j in where if not torch.equal(a[i][j], b[i][j])]

    places = [(i, j) for i, a in enumerate(args) if isinstance(a, list) for j in range(len(a))]
    after = outcome()
    written = differ(args, after, places)
    read = [place for place in places if differ(outcome(change=place), after, written)]
    size = [sum(args[i][j].element_size() for i, j in which) for which in (read, written)]
    return size[0], size[1]


@pytest.mark.parametrize(
    "line", TABLE, ids=[f"{x['optimizer']} {x['params']} {x['gradients']}" for x in TABLE]
)
def test_the_table_is_what_is_allocated_and_moved(
    line: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = resident(line)
    spy = Spy(monkeypatch)
    trained(line, NUMEL)
    got["checked"] = sum(t.element_size() for t in spy.checked) / 2
    if line["read"]:  # Muon has no single update
        assert len(spy.updates) == 2
        got["read"], got["written"] = moved(*spy.updates[-1])
    assert got == {name: float(line[name]) for name in got}


@pytest.mark.filterwarnings("ignore:GradScaler.unscale_. unscaled gradients are rounded to fp16")
def test_with_a_scaler_gradients_are_checked_once() -> None:
    for dtype, unscaled, clip in itertools.product(DTYPES.values(), (False, True), (None, 1.0)):
        with pytest.MonkeyPatch.context() as patch:
            spy = Spy(patch)
            param = torch.nn.Parameter(torch.randn(64).to(dtype))
            optimizer = AdamW([param], max_grad_norm=clip)
            scaler = mixprec.GradScaler(init_scale=4.0)
            scaler.scale(param.float().sum()).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        assert len(spy.checked) == (0 if unscaled and clip is None else 1)
        assert len(spy.updates) == 1


def test_the_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert len(blocks) >= 8
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "2.bias: 1 Inf among 8" in run.stdout
