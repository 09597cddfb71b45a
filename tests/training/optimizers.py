"""The optimizers under test, their namesakes in torch, and training with given gradients."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import GRADS, normal, transposed

from mixprec.ops import join_master
from mixprec.optim import SGD, Adam, AdamW, Lion

LOW = (torch.bfloat16, torch.float16)
SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (0,), (), (129,), (4, 0, 3), (2, 3, 5))
Params = list[torch.nn.Parameter]


@dataclass(frozen=True)
class Kind:
    """An optimizer of ours with settings of its own, and the same of torch."""

    ours: type[torch.optim.Optimizer]
    theirs: type[torch.optim.Optimizer]
    own: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.ours.__name__

    def __call__(self, params: Any, **options: Any) -> Any:
        return self.ours(params, **{**dict(self.own), **options})

    def torch(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        return self.theirs(params, **{**dict(self.own), **options})


class PlainLion(torch.optim.Optimizer):
    """Lion in plain torch, which has none."""

    def __init__(
        self, params: Any, lr: Any = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0,
        *, maximize: bool = False, **ignored: Any,
    ) -> None:  # fmt: skip
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not (state := self.state[p]):
                    state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p)}
                state["step"] += 1
                m, g = state["exp_avg"], -p.grad if group["maximize"] else p.grad
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * m.lerp(g, 1 - beta1).sign())
                m.lerp_(g, 1 - beta2)
        return loss


KINDS = {
    "AdamW": Kind(AdamW, torch.optim.AdamW),
    "Adam": Kind(Adam, torch.optim.Adam, (("weight_decay", 0.1),)),
    "SGD": Kind(SGD, torch.optim.SGD, (("momentum", 0.9), ("dampening", 0.1))),
    "Lion": Kind(Lion, PlainLion, (("weight_decay", 0.1),)),
    "nesterov": Kind(SGD, torch.optim.SGD, (("momentum", 0.9), ("nesterov", True))),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


# Every valid combination: a master or stochastic rounding, not both.
MIXES: list[dict[str, Any]] = [
    {"master_weights": m, "state_dtype": d, "stochastic_rounding": s}
    for m in ("auto", "fp32", "remainder16", None)
    for d in (torch.float32, torch.bfloat16)
    for s in ((False, True) if m in ("auto", None) else (False,))
]


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> Params:
    return [torch.nn.Parameter(normal(s, dtype, seed=i)) for i, s in enumerate(shapes)]


def all_dtypes() -> Params:
    """Params of every dtype, empty and strided ones among them."""
    params = []
    for i, dtype in enumerate(GRADS):
        params += parameters(dtype, [(3, 5), (0,), (67,)])
        params.append(torch.nn.Parameter(transposed(normal((4, 9), dtype, seed=i))))
    return params


def mixed() -> Params:
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return [
        torch.nn.Parameter(normal(s, d, seed=i))
        for i, (s, d) in enumerate(zip(((3, 5), (7,), (2, 2), (0,), (9,)), dtypes, strict=True))
    ]


def clones(params: Params) -> Params:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def set_grads(params: Params, seed: int, scale: float = 1.0) -> None:
    for i, p in enumerate(params):
        p.grad = normal(tuple(p.shape), p.dtype, seed=1000 * seed + i) * scale


def train(optimizer: torch.optim.Optimizer, params: Params, steps: int = 5, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def trained(
    make: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
    shapes: Any = SHAPES,
    **options: Any,
) -> tuple[Any, Params]:
    """An optimizer of new params after some steps, and the params."""
    params = parameters(dtype, shapes)
    optimizer = make(params, **options)
    train(optimizer, params, steps)
    return optimizer, params


def tensors(optimizer: torch.optim.Optimizer, params: Params) -> list[torch.Tensor]:
    """Everything a step may write: params, then each one's state in a fixed order."""
    states = [optimizer.state[p] for p in params]
    return [p.detach() for p in params] + [s[key] for s in states for key in sorted(s)]


def copies(optimizer: torch.optim.Optimizer, params: Params) -> list[torch.Tensor]:
    return [t.clone() for t in tensors(optimizer, params)]


def master_of(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor:
    """The FP32 number that is trained."""
    state = optimizer.state[p]
    if "remainder" in state:
        return join_master(p.detach(), state["remainder"])
    return state.get("master", p.detach()).float()


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {i} differs"


def assert_close(
    mine: torch.optim.Optimizer,
    params: Params,
    theirs: torch.optim.Optimizer,
    other: Params,
    steps: int,
) -> None:
    """Within the rounding of `steps` steps of either: a param is rounded twice in each, half a unit
    each time, and its update a dozen times. Adam's is about lr; SGD's buffer holds up to ten
    gradients, about 3 each, times lr = 0.05."""
    group = theirs.param_groups[0]
    update = 12 * group["lr"] if "betas" in group else 2
    for p, o in zip(params, other, strict=True):
        ulp = torch.finfo(p.dtype).eps
        rtol = 2 * steps * ulp
        torch.testing.assert_close(p.detach(), o.detach(), rtol=rtol, atol=update * steps * ulp)
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            a, b = mine.state[p].get(key), theirs.state[o].get(key)
            assert (a is None) == (b is None)
            if a is not None:
                rtol, atol = (16, 4) if key != "momentum_buffer" else (4 * steps, 8 * steps)
                torch.testing.assert_close(a, b, rtol=rtol * ulp, atol=atol * ulp)


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def forbid_synchronization(patched: pytest.MonkeyPatch) -> None:
    """All that would wait for a device raises."""

    def synchronizes(*args: object) -> None:
        raise AssertionError("this waits for the device")

    for method in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu"):
        patched.setattr(torch.Tensor, method, synchronizes)
    for function in ("equal", "is_nonzero", "allclose"):
        patched.setattr(torch, function, synchronizes)
