"""The optimizers under test, their namesakes in torch, and training with given gradients."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import normal, transposed

from mixprec.ops import join_master
from mixprec.optim import SGD, Adam, AdamW, Lion, Muon

LOW = (torch.bfloat16, torch.float16)
SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (0,), (), (129,), (4, 0, 3), (2, 3, 5))
MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
Params = list[torch.nn.Parameter]


@dataclass(frozen=True)
class Kind:
    """An optimizer of ours with settings of its own, and the same of torch."""

    ours: type[torch.optim.Optimizer]
    theirs: type[torch.optim.Optimizer]
    own: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.ours.__name__

    def __call__(self, params: Any, **options: Any) -> Any:
        settings = {**self.own, **options}
        if self.ours is Muon:  # whose params that are no matrices have settings of their own
            shared = settings.keys() & {"lr", "weight_decay"}
            settings["adamw"] = {key: settings[key] for key in shared}
        return self.ours(params, **settings)

    def torch(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        return self.theirs(params, **{**self.own, **options})

    @property
    def mixes(self) -> list[dict[str, Any]]:
        return [mix for mix in MIXES if self.ours is not Muon or mix["state_dtype"] != "int8"]


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


# Those whose steps are torch's but for their rounding, and Muon.
SAME = {
    "AdamW": Kind(AdamW, torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    "Adam": Kind(Adam, torch.optim.Adam, {"eps": 1e-6, "weight_decay": 0.1}),
    "SGD": Kind(SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "Lion": Kind(Lion, PlainLion, {"betas": (0.9, 0.98), "weight_decay": 0.1}),
    "nesterov": Kind(SGD, torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
}
KINDS = {**SAME, "Muon": Kind(Muon, torch.optim.Muon, {"ns_steps": 1})}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
same_kinds = pytest.mark.parametrize("kind", SAME.values(), ids=SAME)


# Every valid combination: a master or stochastic rounding, not both.
MASTERS = [
    *(("fp32", False), ("remainder16", False), ("remainder8", False), (None, False)),
    *(("auto", True), (None, True)),
]
MIXES: list[dict[str, Any]] = [
    {"master_weights": masters, "stochastic_rounding": stochastic, "state_dtype": dtype}
    for masters, stochastic in MASTERS
    for dtype in (torch.float32, torch.bfloat16, "int8")
]


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> Params:
    return [torch.nn.Parameter(normal(s, dtype, seed=i)) for i, s in enumerate(shapes)]


def mixed() -> Params:
    """Params of every dtype; an empty, strided and large ones (for moments in 8 bits)."""
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float64)
    shapes = ((65, 70), (4100,), (2, 2), (0,), (9,))
    cases = enumerate(zip(shapes, dtypes, strict=True))
    return [torch.nn.Parameter(transposed(normal(s, d, seed=i))) for i, (s, d) in cases]


def clones(params: Params, dtype: torch.dtype | None = None) -> Params:
    return [torch.nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def set_grads(params: Params, seed: int, scale: float = 1.0) -> None:
    for i, p in enumerate(params):
        p.grad = normal(tuple(p.shape), p.dtype, seed=1000 * seed + i) * scale


def tensors(optimizer: torch.optim.Optimizer, params: Params) -> list[torch.Tensor]:
    """Everything a step may write: params, then each one's state in a fixed order."""
    states = [optimizer.state[p] for p in params]
    return [p.detach() for p in params] + [s[key] for s in states for key in sorted(s)]


def master_of(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor:
    """The FP32 number that is trained."""
    state = optimizer.state[p]
    if "remainder" in state:
        return join_master(p.detach(), state["remainder"])
    return state.get("master", p.detach()).float()


class Run:
    """Training of some params. The gradients of a step depend on its number only."""

    def __init__(
        self, make: Callable[..., Any], params: torch.dtype | Params = torch.float32, **options: Any
    ) -> None:
        self.params = parameters(params) if isinstance(params, torch.dtype) else params
        self.optimizer = make(self.params, **options)
        self.steps = 0

    def train(self, steps: int = 1) -> Run:
        for _ in range(steps):
            set_grads(self.params, self.steps)
            self.optimizer.step()
            self.steps += 1
        return self

    def follow(self, other: Run) -> None:
        """A step with the gradients of the other run's last one, in the dtypes of these params."""
        for p, o in zip(self.params, other.params, strict=True):
            p.grad = None if o.grad is None else o.grad.to(p.dtype)
        self.optimizer.step()
        self.steps += 1

    def set(self, **settings: Any) -> None:
        for group in self.optimizer.param_groups:
            group.update(settings)

    @property
    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state[p] for p in self.params]

    def counts(self) -> list[int]:
        return [int(state["step"]) for state in self.states]

    def masters(self) -> list[torch.Tensor]:
        return [master_of(self.optimizer, p).clone() for p in self.params]

    def tensors(self) -> list[torch.Tensor]:
        return tensors(self.optimizer, self.params)

    def copies(self) -> list[torch.Tensor]:
        return [t.clone() for t in self.tensors()]


def assert_same(got: Run | list[torch.Tensor], want: Run | list[torch.Tensor]) -> None:
    got, want = (x.tensors() if isinstance(x, Run) else x for x in (got, want))
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {i} differs"


def assert_close(run: Run, expected: Run) -> None:
    """Within the rounding of the steps of either: a param is rounded twice in each, half a unit
    each time, and its update a dozen times. Adam's is about lr; SGD's buffer holds up to ten
    gradients, about 3 each, times lr = 0.05."""
    group, steps = expected.optimizer.param_groups[0], expected.steps
    update = 12 * group["lr"] if "betas" in group else 2
    states = zip(run.states, expected.states, strict=True)
    for p, o, (mine, theirs) in zip(run.params, expected.params, states, strict=True):
        ulp = torch.finfo(p.dtype).eps
        rtol = 2 * steps * ulp
        torch.testing.assert_close(p.detach(), o.detach(), rtol=rtol, atol=update * steps * ulp)
        for key in MOMENTS:
            a, b = mine.get(key), theirs.get(key)
            assert (a is None) == (b is None)
            if a is not None:
                rtol, atol = (16, 4) if key != "momentum_buffer" else (4 * steps, 8 * steps)
                torch.testing.assert_close(a, b, rtol=rtol * ulp, atol=atol * ulp)


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
