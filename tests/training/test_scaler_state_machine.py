"""Random sequences of calls do what they do with torch.amp.GradScaler."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import normal
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scalers import OURS, TORCHS, Make, torch_fused, torch_plain

from mixprec.amp.grad_scaler import GradScaler

Call = tuple[str, tuple]
NO_MINIMUM = 1e-38  # so low that ours, like torch, has none
TORCH_FOR = dict(zip(OURS, TORCHS, strict=False))  # what torch runs in place of ours


@dataclass
class Side:
    """A scaler and two optimizers of one model: everything that one of two runs consists of."""

    scaler: torch.amp.GradScaler
    makes: Sequence[Make]

    def __post_init__(self) -> None:
        shapes = (((3, 4), (4,)), ((4, 2),))
        self.params = [
            [torch.nn.Parameter(normal(s, torch.float32, seed=len(s))) for s in part]
            for part in shapes
        ]
        self.flat = [p for part in self.params for p in part]
        self.optimizers = [make(ps) for make, ps in zip(self.makes, self.params, strict=True)]

    def losses(self, seed: int) -> list[torch.Tensor]:
        (weight, bias), (head,) = self.params
        body = torch.tanh(normal((5, 3), torch.float32, seed) @ weight + bias)
        return [body.square().mean(), (body @ head - 1.0).square().mean()]

    def backward(self, seed: int, which: int) -> None:
        """which: 0 the first loss, which has no head; 1 the second; 2 both, as a list."""
        losses = self.losses(seed)
        for loss in self.scaler.scale(losses if which == 2 else [losses[which]]):
            loss.backward(retain_graph=which == 2)

    def spoil(self, part: int, value: float) -> None:
        if self.params[part][-1].grad is not None:
            self.params[part][-1].grad.view(-1)[-1] = value

    def clip(self, part: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.params[part], 0.1)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def unscale_(self, part: int) -> None:
        self.scaler.unscale_(self.optimizers[part])

    def step(self, part: int, **closure: Callable) -> None:
        self.scaler.step(self.optimizers[part], **closure)

    def closure(self, part: int) -> None:
        self.step(part, closure=lambda: 1.0)

    def update(self, *new_scale: float | torch.Tensor) -> None:
        self.scaler.update(*new_scale)

    def pickle(self) -> None:
        pickle.dumps(self.scaler)

    def call(self, op: str, *args: Any) -> type[Exception] | None:
        """Do one thing, and return what it raised."""
        try:
            getattr(self, op)(*args)
        except Exception as error:
            return type(error)
        return None

    def has_gradients(self, part: int) -> bool:
        return any(p.grad is not None for p in self.params[part])


def assert_same(mine: Side, theirs: Side, exact: bool) -> None:
    """Scale, growth tracker and params; exact where both run the same torch optimizers."""
    a, b = mine.scaler.state_dict(), theirs.scaler.state_dict()
    assert {key: a[key] for key in b} == b
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(mine.flat, theirs.flat, equal_nan=True, **tolerance)


def sides(makes: Sequence[Make], **scaler: Any) -> tuple[Side, Side]:
    return (
        Side(GradScaler(min_scale=NO_MINIMUM, **scaler), makes),
        Side(torch.amp.GradScaler("cpu", **scaler), [TORCH_FOR.get(make, make) for make in makes]),
    )


SETTINGS = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([1.0, 2.0**10, 12345.0, 2.0**126, 2.0**-20]),
        "growth_factor": st.sampled_from([2.0, 1.5, 16.0]),
        "backoff_factor": st.sampled_from([0.5, 0.75, 0.1]),
        "growth_interval": st.sampled_from([1, 2, 3, 7]),
    }
)
PART = st.integers(0, 1)
BAD = st.sampled_from([math.inf, -math.inf, math.nan])
WRONG_SCALES = (torch.ones(2), torch.ones((), requires_grad=True))
ARGUMENTS: dict[str, st.SearchStrategy] = {
    "backward": st.tuples(st.integers(0, 9), st.integers(0, 2)),
    "spoil": st.tuples(PART, BAD),
    **dict.fromkeys(("unscale_", "clip", "step", "closure"), st.tuples(PART)),
    "update": st.tuples(),
    "new_scale": st.tuples(st.sampled_from([4.0, 2.0**20, torch.tensor(0.5), *WRONG_SCALES])),
    **dict.fromkeys(("zero_grad", "pickle"), st.tuples()),
}
OFTEN = ("backward", "backward", "step", "step", "step", "unscale_", "update", "update", "spoil")
CALL = st.sampled_from([*OFTEN, "clip", "closure", "new_scale", "zero_grad", "pickle"]).flatmap(
    lambda op: st.tuples(st.just(op.replace("new_scale", "update")), ARGUMENTS[op])
)
CALLS = st.lists(CALL, min_size=5, max_size=40)
BOTH = st.tuples(st.sampled_from(TORCHS), st.sampled_from(TORCHS))


@settings(max_examples=150)
@given(makes=BOTH, scaler=SETTINGS, calls=CALLS, started=st.booleans())
@example(  # what no user should do: everything twice, in the wrong order
    makes=(torch_plain, torch_fused),
    scaler={"growth_interval": 1},
    calls=[("update", ()), ("step", (0,)), ("unscale_", (1,)), ("backward", (0, 2)),
           ("unscale_", (0,)), ("unscale_", (0,)), ("spoil", (0, math.nan)), ("step", (0,)),
           ("step", (0,)), ("unscale_", (0,)), ("update", ()), ("update", ()), ("step", (1,)),
           ("closure", (1,)), ("update", ()), ("backward", (1, 2)), ("unscale_", (0,)),
           ("pickle", ()), *(("update", (scale,)) for scale in WRONG_SCALES), ("zero_grad", ()),
           ("step", (1,)), ("update", ()), ("pickle", ())],
    started=False,
)  # fmt: skip
def test_any_calls_in_any_order_do_what_torch_does(
    makes: tuple[Make, Make], scaler: dict, calls: list[Call], started: bool
) -> None:
    """With torch's optimizers: the same errors, scale, tracker, params and gradients, bit by bit.

    Misuse included, such as gradients that go bad after unscale_ looked at them.
    """
    mine, theirs = sides(makes, **scaler)
    for op, arguments in [("backward", (0, 2)), *calls] if started else calls:
        assert mine.call(op, *arguments) is theirs.call(op, *arguments), op
        assert_same(mine, theirs, exact=True)
    for p, q in zip(mine.flat, theirs.flat, strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=0.0, atol=0.0, equal_nan=True)


@settings(max_examples=60)
@given(makes=st.tuples(*2 * [st.sampled_from([*TORCHS, *OURS])]), scaler=SETTINGS,
       calls=CALLS)  # fmt: skip
def test_any_calls_with_our_optimizers(
    makes: tuple[Make, Make], scaler: dict, calls: list[Call]
) -> None:
    """Ours, or one of each, against torch's scaler and torch's optimizers, within rounding.

    But for two differences that are meant: step() leaves the gradients scaled, so they are cleared
    after it; and a step without gradients fails before it changes the state.
    """
    mine, theirs = sides(makes, **scaler)
    for op, arguments in calls:
        if op in ("step", "unscale_") and not mine.has_gradients(*arguments):
            continue
        assert mine.call(op, *arguments) is theirs.call(op, *arguments), op
        if op == "step":
            for side in (mine, theirs):
                side.optimizers[arguments[0]].zero_grad()
        assert_same(mine, theirs, exact=False)
