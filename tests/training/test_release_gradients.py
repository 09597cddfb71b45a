"""release_gradients=True: the bits of a plain step, without its gradients, or one sentence."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import KINDS, assert_same, tensors, through_a_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.optim import AdamW, Masters

D = 64
Batch = torch.Tensor


class Program(nn.Module):
    """Layers in any order, each used any number of times, checkpointed or not."""

    def __init__(self, ops: list[tuple[str, int, str]], tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(70, D), nn.Linear(D, 70, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.layers = nn.ModuleList([nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)])
        self.frozen, self.unused = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(3))
        self.ops = ops

    def forward(self, tokens: Batch) -> torch.Tensor:
        x = self.embed(tokens)
        for kind, i, how in self.ops:
            layer = self.layers[i]
            op = (lambda x, f=layer: f(x.tanh()).relu() + f(x)) if kind == "twice" else layer
            x = op(x) if how == "plain" else checkpoint(op, x, use_reentrant=False)
        return self.head(x * self.frozen)


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    tokens = torch.randint(70, (2, 5), generator=torch.Generator().manual_seed(seed))
    return model(tokens).float().square().mean()


def pair(**options: Any) -> tuple[nn.Module, Any]:
    """A model of 16 bits, and its AdamW that releases gradients."""
    model = Program([("once", 0, "plain"), ("once", 1, "plain")], tied=False).bfloat16()
    return model, AdamW(model.parameters(), 1e-2, release_gradients=True, **options)


ways = st.sampled_from(["plain", "plain", "checkpoint"])
ops = st.tuples(st.sampled_from(["once", "twice"]), st.integers(0, 2), ways)
programs = st.lists(ops, min_size=1, max_size=6)


@settings(max_examples=60)
@given(
    ops=programs, tied=st.booleans(), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    kind=st.sampled_from(list(KINDS.values())), mix=st.sampled_from(KINDS["AdamW"].mixes),
    retain=st.booleans(), reload=st.booleans(), options=st.sampled_from(
        [{}, {}, {"max_grad_value": 1e-3}, {"grad_dtype": torch.float32}]),
)  # fmt: skip
def test_a_random_program_has_the_bits_of_a_plain_step(
    ops: list, tied: bool, kind: Any, mix: dict, dtype: torch.dtype, retain: bool, reload: bool,
    options: dict,
) -> None:  # fmt: skip
    """With groups, schedulers, a gradient set by hand, and params frozen and trained in turn; where
    state dicts are exchanged in the middle as well."""
    mix = mix if mix in kind.mixes else {}
    runs = []
    for release in ({}, {"release_gradients": True}):
        model = Program(ops, tied).to(dtype)
        params = list(model.parameters())
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": torch.tensor(5e-3)}]
        optimizer = kind(groups, lr=1e-2, **mix, **options, **release)
        runs.append((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
    for step in range(4):
        for model, optimizer, scheduler in runs:
            model.frozen.requires_grad_(step % 2 == 1)
            model.unused.grad = torch.ones_like(model.unused, dtype=options.get("grad_dtype"))
            if step == 3:  # a write that leaves no trace
                model.head.weight.data.mul_(0.5)
                optimizer.reload_model_params()
            loss_of(model, step).backward(retain_graph=retain)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        (model, plain, _), (twin, ours, _) = runs
        assert_same(
            tensors(ours, list(twin.parameters())), tensors(plain, list(model.parameters()))
        )
        if reload and step == 1:
            states = [through_a_file(optimizer.state_dict()) for optimizer in (ours, plain)]
            for optimizer, state in zip((plain, ours), states, strict=True):
                optimizer.load_state_dict(state)


def test_each_gradient_is_freed_when_it_is_complete() -> None:
    model, optimizer = pair()
    live = []
    for p in model.parameters():
        p.register_hook(lambda g: live.extend(type(q.grad) for q in model.parameters()))
    loss_of(model).backward()
    assert torch.Tensor not in live
    used = [p for p in model.parameters() if p.grad is not None]
    assert all(p.grad.untyped_storage().nbytes() == 0 for p in used)
    with pytest.raises(RuntimeError, match="needs a gradient"):
        used[0].grad.float()
    optimizer.step()
    assert all(p.grad is None for p in used)


BEFORE: list[tuple[Callable[[nn.Module, Any], Any], str]] = [
    (lambda m, o: loss_of(m).backward(create_graph=True), "must be False for create_graph=True"),
    (lambda m, o: mixprec.GradScaler().scale(loss_of(m)).backward(), "GradScaler has scaled"),
    (lambda m, o: (m.head.weight.register_post_accumulate_grad_hook(print), loss_of(m).backward()),
     "with other hooks"),
    (lambda m, o: (setattr(m.embed.weight, "main_grad", torch.zeros(70, D)), loss_of(m).backward()),
     "params with main_grad"),
    (lambda m, o: (setattr(m.embed.weight, "main_grad", torch.zeros(70, D)), o.step()),
     "params with main_grad"),
    (lambda m, o: (o.param_groups[0].update(max_grad_norm=1.0), loss_of(m).backward()),
     "max_grad_norm must be None with release"),
    (lambda m, o: AdamW(m.parameters(), release_gradients=True, max_grad_norm=1.0),
     "max_grad_norm must be None with release"),
    (lambda m, o: (o.param_groups[0]["params"].append(m.embed.weight.detach().requires_grad_()),
                   loss_of(m).backward()), "params that share a storage"),
    (lambda m, o: compiled_backward(m), "under compiled autograd"),
    (lambda m, o: o.step(lambda: loss_of(m).backward()), "step: closure must be None"),
    (lambda m, o: AdamW(m.parameters()), "params must not be those of an optimizer with release"),
    (lambda m, o: copy.copy(o), "params must not be those of an optimizer with release"),
]  # fmt: skip
AFTER: list[tuple[Callable[[nn.Module, Any], Any], str]] = [
    (lambda m, o: loss_of(m).backward(), "aten.add_.Tensor needs a gradient"),
    (lambda m, o: (m.zero_grad(), loss_of(m).backward()), "one backward pass per step"),
    (lambda m, o: (setattr(m.head.weight, "grad", m.head.weight.detach() * 0), o.step()),
     "that other code has replaced since"),
    (lambda m, o: o.zero_grad(), "zero_grad: release_gradients=True has updated the params"),
    (lambda m, o: m.zero_grad(set_to_none=False), "aten.zero_.default needs a gradient"),
    (lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0), "needs a gradient"),
    (lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 1.0), "needs a gradient"),
    (lambda m, o: m.head.weight.grad.float(), "needs a gradient"),
    (lambda m, o: scaler().unscale_(o), "needs a gradient"),
    (lambda m, o: scaler().step(o), "must be False under a GradScaler"),
    (lambda m, o: scaler(torch.amp.GradScaler("cpu")).step(o), "needs a gradient"),
    (lambda m, o: torch.optim.SGD(m.parameters()).step(), "needs a gradient"),
]  # fmt: skip


def compiled_backward(model: nn.Module) -> None:
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss_of(model).backward()


def scaler(kind: Any = None) -> Any:
    made = kind or mixprec.GradScaler()
    made.scale(torch.zeros(1))
    return made


@for_each("act, message, after", [(*r, False) for r in BEFORE] + [(*r, True) for r in AFTER])
def test_what_would_be_wrong_is_refused_and_nothing_changes(
    act: Callable, message: str, after: bool
) -> None:
    model, optimizer = pair()
    if after:
        loss_of(model).backward()
    before = [t.clone() for t in tensors(optimizer, list(model.parameters()))]
    with pytest.raises((ValueError, RuntimeError), match=message):
        act(model, optimizer)
    assert_same(tensors(optimizer, list(model.parameters())), before)


def test_only_the_optimizer_of_the_params_updates_them() -> None:
    model, optimizer = pair()
    before = [p.clone() for p in model.parameters()]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other).backward()
        assert type(other.head.weight.grad) is torch.Tensor
    twin = copy.deepcopy(optimizer)  # with params of its own
    (twin.param_groups[0]["params"][0] * 2).sum().backward()
    assert torch.autograd.grad(loss_of(model), [model.head.weight])[0] is not None
    assert_same(list(model.parameters()), before)
    del optimizer
    gc.collect()
    loss_of(model).backward()
    assert type(model.head.weight.grad) is torch.Tensor
    assert_same(list(model.parameters()), before)
    AdamW(model.parameters())
    with pytest.raises(TypeError, match="Masters: release_gradients must be False, got True: SGD"):
        Masters(torch.optim.SGD, model.parameters(), release_gradients=True)


def test_a_param_whose_gradient_overflows_keeps_its_value() -> None:
    model, optimizer = pair()
    hook = model.layers[0].bias.register_hook(lambda g: g * torch.inf)
    before = {name: p.clone() for name, p in model.named_parameters()}
    loss_of(model).backward()
    optimizer.step()
    hook.remove()
    names = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert "layers.0.bias" in names
    assert "layers.0.weight" not in names
    assert [str(each) for each in optimizer.overflow_report(model)] == [
        "layers.0.bias: 64 Inf among 64"
    ]
    assert optimizer.last_step_skipped
    assert optimizer.skipped == 1
    loss_of(model).backward()
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert optimizer.skipped == 1
    assert [optimizer.state[p]["step"] for p in model.layers[0].parameters()] == [2, 1]


def test_reentrant_checkpoints_are_refused() -> None:
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    _optimizer = AdamW([*first.parameters(), *second.parameters()], release_gradients=True)
    x = checkpoint(first, torch.randn(4, D, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        second(x).square().mean().backward()


def test_memory_report_measures_the_largest_gradients_at_one_time() -> None:
    for tied, most in ((False, 70 * D), (True, 70 * D + D * D)):
        model = Program([("once", 0, "plain")], tied=tied).bfloat16()
        optimizer = AdamW(model.parameters(), release_gradients=True)
        before = [p.clone() for p in model.parameters()]
        tokens = torch.arange(10)
        found = mixprec.memory_report(model, optimizer, tokens, lambda y: y.float().square().mean())
        assert most * 2 <= found.gradients <= (most + 2 * D) * 2
        assert found.states["exp_avg"]
        assert not optimizer.state
        assert_same(list(model.parameters()), before)


@for_each("read", [
    lambda x, layer: torch.no_grad()(layer)(x), lambda x, layer: x @ layer.weight.detach(),
    lambda x, layer: x @ layer.weight.data, lambda x, layer: x * layer.weight[0, 0].item(),
])  # fmt: skip
def test_a_checkpoint_does_not_read_what_was_updated_since(read: Callable) -> None:
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    _optimizer = AdamW([*first.parameters(), *second.parameters()], release_gradients=True)

    def part(x: torch.Tensor) -> torch.Tensor:
        return first(x) * read(x, second) * second.weight.shape[0]

    x = torch.randn(4, D, requires_grad=True)
    loss = second(checkpoint(part, x, use_reentrant=False)).square().mean()
    with pytest.raises(RuntimeError, match=r"calls .* on a param that was updated since"):
        loss.backward()
