"""gather_in_fp8: FSDP2 gathers codes of FP8, and the training is to the last bit that without."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_models import BF16, loss_of, make_model, whole, wrapped
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec import _said

pytestmark = pytest.mark.slow
UNEVEN, BLOCKS = (32, 50, 64, 5), (64, 256, 256)
R16 = {"master_weights": "remainder16"}


class Gathered(TorchDispatchMode):
    """Counts the bytes that each rank sends to gather, and its all-reduces of amaxes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.calls[name] += 1
        if name == "c10d::_allgather_base_":
            self.bytes[name] += args[1].nbytes
        return func(*args, **(kwargs or {}))


def sharded(recipe: str, in_8_bits: bool, sizes: tuple[int, ...] = UNEVEN, **how: Any) -> Any:
    """how: kind and compute of `wrapped`; cast: the dtype of cast_parameters."""
    model = mixprec.convert(make_model(*sizes), recipe)
    cast = how.pop("cast", None)
    model = wrapped(how.pop("kind", "fsdp"), model, **how)
    if cast is not None:
        mixprec.cast_parameters(model, cast)
    return mixprec.gather_in_fp8(model) if in_8_bits else model


def data(step: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, width, generator=generator)


def trained(model: Any, width: int, options: dict[str, Any], steps: int = 3) -> list[torch.Tensor]:
    """The losses and norms, and the weights after these steps."""
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1, **options)
    found = []
    for step in range(steps):
        for micro in range(2):
            loss = loss_of(model(data(2 * step + micro, width)), 0.5)
            loss.backward()
            found.append(loss.detach())
        mixprec.update_scales(model, dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()
        found.append(optimizer.grad_norm)
    return [*found, *whole(model.parameters())]


def check_same_bits(*cases: tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any]]) -> None:
    for recipe, sizes, how, options in cases:
        ours, theirs = (
            trained(sharded(recipe, in_8_bits, sizes, **how), sizes[0], options)
            for in_8_bits in (True, False)
        )
        assert all(map(torch.equal, ours, theirs)), (recipe, sizes, how)


def check_bytes() -> None:
    """Of training with reshard_after_forward; one all-reduce for a forward pass."""
    sent = {}
    for recipe, sizes in (("fp8", (128, 512, 512, 128)), ("fp8-block", (256, 512, 512, 256))):
        for in_8_bits in (True, False):
            model = sharded(recipe, in_8_bits, sizes, compute=BF16)
            optimizer = mixprec.optim.AdamW(model.parameters())
            with Gathered() as counted:
                for step in range(3):
                    loss_of(model(data(step, sizes[0])), 0.5).backward()
                    optimizer.step()
            sent[recipe, in_8_bits] = counted.bytes["c10d::_allgather_base_"]
            one_scale = in_8_bits and recipe == "fp8"
            assert counted.calls["_c10d_functional::all_reduce"] == (3 if one_scale else 0)
        assert 0.5 < sent[recipe, True] / sent[recipe, False] <= 0.52, sent


def check_lives(folder: str) -> None:
    """Plain tensors are saved; other weights may be loaded and written at any time."""
    model, plain = (sharded("fp8", in_8_bits, compute=BF16) for in_8_bits in (True, False))
    x = data(0, 32)
    for each in (model, plain):
        trained(each, 32, {})
    saved = model.state_dict()
    parts = [t._local_tensor for t in saved.values() if isinstance(t, DTensor)]
    assert len(parts) == 6
    assert all(type(part) is torch.Tensor for part in parts)
    file = io.BytesIO()
    torch.save({name: t.to_local() for name, t in saved.items()}, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert all(torch.equal(again[name], t.to_local()) for name, t in saved.items())
    dcp.save({"model": saved}, checkpoint_id=folder)
    torch.save(dict(model.named_parameters()), io.BytesIO())
    for change in ("write", "load", "assign", "move", "NaN", "skip"):
        for each in (model, plain):
            with torch.no_grad():
                if change == "write":
                    each[2].weight.mul_(64)
                elif change == "load":
                    state = {"model": each.state_dict()}
                    dcp.load(state, checkpoint_id=folder)
                    each.load_state_dict(state["model"])
                elif change == "assign":
                    other = {name: t * 3 for name, t in each.state_dict().items()}
                    each.load_state_dict(other, assign=True)
                elif change == "move":
                    each.double().float()
                elif change == "NaN" and dist.get_rank() == 1:
                    each[0].weight.to_local()[0, 0] = torch.nan
                elif change == "skip":  # a layer that did not run, and runs first
                    each[0].weight.zero_()
                    each[0](x)
                    each[2].weight.mul_(1000)
        if change == "skip":
            ours, theirs = (each[2](torch.ones(2, 50)) for each in (model, plain))
        else:
            ours, theirs = model(x), plain(x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert torch.isnan(ours).any() == (change == "NaN"), change


def check_ways_to_run() -> None:
    """Recomputed layers, weights on the CPU, parameters made on the meta device."""
    results = []
    for in_8_bits in (True, False):
        with torch.device("meta"):
            model: Any = make_model(32, 48, 16)
        mixprec.convert(model, "fp8")
        mesh, offload = init_device_mesh("cpu", (2,)), CPUOffloadPolicy(pin_memory=False)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, offload_policy=offload)
        if in_8_bits:
            mixprec.gather_in_fp8(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for i, part in enumerate(p.to_local() for p in model.parameters()):
                part.copy_(torch.arange(part.numel()).view(part.shape).sin() * 2**i)
        for _ in range(2):
            y = checkpoint(model, data(0, 32), use_reentrant=False)
            loss_of(y, 0.5).backward()
        results.append([y, *whole(p.grad for p in model.parameters())])
        frozen = model.requires_grad_(False)(data(1, 32))
        results[-1].append(frozen)
    assert all(map(torch.equal, *results))


def check_refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = mixprec.convert(make_model(32, 32, 32), "fp8")
    with pytest.raises(ValueError, match=r"^gather_in_fp8: model must have layers .*fully_shard"):
        mixprec.gather_in_fp8(model)
    model = mixprec.gather_in_fp8(wrapped("fsdp", model))
    model(torch.ones(2, 32))
    with pytest.raises(ValueError, match=r"^gather_in_fp8: model must not have run yet"):
        mixprec.gather_in_fp8(model)
    with pytest.raises(ValueError, match=r"^cast_parameters: model must not have run yet"):
        mixprec.cast_parameters(model, BF16)
    message = r"gathered in 8 bits for recipe fp8, and here .* bf16"
    with mixprec.autocast("bf16"), pytest.raises(RuntimeError, match=message):
        model(torch.ones(2, 32))
    model = fully_shard(mixprec.convert(make_model(32, 32, 32), "fp8"), mesh=mesh)
    mixprec.gather_in_fp8(model)[0].register_forward_hook(lambda m, x, y: y + m.weight.sum())
    with pytest.raises(RuntimeError, match=r"^aten.sum.*is there as FP8 codes"):
        model(torch.ones(2, 32))
    model = mixprec.gather_in_fp8(sharded("fp8", False, (32, 32, 32)))
    model[0].recipe = "bf16"
    with pytest.raises(RuntimeError, match=r"^0: the recipe of a layer must stay"):
        model(torch.ones(2, 32))


def test_what_stays_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """One line says which weights are gathered in 16 bits, and why."""
    lines = on_ranks(2, said)[0]
    assert lines == [
        "gather_in_fp8: 0 of 3 weights in 8 bits; 3 not: recipe fp8-rowwise, which casts a weight "
        "to 16 bits or twice",
        "gather_in_fp8: 1 of 2 weights in 8 bits; 1 not: blocks of 128 rows that the shards cut",
        "gather_in_fp8: 0 of 2 weights in 8 bits; 2 not: a weight that other modules read",
    ]


def said() -> list[str]:
    lines: list[str] = []
    _said.say = lines.append  # type: ignore[assignment]
    ours = sharded("fp8-rowwise", True)
    assert torch.equal(ours(torch.ones(2, 32)), sharded("fp8-rowwise", False)(torch.ones(2, 32)))
    sizes = (64, 128, 256)
    check_same_bits(("fp8-block", sizes, {}, {}))
    tied = make_model(32, 32, 32)
    tied[2].weight = tied[0].weight
    model = fully_shard(mixprec.convert(tied, "fp8"), mesh=init_device_mesh("cpu", (2,)))
    mixprec.gather_in_fp8(model)(torch.ones(2, 32))
    return [line for line in lines if line.startswith("gather_in_fp8")]


def bits_on_two() -> None:
    check_same_bits(
        ("fp8", UNEVEN, {"compute": BF16}, {}),
        ("fp8-delayed", UNEVEN, {}, {"state_dtype": BF16}),
        ("fp8-block", BLOCKS, {"compute": BF16}, {}),
        ("fp8+gw-bf16", UNEVEN, {"cast": BF16}, R16),
        ("fp8", BLOCKS, {"cast": BF16}, {}),
    )


def rest_on_two() -> None:
    for check in (check_bytes, check_ways_to_run, check_refusals):
        check()


def test_two_ranks_train_with_the_same_bits() -> None:
    on_ranks(2, bits_on_two)


def test_weights_are_written_saved_and_loaded(tmp_path: Path) -> None:
    on_ranks(2, check_lives, folder=str(tmp_path))


def test_bytes_ways_to_run_and_refusals() -> None:
    on_ranks(2, rest_on_two)


def on_four() -> None:
    check_same_bits(
        ("fp8", UNEVEN, {"compute": BF16}, {}),  # a rank without a row of the last weight
        ("fp8", UNEVEN, {"kind": "hsdp"}, {}),
        ("fp8-block", (64, 512, 512), {"kind": "hsdp", "compute": BF16}, {}),
    )
    model = fully_shard(mixprec.convert(make_model(32, 32), "fp8"), reshard_after_forward=2)
    with pytest.raises(ValueError, match=r"^gather_in_fp8: reshard_after_forward must be"):
        mixprec.gather_in_fp8(model)


def test_four_ranks() -> None:
    on_ranks(4, on_four)
