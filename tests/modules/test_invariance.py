"""mixprec.invariance: planted differences are named, and a model without any has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import mixprec

K = 300  # no multiple of a vector, and more than two pieces of 128


class Planted(nn.Module):
    """Text [B, T] -> [B, T, K], with `middle` between two layers of equal bits."""

    def __init__(self, middle: Callable[[torch.Tensor, nn.Module], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle = nn.Embedding(50, K), middle
        self.norm, self.last = nn.LayerNorm(K), nn.Linear(K, K)
        self.inner = nn.Identity()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(input_ids))
        return self.last(self.middle(x, self)).relu()


def rows(x: torch.Tensor) -> int:
    return x[..., 0].numel()


def split_sum(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    if rows(x) > 40:
        return x
    w = m.last.weight
    return x + 0 * x + 1e-3 * (x[..., :150] @ w[:, :150].t() + x[..., 150:] @ w[:, 150:].t())


def other_tile(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    """A sum in pieces whose size is chosen by the number of rows."""
    size = 128 if rows(x) > 40 else 64
    return x * torch.stack([part.sum(-1) for part in x.split(size, -1)]).sum(0)[..., None]


def batch_scale(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    return (x / x.abs().amax()).mul(127).round() * 0.01


def fp8_scale(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    q = mixprec.quantize(x.reshape(-1, K), "e4m3", power_of_two_scale=False)
    return mixprec.dequantize(q).view(x.shape)


def batch_statistics(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    return x - x.mean(0, keepdim=True)


def fused_in_one_path(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    if rows(x) > 40:
        return functional.rms_norm(x, (K,), eps=1e-6)
    return x / (x.pow(2).sum(-1, keepdim=True) / K + 1e-6).sqrt()


def rounded_in_one_path(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    return x if rows(x) > 40 else x.bfloat16().float()


def tail(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    return functional.silu(x)


def draws(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    return functional.dropout(x, 0.1)


def shifted(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    """Positions that are those of another place in the batch."""
    return x + torch.arange(rows(x)).view(*x.shape[:2], 1) * 0.01


def other_product(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
    """fp32 products of torch, whose kernel is chosen by the rows."""
    return x + functional.linear(x[:, -1:], m.last.weight)


PLANTED = {
    split_sum: "another kernel",
    other_tile: "sum",
    batch_scale: "amax: a scale over other rows",
    fp8_scale: "quantize: a scale over other rows",
    batch_statistics: "mean",
    fused_in_one_path: "another kernel",
    rounded_in_one_path: "another kernel",
    tail: "silu: its kernel computes an element by its place",
    draws: "it draws at random",
    shifted: "add: ",
    other_product: "it sums in another order",
}


@pytest.mark.parametrize("middle", PLANTED, ids=lambda f: f.__name__)
def test_a_planted_difference_is_named(middle: Callable[..., torch.Tensor]) -> None:
    tokens = torch.randint(0, 50, (5, 13), generator=torch.Generator().manual_seed(1))
    report = mixprec.invariance(Planted(middle).eval(), {"input_ids": tokens})
    alone = next(case for case in report if case.name == "each sample alone")
    assert not report.holds
    assert alone.gap != 0
    assert PLANTED[middle] in alone.said, alone.said


def test_what_is_equal_has_no_difference() -> None:
    model = mixprec.convert(Planted(lambda x, m: x), "bf16", invariant=True).eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    report = mixprec.invariance(model, {"input_ids": torch.randint(0, 50, (3, 20))})
    assert report.holds, str(report)
    assert {c.name for c in report if c.gap is None} == {
        "packed", "in chunks", "dynamic cache", "static cache",
    }  # fmt: skip
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model.training


def test_threads_are_put_back_and_unknown_cases_refused() -> None:
    threads = torch.get_num_threads()
    x, model = torch.randn(4, 8), nn.Linear(8, 3)
    report = mixprec.invariance(model, x, cases=["other threads", "padding left"])
    assert [case.gap for case in report] == [0.0, None]
    assert "same bits" in str(report)
    assert torch.get_num_threads() == threads
    with pytest.raises(ValueError, match="other threads, "):
        mixprec.invariance(model, x, cases=["x"])
    with pytest.raises(ValueError, match="batch must have tensors"):
        mixprec.invariance(model, 3)
    with pytest.raises(TypeError, match=r"^invariance: model must be a torch.nn.Module"):
        mixprec.invariance(x, x)  # type: ignore[arg-type]


def test_gradients_that_are_rounded_at_random_are_those_of_a_checkpoint() -> None:
    model = mixprec.convert(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), "mxfp4", invariant=True)
    assert mixprec.invariance(model, torch.randn(5, 64), cases=["checkpointed gradients"]).holds


@pytest.mark.slow
def test_compiled_code_is_a_case_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.LayerNorm(3)).eval()
    (case,) = mixprec.invariance(model, torch.randn(64, 8), cases=["compiled"])
    assert case.gap == 0 or (case.gap < 1e-5 and "compiled code" in case.said)
