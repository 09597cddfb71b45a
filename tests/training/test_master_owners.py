"""The FP32 values behind a 16-bit param stay when it changes hands."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import lifecycles
import pytest
import torch
from cases import normal
from independent import assert_same_lists
from ranks import on_ranks
from torch import nn
from torch.nn.utils import parametrize

import mixprec
from mixprec import _masters, cast_parameters
from mixprec.optim import SGD, Adam, AdamW, Masters, Muon, fp32_state_dict

R16: dict[str, Any] = {"master_weights": "remainder16"}


@pytest.mark.parametrize("seed", range(30))
def test_random_lives(seed: int, tmp_path: Path) -> None:
    lifecycles.Life(seed, tmp_path).live()


@pytest.mark.exhaustive
def test_three_thousand_random_lives(tmp_path: Path) -> None:
    for seed in range(30, 3030):
        lifecycles.Life(seed, tmp_path).live()


def on_two_ranks(kind: str, options: dict[str, Any], optimizer_first: bool) -> bool:
    """Masters of ranks that begin with other values, after DDP has made their params equal; of
    ranks that begin with the same, after fully_shard."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(dist.get_rank() if kind == "ddp" else 0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 7))
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    for value in first.values():
        dist.broadcast(value, 0)
    model[0].requires_grad_(False)
    cast_parameters(model, torch.bfloat16)

    def make() -> torch.optim.Optimizer:
        return AdamW(model.parameters(), lr=0.0, weight_decay=0.0, **options)

    optimizer = make() if optimizer_first else None
    if optimizer is not None:
        for p in model[1].parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        wrapped: nn.Module = model
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = optimizer or make()
    for trained in (False, True):
        if trained:
            model[0].requires_grad_(True)
            wrapped = DistributedDataParallel(model) if kind == "ddp" else model
        wrapped(torch.ones(4, 32).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in fp32_state_dict(model).items():
        whole = value.full_tensor() if kind == "fsdp" else value
        off = (whole - first[name]).abs().max()
        assert off < 1e-8, (name, off)
        other = whole.clone()
        dist.broadcast(other, 0)
        assert torch.equal(whole, other)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "optimizer_first"),
    [
        *(("ddp", {}, True), ("ddp", {}, False), ("ddp", R16, False)),
        *(("fsdp", {}, False), ("fsdp", R16, False)),
    ],
)
def test_wrappers_of_several_ranks(
    kind: str, options: dict[str, Any], optimizer_first: bool
) -> None:
    names = {"kind": kind, "options": options, "optimizer_first": optimizer_first}
    assert all(on_ranks(2, on_two_ranks, **names))


def linear(dtype: torch.dtype = torch.bfloat16, width: int = 16) -> nn.Linear:
    return cast_parameters(nn.Linear(width, width, bias=False), dtype)


def step(optimizer: torch.optim.Optimizer, grad: float = 0.0) -> None:
    """With gradients that are all `grad`."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, grad)
    optimizer.step()


def exact(model: nn.Module, name: str = "weight") -> torch.Tensor:
    return fp32_state_dict(model)[name]


def test_two_optimizers_with_other_forms_take_turns() -> None:
    p = nn.Parameter(torch.ones(64).bfloat16())
    first, second = SGD([p], lr=1e-5), SGD([p], lr=1e-5, **R16)
    for optimizer in (first, first, second, second, first, second) * 5:
        step(optimizer, 1.0)
    torch.testing.assert_close(exact(nn.ParameterList([p]), "0"), torch.full((64,), 1 - 30e-5))


def test_torchs_optimizer_of_a_model_cast_to_fp32_gets_all_bits() -> None:
    model = nn.Linear(8, 8)
    want = model.weight.detach().clone()
    cast_parameters(model, torch.bfloat16).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.ones(1, 8)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert torch.equal(model.weight, want)


def test_a_frozen_parameter_in_an_optimizer_of_torch_keeps_what_it_has() -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    want = model[0].weight.detach().clone()
    cast_parameters(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 8).bfloat16()).float().square().mean().backward()
    with pytest.warns(UserWarning, match="updates 2 parameters"):
        optimizer.step()
    assert torch.equal(exact(model, "0.weight"), want)


def test_what_is_exact_in_16_bits_takes_no_memory_while_it_is_frozen() -> None:
    model = nn.Linear(8, 8).bfloat16().float().requires_grad_(False)
    cast_parameters(model, torch.bfloat16)
    assert not any(vars(model.weight).values())


@pytest.mark.parametrize("kind", [Adam, SGD, Muon])
def test_options_of_a_group(kind: type) -> None:
    """Masters and FP32 moments for one param, stochastic rounding and few bits for another: each as
    in an optimizer of its own, under one norm."""

    def params() -> list[nn.Parameter]:
        return [nn.Parameter(normal((80, 64), torch.bfloat16, seed=i)) for i in range(2)]

    extra: dict[str, Any] = {"lr": 0.01, **({"momentum": 0.9} if kind is SGD else {})}
    few = {"stochastic_rounding": True, "state_dtype": "bf16" if kind is Muon else "int8"}
    together, alone = params(), params()
    one = kind([{"params": together[:1]}, {"params": together[1:], **few}], **extra)
    two = kind(alone[:1], **extra), kind(alone, **extra, **few)
    for step in range(4):
        for p, q in zip(together, alone, strict=True):
            p.grad, q.grad = (normal((80, 64), torch.bfloat16, seed=10 * step) for _ in range(2))
        one.step()
        two[0].step()
        alone[0].grad = None
        two[1].step()
        assert_same_lists(together, alone)
        if step == 1:  # the options are not part of the state
            state = copy.deepcopy(one.state_dict())
            for group in state["param_groups"]:
                group.pop("stochastic_rounding", group.pop("state_dtype", None))
            one.load_state_dict(state)
    norm = torch.stack([p.grad.double().norm() for p in together]).norm()
    torch.testing.assert_close(one.grad_norm, norm)
    assert "master" in one.state[together[0]]
    assert "master" not in one.state[together[1]]
    assert "1 bfloat16 with FP32 masters, 1 bfloat16 with stochastic rounding" in repr(one)
    for wrong, message in (
        ({"stochastic_rounding": True, "master_weights": "fp32"}, "is for bf16 params without mas"),
        ({"state_dtype": torch.float16}, "state_dtype must be"),
    ):
        with pytest.raises(ValueError, match=message):
            kind([{"params": params(), **wrong}])


def test_the_state_of_another_params_shape_is_refused_by_name() -> None:
    for kind in (lambda p: Masters(torch.optim.NAdam, p), AdamW):
        a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 3))
        optimizer = kind([("a", a), ("b", b)])
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        optimizer.step()
        state = optimizer.state_dict()
        state["state"] = {0: state["state"][1], 1: state["state"][0]}
        with pytest.raises(ValueError, match=r"exp_avg must be .*\(4,\), got \(2, 3\).*param a"):
            optimizer.load_state_dict(state)


def test_setstate_takes_what_torch_takes() -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    optimizer, params = AdamW([p]), nn.ParameterList([p])
    step(optimizer, 1.0)
    before = exact(params, "0")
    optimizer.__setstate__({"state": defaultdict(dict)})
    assert not optimizer.state
    assert torch.equal(exact(params, "0"), before)


@pytest.mark.parametrize("options", [{"state_dtype": "int8"}, {"stochastic_rounding": True}, R16])
def test_groups_that_are_edited(options: dict[str, Any]) -> None:
    """A param that is appended, and one that is cut with its state left behind."""
    first, second = (nn.Parameter(normal((80, 64), torch.bfloat16, seed=i)) for i in range(2))
    optimizer = Adam([first], **options)
    params = optimizer.param_groups[0]["params"]
    params.append(second)
    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[second]["step"] == 1
    cut = params[0] = nn.Parameter(first.detach()[:5].clone())
    cut.grad, second.grad = torch.ones_like(cut), torch.ones_like(second)
    optimizer.state[cut] = optimizer.state.pop(first)
    before = second.detach().clone()
    with pytest.raises(ValueError, match=r"^Adam: the .* of a param of shape \(5, 64\).*cut or"):
        optimizer.step()
    assert torch.equal(second, before)
    params.append(cut)
    with pytest.raises(ValueError, match="each parameter once"):
        optimizer.step()


@pytest.mark.parametrize("options", [{}, R16])
def test_a_file_has_the_masters_of_the_weights_that_are_loaded(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Once, beside the optimizer's state; not those of weights that have gone."""
    model = linear(width=128)
    optimizer = SGD(model.parameters(), lr=0.0, **options)
    step(optimizer)
    sizes = []
    for name, parts in (("a", {"model": model}), ("b", {"model": model, "optimizer": optimizer})):
        mixprec.save_checkpoint(tmp_path / name, rng=False, **parts)
        sizes.append((tmp_path / name).stat().st_size)
    assert sizes[1] - sizes[0] < 8192  # less than half of the remainders
    model.load_state_dict({"weight": model.weight.roll(1)})
    mixprec.save_checkpoint(tmp_path / "c", model=model)
    other = linear(width=128)
    mixprec.load_checkpoint(tmp_path / "c", model=other)
    assert torch.equal(exact(other), model.weight.float())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_of_tied_weights_has_their_values(frozen: bool, tmp_path: Path) -> None:
    model, wide = Tied().requires_grad_(not frozen), Tied()
    want = model.head.weight.detach().clone()
    mixprec.save_checkpoint(tmp_path / "c.pt", model=cast_parameters(model, torch.bfloat16))
    mixprec.load_checkpoint(tmp_path / "c.pt", model=wide, convert_dtype=True)
    assert torch.equal(wide.head.weight, want)


@pytest.mark.parametrize("options", [{}, R16])
@pytest.mark.parametrize("model_first", [None, False, True])
def test_what_is_saved_has_the_values_loaded_since_the_last_step(
    model_first: bool | None, options: dict[str, Any]
) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = linear()
        return model, SGD(model.parameters(), lr=0.0, momentum=0.9, **options)

    run, new = make(), normal((16, 16), torch.float32)
    step(run[1])
    run[0].load_state_dict({"weight": new})
    other = copy.deepcopy(run) if model_first is None else make()
    if model_first is not None:
        states = fp32_state_dict(run[0]), run[1].state_dict()
        for part in (0, 1) if model_first else (1, 0):
            other[part].load_state_dict(states[part])
    step(other[1])
    assert torch.equal(exact(other[0]), new)


@pytest.mark.parametrize("options", [{}, R16])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["file", "16 bits"])
def test_weights_without_masters_are_what_counts(
    how: str, frozen: bool, stepped: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """And the masters of the model again, where its own weights come back."""
    source, model = nn.Linear(16, 16, bias=False).bfloat16(), linear()
    optimizer = SGD(model.parameters(), lr=0.0, **options)
    for _ in range(2 * stepped):
        step(optimizer)
    model.weight.requires_grad_(not (frozen and stepped))
    before, own = exact(model), copy.deepcopy(model.state_dict())
    if how == "file":
        mixprec.save_checkpoint(tmp_path / "c.pt", model=source)
        mixprec.load_checkpoint(tmp_path / "c.pt", model=model)
    else:
        model.load_state_dict(source.state_dict())
        model.load_state_dict(own)
        assert torch.equal(exact(model), before)
        model.load_state_dict(source.state_dict())
    assert torch.equal(exact(model), source.weight.float())
    model.weight.requires_grad_(True)
    step(optimizer)
    assert torch.equal(exact(model), source.weight.float())


def test_a_state_that_is_saved_after_a_cast_has_the_form_of_the_next_step() -> None:
    """FP16 parameters have FP32 masters, with remainder16 too; BF16 ones then have remainders."""
    model = linear(torch.float16)
    optimizer = SGD(model.parameters(), momentum=0.9, **R16)
    step(optimizer, 1.0)
    want = exact(model)
    cast_parameters(model, torch.bfloat16)
    assert optimizer.state_dict()["state"][0].keys() == {"step", "momentum_buffer", "remainder"}
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(exact(model), want)


def test_after_float_all_but_torch_have_all_bits(tmp_path: Path) -> None:
    model = nn.Linear(16, 16, bias=False)
    want = model.weight.detach().clone()
    cast_parameters(model, torch.bfloat16).float()
    mixprec.save_checkpoint(tmp_path / "c.pt", model=model)
    average, other = mixprec.optim.AveragedModel(model), nn.Linear(16, 16, bias=False)
    average.update_parameters(model)
    mixprec.load_checkpoint(tmp_path / "c.pt", model=other)
    for each in (other, average.module, cast_parameters(model, torch.float32)):
        assert torch.equal(each.weight, want)


def test_an_optimizer_does_not_bring_back_what_was_given_up() -> None:
    """keep_masters=False, and FP32 weights that a frozen param is loaded with."""
    for frozen in (False, True):
        model = linear()
        optimizer = SGD(model.parameters(), lr=0.0, momentum=0.9)
        for _ in range(2):
            step(optimizer)
            model.weight.requires_grad_(not frozen)
            if frozen:
                model.load_state_dict({"weight": model.weight.detach().float()})
            else:
                cast_parameters(model, torch.bfloat16, keep_masters=False)
            model.weight.requires_grad_(True)
            assert torch.equal(exact(model), model.weight.float())
        step(optimizer)
        assert torch.equal(exact(model), model.weight.float())


def test_a_checkpoint_into_a_model_made_without_memory(tmp_path: Path) -> None:
    source = linear()
    with torch.device("meta"):
        model = linear()
    model.to_empty(device="cpu")
    mixprec.save_checkpoint(tmp_path / "c.pt", model=source)
    mixprec.load_checkpoint(tmp_path / "c.pt", model=model)
    assert torch.equal(exact(model), exact(source))


@pytest.mark.parametrize(("form", "unit"), [("remainder16", 1), ("remainder8", 256)])
def test_ties_of_remainders_stay_through_other_dtypes(form: str, unit: int) -> None:
    """Values halfway between two BF16 numbers, which the param has rounded to even."""
    bits = torch.arange(0x3F80, 0x4080, dtype=torch.int32) << 16 | 0x8000
    model = nn.Linear(16, 16, bias=False)
    model.weight.data = bits.view(torch.float32).view(16, 16)
    optimizer = SGD(cast_parameters(model, torch.bfloat16).parameters(), master_weights=form)
    before = fp32_state_dict(model, optimizer)["weight"]
    assert (before.view(torch.int32).flatten() - bits).abs().max() <= unit
    assert torch.equal(exact(model.float()), before)
    cast_parameters(model, torch.float16)
    assert torch.equal(exact(model), before)


def test_a_checkpoint_in_16_bits_continues_in_fp32(tmp_path: Path) -> None:
    for options in ({}, R16):
        low, wide = cast_parameters(nn.Linear(16, 8), torch.bfloat16), nn.Linear(16, 8)
        optimizer = AdamW(low.parameters(), **options)
        low(torch.ones(4, 16).bfloat16()).float().square().mean().backward()
        optimizer.step()
        path, its = tmp_path / "c.pt", AdamW(wide.parameters())
        mixprec.save_checkpoint(path, model=low, optimizer=optimizer)
        mixprec.load_checkpoint(path, model=wide, optimizer=its, convert_dtype=True)
        assert torch.equal(wide.weight, fp32_state_dict(low)["weight"])


def _replace(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())


def _assign(model: Tied) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def _cast_again(model: Tied) -> None:
    cast_parameters(model, torch.float32)
    _replace(model)
    cast_parameters(model, torch.bfloat16)


@pytest.mark.parametrize("untie", [_replace, _assign, _cast_again])
@pytest.mark.parametrize("form", ["fp32", "remainder16"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_weight_that_is_no_longer_tied_has_a_master_of_its_own(
    untie: Any, form: str, copied: bool
) -> None:
    model = cast_parameters(Tied(), torch.bfloat16)
    untie(model)
    model = copy.deepcopy(model) if copied else model
    before = fp32_state_dict(model)
    optimizer = SGD(model.parameters(), lr=1e-4, master_weights=form)
    for _ in range(10):
        model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
        model.head.weight.grad = -torch.ones_like(model.head.weight)
        optimizer.step()
    after = fp32_state_dict(model)
    for name, sign in (("embedding.weight", -1), ("head.weight", 1)):
        torch.testing.assert_close(after[name] - before[name], torch.full((8, 8), sign * 1e-3))


@pytest.mark.parametrize("second", ["fp32", "remainder16"])
def test_a_second_optimizer_sees_the_steps_of_groups_without_gradients_before(second: str) -> None:
    a, b = (nn.Parameter((torch.rand(64) + 1).bfloat16()) for _ in range(2))
    first = SGD([{"params": [a]}, {"params": [b]}], lr=1e-4, master_weights="remainder16")
    other = SGD([a, b], lr=1e-4, master_weights=second)
    right = a.detach().float()
    for optimizer, with_a in ((first, 1), (other, 0), (first, 0), *[(first, 1)] * 5, (other, 1)):
        a.grad, b.grad = (torch.ones_like(a) if with_a else None), torch.ones_like(b)
        optimizer.step()
        right -= 1e-4 * with_a
    torch.testing.assert_close(_masters.values_of(a), right)


def _loads_fp32(model: nn.Module, optimizer: SGD, p: torch.Tensor, name: str) -> None:
    """FP32 values that round to nearly the same 16 bits become the master."""
    new = _masters.values_of(p) + torch.randn(p.shape) * 2e-4
    model.load_state_dict({name: new})
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(_masters.values_of(p), new)


def test_fp32_values_are_loaded_after_an_optimizer_was_copied_before_its_model() -> None:
    model = linear()
    optimizer = SGD(model.parameters(), lr=1e-4)
    step(optimizer, 1.0)
    optimizer, model = copy.deepcopy((optimizer, model))
    _loads_fp32(model, optimizer, model.weight, "weight")


@pytest.mark.parametrize("copied", [False, True])
def test_a_parameter_keeps_its_master_in_another_place(copied: bool) -> None:
    model = linear()
    model = copy.deepcopy(model) if copied else model
    parametrize.register_parametrization(model, "weight", nn.Identity())
    name = "parametrizations.weight.original"
    optimizer = SGD(model.parameters(), lr=1e-4)
    step(optimizer, 1.0)
    assert torch.equal(exact(copy.deepcopy(model), name), exact(model, name))
    _loads_fp32(model, optimizer, model.get_parameter(name), name)


def test_a_model_in_16_bits_keeps_its_masters_once_it_is_cast() -> None:
    model = nn.Linear(16, 16, bias=False).bfloat16()
    optimizer = SGD(model.parameters(), lr=1e-4)
    step(optimizer, 1.0)
    cast_parameters(model, torch.bfloat16)
    assert torch.equal(exact(copy.deepcopy(model)), exact(model))
    _loads_fp32(model, optimizer, model.weight, "weight")


def test_a_cast_from_fp16_keeps_the_bits_that_bf16_lacks() -> None:
    model = nn.Linear(64, 64).half()
    before = {name: p.detach().float() for name, p in model.named_parameters()}
    after = fp32_state_dict(cast_parameters(model, torch.bfloat16))
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_model_that_holds_its_optimizer_is_copied() -> None:
    model = linear()
    model.optimizer = SGD(model.parameters(), lr=1e-4)
    assert torch.equal(exact(copy.deepcopy(model)), exact(model))


def test_a_norm_that_torch_casts_later_takes_fp32_values() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model = cast_parameters(model, torch.bfloat16).to(torch.bfloat16)
    optimizer, p = SGD(model.parameters(), lr=1e-4), model[1].weight
    p.grad = torch.ones_like(p)
    optimizer.step()
    new = _masters.values_of(p) + 1e-4
    model.load_state_dict({"1.weight": new}, strict=False)
    optimizer.step()
    torch.testing.assert_close(_masters.values_of(p), new - 1e-4, rtol=0, atol=1e-7)


def test_places_are_not_searched_for_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    places = _masters._places
    monkeypatch.setattr(_masters, "_places", lambda: searched.append(1) or places())

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))

    model = copy.deepcopy(cast_parameters(build(), torch.bfloat16))
    other = build()
    step(AdamW([*cast_parameters(build(), torch.bfloat16).parameters(), *other.parameters()]))
    assert len(searched) < 10
    assert _masters.has_values(model[0].weight)
