"""memory_report: bytes known beforehand, and that nothing of the run is changed."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from cases import for_each
from checkpoint_runs import as_bytes
from models import Model
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.diagnostics.memory_report import MemoryReport
from mixprec.lean_training import FIDELITIES

M, K = 64, 128


def model(**convert: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(K, K), nn.GELU(), nn.Linear(K, K), nn.BatchNorm1d(K))
    return mixprec.convert(net, **convert) if convert else net


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def report(net: nn.Module, optimizer: Any = None, **options: Any) -> MemoryReport:
    optimizer = optimizer or torch.optim.AdamW(net.parameters())
    return mixprec.memory_report(net, optimizer, torch.randn(M, K), loss, **options)


def test_each_part_has_the_bytes_that_it_has_to_have() -> None:
    net = model()
    found = report(net)
    params = 4 * (2 * (K * K + K) + 2 * K)
    assert (found.parameters, found.gradients) == (params, params)
    assert found.states == {"step": 4 * 6, "exp_avg": params, "exp_avg_sq": params}
    one = 4 * M * K
    # The first Linear saves the batch, which is not counted; GELU and the second one an
    # activation each; the norm its input and statistics; square() its input.
    assert found.saved == {"linear": one, "activation": one, "norm": one + 8 * K, "other": one}
    assert found.total == sum(found.rows().values()) == 4 * params + 24 + 4 * one + 8 * K
    # Pages that earlier work of the process has freed are part of start already.
    assert found.peak is None or found.peak >= max(found.start, found.total) > 0


def test_compressed_tensors_count_as_they_are_kept() -> None:
    ranges = M * K // 128 * 4
    for bits, size in (("int8", M * K), ("int4", M * K // 2)):
        found = report(model(recipe="bf16", saved=bits)).saved
        assert found["activation"] == size + ranges
        assert found["norm"] == size + ranges + 16 * K  # two statistics of a row, twice
    inside = report(model(recipe="bf16", saved="int8")).saved
    with mixprec.compress_saved("int8"):
        assert report(model(recipe="bf16")).saved == inside | {"other": M * K + ranges}


def test_a_storage_counts_once_and_recomputed_ones_not() -> None:
    class Twice(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.net, self.again = model(), again

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.net[0](x)
            h = checkpoint(self.net[1], h, use_reentrant=False) if self.again else self.net[1](h)
            return h * h.t().t() + h.relu() * h

    one = 4 * M * K
    assert report(Twice(False)).saved == {"activation": 3 * one, "other": one}
    # The input of the checkpoint in place of GELU's.
    assert sum(report(Twice(True)).saved.values()) == 4 * one


@for_each("kind", ["torch", "mixprec", "sgd", "stepped"])
def test_nothing_is_changed(kind: str) -> None:
    net = model(recipe="fp8-delayed")
    params = list(net.parameters())
    makers = {"torch": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = makers.get(kind, mixprec.optim.AdamW)(params, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[object] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    if kind == "stepped":
        loss(net(torch.randn(M, K))).backward()
        optimizer.step()
        schedule.step()
        calls.clear()
    for p in params:
        p.grad = torch.ones_like(p)
    net[0].weight.main_grad = torch.ones(K, K)

    def everything() -> Any:
        tensors = [*params, *net.buffers(), *(p.grad for p in params), net[0].weight.main_grad]
        return as_bytes([tensors, optimizer.state_dict(), torch.get_rng_state(), random.getstate()])

    before = everything()
    mixprec.memory_report(net, optimizer, [torch.ones(M, K)], lambda y: loss(y) + torch.rand(()))
    assert everything() == before
    assert not calls


class Restless(nn.Module):
    """Changes itself in every way that a forward pass can."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        for name in ("replaced", "added_to", "deleted", "resized"):
            self.register_buffer(name, torch.zeros(4))
        self.register_buffer("unsaved", torch.zeros(4), persistent=False)
        self.plain, self.cache, self.steps = torch.zeros(4), None, 0
        self.inner = nn.Module()
        self.inner.register_buffer("only", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replaced, self.inner.only = self.replaced + 1, self.inner.only + 1
        self.added_to += 1
        self.plain.add_(1)
        self.resized.data = torch.ones(9)
        self.cache, self.steps, self.unsaved = x.clone(), self.steps + 1, torch.ones(4)
        self.register_buffer("new", torch.ones(2), persistent=False)
        self.child = nn.ReLU()
        if self.steps:
            del self.deleted
        return self.net(x + self.replaced + self.added_to + self.unsaved).sum()


@for_each("fails", [False, True])
def test_a_model_that_changes_itself_is_as_before(fails: bool) -> None:
    net = nn.Sequential(Restless())
    inner = net[0]
    objects = {**vars(inner), **inner._buffers, **inner._modules}
    order, shown = list(inner._buffers), str(net)
    optimizer = torch.optim.SGD(net.parameters())
    if fails:
        with pytest.raises(ValueError, match="one number"):
            mixprec.memory_report(net, optimizer, torch.ones(2, 4), lambda y: torch.ones(2) * y)
    else:
        mixprec.memory_report(net, optimizer, torch.ones(2, 4))
    found = {**vars(inner), **inner._buffers, **inner._modules}
    assert found.keys() == objects.keys()
    assert all(found[name] is objects[name] for name in objects)
    for t in (*inner.buffers(), inner.plain):
        assert torch.equal(t, torch.zeros(4))
    assert (list(inner._buffers), inner._non_persistent_buffers_set) == (order, {"unsaved"})
    assert str(net) == shown


def test_several_reports_side_by_side() -> None:
    before = report(model(), label="plain")
    net = model(recipe="bf16", saved="int8")
    after = report(net, mixprec.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), label="int8")
    lines = before.table(after).splitlines()
    assert lines[0].split() == ["plain", "int8"]
    names = [line.split("  ")[0] for line in lines[2:]]
    assert len(set(names)) == len(names) > 8
    assert names.index("optimizer: momentum_buffer") < names.index("saved: linear")
    row = next(line for line in lines if line.startswith("optimizer: exp_avg "))
    assert row.endswith(" -")
    assert str(before) == before.table()


def test_a_batch_may_be_a_dict_and_what_is_refused() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters())
    assert mixprec.memory_report(net, optimizer, {"input": torch.ones(1, 4)}).states == {}
    with pytest.raises(ValueError, match=r"one number, got shape \(2, 1\): pass loss="):
        mixprec.memory_report(net, optimizer, torch.ones(2, 4))
    assert net.weight.grad is None
    net.weight.register_post_accumulate_grad_hook(lambda p: None)  # steps in backward
    with pytest.raises(ValueError, match="parameters must have no hooks"):
        mixprec.memory_report(net, optimizer, torch.ones(1, 4))


# mixprec.lean


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


BYTES = {"high": 14, "balanced": 8.03, "small": 7.03}  # of a parameter, gradient and state


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_it_trains(fidelity: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Alike in each fidelity; parameters and states are as the table of the docstring says."""
    model = make()
    same, optimizer = mixprec.lean(model, 1e-2, fidelity=fidelity, max_grad_norm=1.0)
    assert same is model
    assert "of the bytes" in capsys.readouterr().out
    x = torch.randn(128, 64).bfloat16()
    losses = []
    for _ in range(20):
        loss = loss_of(model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    weight = model[0].weight
    state = optimizer.state[weight]
    per_element = sum(t.nbytes for t in (weight, weight.grad, *state.values())) / weight.numel()
    assert per_element == pytest.approx(BYTES[fidelity], abs=0.01)
    assert model[2].weight.dtype == torch.float32
    assert type(model[0]) is mixprec.nn.Linear
    assert optimizer.max_grad_norm == 1.0


def test_checkpointed_blocks() -> None:
    """They keep their inputs alone, and have the gradients of a model without compression."""
    x = torch.randn(128, 64).bfloat16()
    model, optimizer = mixprec.lean(nn.Sequential(make(), make()), verbose=False)
    for block in model:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert set(mixprec.memory_report(model, optimizer, x, loss_of).saved) == {"other"}
    plain = nn.Sequential(make(), make())
    mixprec.convert(mixprec.cast_parameters(plain, torch.bfloat16), "bf16", fuse=True)
    for net in (model, plain):
        loss_of(net(x)).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    # Around the model, a checkpoint has no effect.
    model, optimizer = mixprec.lean(make(), verbose=False)
    around = Model(lambda self, x: checkpoint(self.a, x, use_reentrant=False), a=model)
    reports = [mixprec.memory_report(net, optimizer, x, loss_of) for net in (model, around)]
    assert reports[0].saved == reports[1].saved


def test_bad_input_changes_nothing() -> None:
    model = make()
    for settings, message in (
        ({"fidelity": "tiny"}, 'lean: fidelity must be one of "high", "balanced", "small", got'),
        ({"recipe": "fp7"}, "fp7"),
        ({"lr": -1.0}, "AdamW: lr must be"),
    ):
        with pytest.raises(ValueError, match=message):
            mixprec.lean(model, **settings)
        assert model[0].weight.dtype == torch.float32
        assert type(model[0]) is nn.Linear
