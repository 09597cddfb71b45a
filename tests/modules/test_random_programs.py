"""Random programs: with and without shared casts, fused and not fused."""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as ckpt

import mixprec
from mixprec.functional import operands
from mixprec.nn._replaced import fused_forward_of
from mixprec.nn.fuse import FusionScope
from mixprec.testing import sqnr

WIDTH = 32  # two heads of 16
Values = list[torch.Tensor]


class OwnNorm(nn.LayerNorm):
    """A norm that computes something else than its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class SiLUActivation(nn.Module):
    """With the name of a class of transformers, and another formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * F.silu(x)


def _child(r: random.Random) -> nn.Module:
    act = r.choice(
        [nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, SiLUActivation, lambda: nn.GELU(approximate="tanh")]
    )
    norm = r.choice([nn.LayerNorm, nn.RMSNorm, OwnNorm])
    linear = nn.Linear(WIDTH, WIDTH, bias=r.random() < 0.5)
    deep = nn.Sequential(
        norm(WIDTH), nn.Linear(WIDTH, WIDTH), act(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
    )
    return r.choice([linear, linear, linear, linear, norm(WIDTH), act(), deep, deep[:2], deep[1:]])


class Call(NamedTuple):
    """Of a part of the model, with one of the values."""

    part: int
    where: float
    keyword: bool

    def __call__(self, model: Program, values: Values, x: torch.Tensor | None) -> None:
        x = values[int(self.where * len(values))] if x is None else x
        part = model.parts[self.part]
        values.append(part(input=x) if self.keyword else part(x))


class Program(nn.Module):
    """Runs a list of random statements over the values that it has so far."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        r = random.Random(seed)
        torch.manual_seed(seed)
        self.parts = nn.ModuleList(_child(r) for _ in range(r.randint(2, 6)))
        self.nested = Program(seed + 10**6) if r.random() < 0.2 else nn.Identity()
        self.statements = [self._statement(r) for _ in range(r.randint(3, 9))]
        self.kinds = {kind for kind, *_ in self.statements} | getattr(self.nested, "kinds", set())

    def _statement(self, r: random.Random) -> tuple[str, list[Call], float]:
        kind = r.choice(["call"] * 6 + ["several"] * 4 + [*_STATEMENTS])
        parts, calls = len(self.parts), r.randint(2, 4)
        return (
            kind,
            [Call(r.randrange(parts), r.random(), r.random() < 0.03) for _ in range(calls)],
            r.random(),
        )

    def forward(self, x: torch.Tensor, *, start: float = 1.0) -> torch.Tensor:
        values = [x, x * start]
        for kind, calls, option in self.statements:

            def block(values: Values, calls: list[Call] = calls, x: Any = None) -> None:
                for call in calls:
                    call(self, values, x)

            if kind == "call":
                block(values, calls[:1])
            elif kind == "several":
                block(values, x=values[0 if option < 0.7 else -1])
            else:
                _STATEMENTS[kind](self, values, block, option)
        return sum(v.float().tanh() for v in values[1:])  # type: ignore[return-value]


def _inside(contexts: list[Callable[[], AbstractContextManager[Any]]]) -> Any:
    def run(model: Program, values: Values, block: Any, option: float) -> None:
        with contexts[int(option * len(contexts))]():
            block(values)
        values[:] = [v.clone() if v.is_inference() else v for v in values]

    return run


def _write(model: Program, values: Values, block: Any, option: float) -> None:
    block(values)
    x = values[int(option * len(values))]
    ways: list[Callable[[], object]] = [
        lambda: x.mul_(2),
        lambda: x[..., :3].zero_(),
        lambda: x.detach().add_(1),
        lambda: setattr(x, "data", x.data * 2),
        lambda: x.view(-1)[::2].neg_(),
    ]
    with torch.no_grad() if option < 0.8 else nullcontext():
        ways[int(option * 50) % len(ways)]()
    block(values)


def _attention(model: Program, values: Values, block: Any, option: float) -> None:
    q, k, v = (values[i % len(values)].unflatten(-1, (2, 16)).transpose(-2, -3) for i in range(3))
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: F.scaled_dot_product_attention(q, k, v),
        lambda: F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True),
        lambda: F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3),
        lambda: F.scaled_dot_product_attention(q, k, v, torch.ones(5, 5).tril().bool()),
        lambda: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
        lambda: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
        lambda: F.scaled_dot_product_attention(q.double(), k.double(), v.double()).to(q.dtype),
        lambda: F.scaled_dot_product_attention(q, k[..., :8], v),
    ]
    values.append(calls[int(option * len(calls))]().transpose(-2, -3).flatten(-2))


def _thread(model: Program, values: Values, block: Any, option: float) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(block, values).result()


def _checkpoint(model: Program, values: Values, block: Any, option: float) -> None:
    def function(*given: torch.Tensor) -> torch.Tensor:
        block(own := [*given])
        return sum(own[len(given) :])  # type: ignore[return-value]

    def selective() -> Any:
        return ckpt.create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor])

    options = {"context_fn": selective} if option > 0.8 else {}
    values.append(ckpt.checkpoint(function, *values, use_reentrant=option < 0.3, **options))


def _hook(model: Program, values: Values, block: Any, option: float) -> None:
    part: Any = model.parts[int(option * len(model.parts))]
    hooks = [
        lambda: part.register_forward_pre_hook(lambda m, args: (2 * args[0], *args[1:])),
        lambda: part.register_forward_hook(lambda m, args, y: y + 1),
        lambda: part.register_full_backward_pre_hook(lambda m, grads: (2 * grads[0],)),
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda m, args, y: None),
    ]
    handle: Any = hooks[int(option * 40) % len(hooks)]()
    try:
        block(values)
    finally:
        handle.remove()


def _nested(model: Program, values: Values, block: Any, option: float) -> None:
    x = values[int(option * len(values))]
    values.append(model.nested(x) if option < 0.5 else model.nested(x).to(x.dtype))
    block(values)


def _branch(model: Program, values: Values, block: Any, option: float) -> None:
    if values[0].sum() > 0:  # not a value whose rounding may change its sign
        block(values)
    values.append(values[-1] * option)


def _cast(model: Program, values: Values, block: Any, option: float) -> None:
    dtype = [torch.bfloat16, torch.float16, torch.float32][int(option * 3)]
    values.append(values[-1].to(dtype))
    block(values)


_STATEMENTS: dict[str, Any] = {
    "mode": _inside([torch.no_grad, torch.enable_grad, torch.inference_mode]),
    "region": _inside(
        [
            *(lambda r=r: mixprec.autocast(r) for r in (None, "bf16", "fp8-rowwise")),
            lambda: mixprec.autocast(enabled=False),
            lambda: torch.autocast("cpu", torch.bfloat16),
            lambda: mixprec.use_backend("reference"),
            lambda: mixprec.functional.twice_differentiable(),
        ]
    ),
    "write": _write,
    "attention": _attention,
    "thread": _thread,
    "checkpoint": _checkpoint,
    "hook": _hook,
    "nested": _nested,
    "branch": _branch,
    "cast": _cast,
}


def result(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor] | str:
    """The output and all gradients, or the error."""
    x = x.clone().requires_grad_()
    try:
        y = model(x, start=1.5)
        torch.manual_seed(3)
        y.mean().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    finally:
        mixprec.update_scales(model)
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {k: v for k, v in {"y": y.detach(), "x": x.grad, **found}.items() if v is not None}


RECIPES = ("bf16", "fp16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4", "fp8-delayed")


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], seed: int) -> None:
    for key, value in a.items():
        assert torch.equal(value.nan_to_num(7.0), b[key].nan_to_num(7.0)), (seed, key)


def compare(seed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the program of `seed` ends; AssertionError if shared casts or fusing change it."""
    r = random.Random(seed)
    recipe = r.choice(RECIPES)
    plain = mixprec.convert(Program(seed), recipe)
    fused = mixprec.convert(copy.deepcopy(plain), recipe, fuse=True)
    separate = copy.deepcopy(fused)
    x = torch.randn((*r.choice([(2, 5), (5,), (7,), ()]), WIDTH))
    x = x * r.choice([1.0, 1.0, 1e-4, 300.0])
    # With delayed scales, once with the first ones and once with the next.
    for _ in range(1 + (recipe == "fp8-delayed")):
        torch.manual_seed(seed)
        got = result(fused, x)
        with monkeypatch.context() as patch:
            patch.setattr(operands, "_shareable", lambda *_: False)
            torch.manual_seed(seed)
            off = result(separate, x)
        torch.manual_seed(seed)
        expected = result(plain, x)
        if isinstance(got, str) or isinstance(off, str) or isinstance(expected, str):
            assert type(got) is type(off), seed
            assert isinstance(got, dict) or got == off, seed
            # Which operands are kept for backward differs: torch's attention keeps its own, ours a
            # copy in 16 bits; our norm its input, torch's RMSNorm of 16 bits a copy in FP32.
            written = any("gradient computation" in end for end in (got, expected))
            assert written or got == expected, seed
            return "an error"
        assert got.keys() == off.keys() == expected.keys(), seed
        assert_same(got, off, seed)
        assert all(value.dtype == expected[key].dtype for key, value in got.items()), seed
    forwards = [fused_forward_of(m) for m in fused.modules()]
    parts = [f for f in forwards if f is not None and not isinstance(f, FusionScope)]
    if not parts and "attention" not in fused.kinds:
        assert_same(got, expected, seed)
        return "the same bits"
    finite = all(v.isfinite().all() for v in (*got.values(), *expected.values()))
    if finite:
        assert float(sqnr(expected["y"], got["y"])) > (12 if "4" not in recipe else 5), seed
    return "close"


def run(seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Counter(compare(seed, monkeypatch) for seed in seeds)


def test_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = run(range(300), monkeypatch)
    assert min(ends[end] for end in ("the same bits", "close", "an error")) > 20, ends


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_programs(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(range(1000 * (part + 1), 1000 * (part + 2)), monkeypatch)
