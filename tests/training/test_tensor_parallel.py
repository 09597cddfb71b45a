"""Converted layers under parallelize_module: the training of one process."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_models import whole
from ranks import on_ranks
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import mixprec
from mixprec.formats import E4M3, E5M2, FP16
from mixprec.nn.parallel import PrepareFP8Input
from mixprec.recipes import Recipe

WIDTH, LENGTH, STEPS = 32, 6, 3
RECIPES = "bf16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.mlp(h) * self.gate(h)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def parallel(model: nn.Sequential, mesh: DeviceMesh, sequence: bool) -> None:
    """sequence: x is sharded along it between the blocks' products."""
    at = Shard(1) if sequence else Replicate()
    for block in model:
        plan: dict[str, Any] = {
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(output_layouts=at),
            "gate": RowwiseParallel(input_layouts=Replicate(), output_layouts=at),
        }
        if sequence:
            plan["norm"] = SequenceParallel()
            inside = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan["mlp"] = PrepareModuleInput(**inside)
            plan["gate"] = RowwiseParallel(input_layouts=Shard(1), output_layouts=at)
        parallelize_module(block, mesh, plan)


def data(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + index)
    return torch.randn(2, LENGTH, WIDTH, generator=generator) * 4**index


def trained(model: nn.Module, parts: list[int], sequence: bool, bad: bool) -> list[torch.Tensor]:
    """The weights, and the norm of each step; the second has an Inf in one weight's gradient."""
    optimizer, norms = mixprec.optim.AdamW(model.parameters(), 1e-2, max_grad_norm=0.5), []
    group = dist.group.WORLD if dist.is_initialized() else None
    for step in range(STEPS):
        for part in parts:
            x = data(step, part)
            if sequence:
                rank = dist.get_rank() % 2
                x = x.chunk(2, 1)[rank]
            y = model(x)
            # Of a part of the sequence: backward sums over the ranks, as the mean of all does.
            loss = y.float().square().sum() / (2 * LENGTH * WIDTH * len(parts))
            loss.backward()
        if bad and step == 1:
            grad = model[0].mlp[0].weight.grad
            getattr(grad, "to_local", lambda grad=grad: grad)()[0, 0] = torch.inf
        mixprec.update_scales(model, process_group=group)
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return [*whole(model.parameters()), torch.stack(norms)]


def check(recipe: str, sequence: bool, first: str, fuse: bool, shards: bool, alone: Any) -> None:
    model, world = make_model(), dist.get_world_size()
    names = ("shard", "parallel") if shards else ("parallel",)
    mesh = init_device_mesh("cpu", (world // 2, 2)[-len(names) :], mesh_dim_names=names)
    if first == "convert":
        mixprec.convert(model, recipe, fuse=fuse)
    parallel(model, mesh["parallel"], sequence)
    if first != "convert":
        mixprec.convert(model, recipe, fuse=fuse)
    if shards:
        for block in model:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    mine = mesh["shard"].get_local_rank() if shards else 0
    *weights, norms = trained(model, [mine], sequence, bad=not shards)
    *theirs, their_norms = alone
    for weight, want in zip(weights, theirs, strict=True):
        # Sums of products over ranks are in another order, in bf16 of rounded numbers.
        limit = 2e-3 if recipe == "bf16" else 2e-5
        error = (weight - want).abs().max().item()
        assert error <= limit, (error, recipe, sequence, first, fuse, shards)
    torch.testing.assert_close(norms, their_norms, rtol=2e-2, atol=0, equal_nan=True)


def alone(recipe: str, parts: list[int], bad: bool) -> list[torch.Tensor]:
    model = mixprec.convert(make_model(), recipe)
    return trained(model, parts, sequence=False, bad=bad)


def on_two(results: dict[str, list[torch.Tensor]]) -> None:
    for recipe, want in results.items():
        for sequence in (False, True):
            check(recipe, sequence, "convert", False, False, want)
    for recipe, fuse in (("fp8", True), ("fp8-delayed", False)):  # layers of DTensors are not fused
        check(recipe, True, "parallelize", fuse, False, results[recipe])
    check("fp8", True, "convert", True, False, results["fp8"])


def test_tensor_and_sequence_parallel() -> None:
    on_ranks(2, on_two, results={recipe: alone(recipe, [0], bad=True) for recipe in RECIPES})


def on_four(results: dict[str, list[torch.Tensor]]) -> None:
    for recipe, want in results.items():
        check(recipe, False, "convert", False, True, want)


def sharded_after_the_cast() -> None:
    """What is behind a split parameter is cut as fully_shard cuts it."""
    for shape, names in (((2, 2), ("data", "tensor")), ((2, 2, 1), ("copy", "data", "tensor"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = mixprec.convert(make_model()[0].mlp, "bf16")
        exact = whole(model.parameters())
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mixprec.cast_parameters(model, torch.bfloat16)
        fully_shard(model, mesh=mesh[names[:-1]])
        optimizer = mixprec.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        model(data(0, 0).bfloat16()).float().square().mean().backward()
        optimizer.step()
        values = whole(mixprec.optim.fp32_state_dict(model).values())
        for value, want, p in zip(values, exact, model.parameters(), strict=True):
            assert torch.equal(value, want)
            assert p.dtype == torch.bfloat16


def test_with_sharded_parameters_on_a_mesh_of_two_dimensions() -> None:
    on_ranks(4, sharded_after_the_cast)
    results = {recipe: alone(recipe, [0, 1], bad=False) for recipe in ("fp8", "mxfp8")}
    on_ranks(4, on_four, results=results)


def plain_and_compiled() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = mixprec.convert(make_model(), "fp8")
    parallel(model, mesh, False)
    y = model(data(0, 0))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(data(0, 0))
    torch.testing.assert_close(compiled, y, rtol=0, atol=0)
    model = mixprec.convert(make_model(), "fp8")
    parallelize_module(model, mesh, {"0.gate": ColwiseParallel()})
    weight, layer = model[0].gate.weight, mixprec.nn.Linear(WIDTH, WIDTH, bias=False)
    layer.weight = weight
    for recipe in (
        Recipe("o", E4M3, E4M3, E5M2, outliers=0.1),
        Recipe("c", FP16, FP16, FP16, clip_activations=True),
    ):
        sharded = mixprec.convert(make_model(), recipe)
        if recipe.has_outliers:
            mixprec.choose_outliers(sharded, [data(0, 0)])
        parallel(sharded, mesh, False)
        with pytest.raises(
            ValueError, match=r"^linear: recipe must have neither outliers nor clip"
        ):
            sharded(data(0, 0))
    with pytest.raises(TypeError, match=r"^linear: x must be a DTensor on the mesh of"):
        layer(data(0, 0))


def casts() -> None:
    """cast_parameters rounds the parts that ranks have, and gives all bits back."""
    mesh, exact = init_device_mesh("cpu", (2,)), whole(make_model().parameters())
    for first in (True, False):
        model = mixprec.convert(make_model(), "bf16")
        if first:
            mixprec.cast_parameters(model, torch.bfloat16)
        parallel(model, mesh, False)
        if not first:
            mixprec.cast_parameters(model, torch.bfloat16)
        weights = [p for p in model.parameters() if p.dtype == torch.bfloat16]
        assert len(weights) == 10, "all but norms"
        for p in weights:
            local = p.to_local()
            assert local.dtype == torch.bfloat16
            assert torch.equal(p.full_tensor(), p.full_tensor().float().bfloat16())
        mixprec.cast_parameters(model, torch.float32)
        for p, want in zip(model.parameters(), exact, strict=True):
            assert torch.equal(getattr(p, "full_tensor", lambda p=p: p)(), want)
            assert getattr(p, "to_local", lambda p=p: p)().dtype == torch.float32


def test_parameters_are_cast_before_and_after() -> None:
    on_ranks(2, casts)


def test_compiled_and_with_a_plain_x() -> None:
    on_ranks(2, plain_and_compiled)


def other_layers() -> None:
    """What is not a linear layer is refused, or computes as one process does."""
    mesh, x = init_device_mesh("cpu", (2,)), data(0, 0)
    split = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
    refused = r": x and weight must be plain tensors, got a DTensor: of the layers here only linear"
    conv = mixprec.nn.Conv1d(LENGTH, 4, 3, recipe="fp8")
    conv.weight = nn.Parameter(split(conv.weight.detach()))
    attention = mixprec.convert(nn.MultiheadAttention(WIDTH, 4), "fp8")
    attention.in_proj_weight = nn.Parameter(split(attention.in_proj_weight.detach()))
    ends, labels = torch.tensor([6, 12], dtype=torch.int32), torch.arange(12) % 8
    experts, head = split(torch.ones(2, 8, WIDTH)), split(torch.ones(8, WIDTH))
    rows = x.flatten(0, 1)
    for call in (
        lambda: conv(x),
        lambda: attention(x, x, x),
        lambda: mixprec.functional.grouped_linear(rows, experts, ends),
        lambda: mixprec.functional.linear_cross_entropy(rows, head, labels),
    ):
        with pytest.raises(TypeError, match=refused):
            call()
    loss = mixprec.nn.LinearCrossEntropy(WIDTH, 8)
    loss.linear.register_forward_hook(lambda *_: None)  # as a plan does, so that logits are whole
    want = loss(rows, labels)
    for style in (
        ColwiseParallel(output_layouts=Replicate()),
        ColwiseParallel(use_local_output=False),
    ):
        model = parallelize_module(copy.deepcopy(loss), mesh, {"linear": style})
        torch.testing.assert_close(model(rows, labels), want, rtol=1e-6, atol=0)
    model = parallelize_module(loss, mesh, {"linear": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"^LinearCrossEntropy: logits must be of all 8 classes, "):
        model(rows, labels)
    plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    for kind in (mixprec.nn.MLP, mixprec.nn.GatedMLP):
        mlp = kind(WIDTH, 64, recipe="fp8")
        mlp.up.register_forward_hook(lambda *_: None)  # which is not fused
        want = mlp(x)
        parallelize_module(mlp, mesh, {n: s for n, s in plan.items() if hasattr(mlp, n)})
        torch.testing.assert_close(mlp(x), want, rtol=0, atol=1e-6)
    _, report = mixprec.freeze(mlp)
    assert {*report.left.values()} == {"its weight is sharded over ranks"}
    mlp.up.weight.requires_grad_(False)
    weight = mlp.down.weight
    mlp(x).sum().backward()
    assert mlp.up.weight.grad is None
    grad = weight.grad.full_tensor()
    weight.grad, weight.main_grad = None, torch.zeros_like(weight)
    mlp(x).sum().backward()
    assert weight.grad is None
    assert torch.equal(weight.main_grad.full_tensor(), grad)


def test_other_layers() -> None:
    on_ranks(2, other_layers)


def reused() -> None:
    """The scales of all weights in one all-reduce, with the same bits."""
    mesh, counts, grads = init_device_mesh("cpu", (2,)), [], []
    model = mixprec.convert(make_model(), "fp8")
    parallel(model, mesh, False)
    calls, all_reduce = [], collectives.all_reduce

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs["reduceOp"] if "reduceOp" in kwargs else args[1])
        return all_reduce(*args, **kwargs)

    collectives.all_reduce = counted
    for block in (contextlib.nullcontext(), mixprec.reuse_weights(model)):
        calls.clear()
        with block:
            for part in (0, 1):
                model(data(0, part)).square().sum().backward()
        counts.append(calls.count("max"))
        grads.append(whole(p.grad for p in model.parameters()))
        model.zero_grad()
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    # Of 6 layers in 2 passes: x or g of each, and each weight.
    assert counts == [2 * 6 * 2, 2 * 6 + 1]
    with mixprec.reuse_weights(model):
        with torch.no_grad():
            model[0].mlp[0].weight.to_local().add_(1.0)
        with pytest.raises(
            RuntimeError, match=r"^reuse_weights: the weight of 0.mlp.0 was changed"
        ):
            model(data(0, 0))


def test_weights_are_cast_once() -> None:
    on_ranks(2, reused)


class Gathers(TorchDispatchMode):
    """The bytes that a rank sends to gather in forward passes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_gather = func.namespace == "_c10d_functional" and "all_gather" in func.name()
        if is_gather and torch._C._current_graph_task_id() == -1:
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def gathered_in_fp8() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    for recipe, dtype in (
        *((recipe, torch.float32) for recipe in RECIPES),
        *(("fp8", torch.bfloat16), ("fp8+gw-bf16", torch.float32)),
    ):
        found, sent = [], []
        for prepare in (
            PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            PrepareFP8Input(),
        ):
            block = mixprec.convert(make_model()[0].to(dtype), recipe)
            plan = {
                "norm": SequenceParallel(),
                "mlp": prepare,
                "mlp.0": ColwiseParallel(),
                "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
                "gate": RowwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1)),
            }
            block = parallelize_module(block, mesh, plan)
            # Of the first rank larger: the scale is that of both.
            x = data(0, 0).chunk(2, 1)[rank].to(dtype).mul(4 - 3 * rank).requires_grad_()
            with Gathers() as counted:
                mlp = block.mlp(block.norm(x))
            block(x).float().square().sum().backward()
            with torch.no_grad():
                found.append([mlp, x.grad, block(x), *whole(p.grad for p in block.parameters())])
            sent.append(counted.bytes)
        assert all(map(torch.equal, *found)), recipe
        in_codes = recipe == "fp8"
        assert sent[0] == x.nbytes
        assert sent[1] == (x.numel() if in_codes else x.nbytes), "half of what bf16 sends"


def other_readers() -> None:
    mesh, x = init_device_mesh("cpu", (2,)), data(0, 0).chunk(2, 1)[dist.get_rank()]
    with pytest.raises(ValueError, match=r"^PrepareFP8Input: layout must be a Shard, got R"):
        PrepareFP8Input(Replicate())

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 8)

        def forward(self, *, hidden: torch.Tensor) -> torch.Tensor:
            return self.up(hidden) * hidden.to_local().sum()

    plan = {"": PrepareFP8Input(argument="hidden"), "up": ColwiseParallel()}
    model = parallelize_module(mixprec.convert(Reads(), "fp8"), mesh, plan)
    with pytest.raises(RuntimeError, match=r"PrepareFP8Input have gathered is there as FP8 codes"):
        model(hidden=x)
    model = parallelize_module(nn.Sequential(make_model()[0].mlp), mesh, {"0": PrepareFP8Input()})
    parallelize_module(mixprec.convert(model, "fp8"), mesh, {"0.0": ColwiseParallel()})
    with (
        mixprec.autocast(recipe="mxfp8"),
        pytest.raises(RuntimeError, match=r"its input was gathered in 8 bits for recipe fp8"),
    ):
        model(x)


def test_the_input_is_gathered_in_fp8() -> None:
    on_ranks(2, gathered_in_fp8)


def test_what_reads_the_input_otherwise_is_an_error() -> None:
    on_ranks(2, other_readers)
