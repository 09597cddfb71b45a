"""Muon: matrices as torch.optim.Muon and the paper have it, all other params as AdamW."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import name, normal
from distributed_models import local_part, make_model, whole, wrapped
from optimizers import Run, assert_same, clones, parameters, through_a_file
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import mixprec
from mixprec.functional import orthogonalize
from mixprec.ops._reference.state8 import SIGNED, decode, encode
from mixprec.optim import AdamW, Muon
from mixprec.optim._whole import plan

MATRICES = ((16, 24), (24, 16), (9, 9), (1, 7), (0, 3), (64, 5))
BOTH = ((16, 24), (16,), (24, 16), (2, 3, 4, 4), ())  # matrices and others
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    {"momentum": 0.8, "weight_decay": 0.0, "ns_steps": 3, "adjust_lr_fn": "original"},
)
COEFFICIENTS = (3.4445, -4.775, 2.0315)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return mixprec.gemm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)


def newton_schulz(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """torch's formula on bf16 matrices, with FP32 products."""
    (a, b, c), tall = COEFFICIENTS, x.shape[0] > x.shape[1]
    y = x.t() if tall else x
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        y = y.bfloat16()
        gram = product(y, y.t()).bfloat16()
        y = torch.add(product(torch.add(c * product(gram, gram), gram, alpha=b), y), y, alpha=a)
    return y.t() if tall else y


@pytest.mark.parametrize("shape", MATRICES)
def test_orthogonalize_is_the_formula(shape: tuple[int, int], backend: str) -> None:
    for steps in (0, 1, 5):
        x = normal(shape, torch.float32, seed=steps)
        want = newton_schulz(x, steps)
        torch.testing.assert_close(orthogonalize(x, steps=steps), want, rtol=0, atol=1e-6)
    assert orthogonalize(torch.zeros(shape)).eq(0).all()


def test_half_of_a_symmetric_product_is_computed_with_the_same_bits() -> None:
    """On a CPU, in strips, of which the last is narrow."""
    for shape in ((300, 300), (257, 400), (513, 300)):
        x = normal(shape, torch.float32)
        assert torch.equal(orthogonalize(x, steps=3), newton_schulz(x, 3))


@pytest.mark.parametrize(("dtype", "largest", "near"), [("bf16", 1.21, 0.97), ("fp8", 1.35, 0.95)])
def test_orthogonalize_levels_the_singular_values(dtype: str, largest: float, near: float) -> None:
    for shape in ((256, 512), (48, 32), (200, 200)):
        x = normal(shape, torch.float32)
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        y = orthogonalize(x, dtype=dtype)
        assert torch.linalg.svdvals(y)[0] < largest
        assert (y * (u @ v)).sum() / (y.norm() * (u @ v).norm()) > near
    assert not torch.equal(orthogonalize(x, dtype="bf16"), orthogonalize(x, dtype="fp8"))


def test_orthogonalize_refuses() -> None:
    for x, options, message in (
        (torch.ones(3), {}, r"x must be \[M, N\], got shape \(3,\)"),
        (torch.ones(3, 2), {"dtype": "fp16"}, '"bf16" or "fp8", got \'fp16\''),
    ):
        with pytest.raises(ValueError, match=f"^orthogonalize: .*{message}"):
            orthogonalize(x, **options)
    with pytest.raises(RuntimeError, match=r"orthogonalize: .*no_grad"):
        orthogonalize(torch.ones(2, 2, requires_grad=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=name)
def test_same_as_torch(settings: dict, backend: str) -> None:
    """Within the rounding of its products, whose bf16 results it keeps: 2% of each update. The two
    load each other's state dicts."""
    shapes = [shape for shape in MATRICES if 0 not in shape]
    for dtype in (torch.float32, torch.float64):
        starts = parameters(dtype, shapes)
        run, expected = (Run(make, clones(starts), **settings) for make in (Muon, torch.optim.Muon))
        assert run.optimizer.defaults.items() >= expected.optimizer.defaults.items()
        run.train(5)
        expected.train(5)
        for p, o, start in zip(run.params, expected.params, starts, strict=True):
            assert (p - o).norm() < 0.02 * (o - start).norm()
        mine, theirs = ([s["momentum_buffer"] for s in each.states] for each in (run, expected))
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        for make, each in ((Muon, expected), (torch.optim.Muon, run)):
            other = Run(make, clones(starts), lr=0.5)
            other.optimizer.load_state_dict(through_a_file(each.optimizer.state_dict()))
            buffers = [[s["momentum_buffer"] for s in r.states] for r in (other, each)]
            assert_same(*buffers)
            assert other.train().optimizer.param_groups[0]["lr"] == settings.get("lr", 1e-3)


def test_one_step_is_the_formula() -> None:
    p = parameters(shapes=[(24, 16)])[0]
    before, grad = p.detach().clone(), normal((24, 16), torch.float32, seed=5)
    optimizer, p.grad = Muon([p], lr=0.1, max_grad_value=0.5), grad
    optimizer.step()
    g = grad.clamp(-0.5, 0.5)
    m = (1 - 0.95) * g
    update = newton_schulz(m + (g - m) * (1 - 0.95)) * math.sqrt(24 / 16)
    want = before * (1 - 0.1 * 0.1) - 0.1 * update
    torch.testing.assert_close(p.detach(), want, rtol=0, atol=1e-6)


def test_other_params_are_those_of_adamw() -> None:
    """By their shape or by the group's setting, with the settings of `adamw`."""
    adamw = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    for use_muon in (True, False):
        params = parameters(shapes=BOTH)
        alone = [i for i, p in enumerate(params) if p.dim() != 2 or not use_muon]
        expected = Run(AdamW, clones(params), **adamw).train(4)
        groups = [{"params": params, "use_muon": use_muon}]
        run = Run(lambda _, g=groups: Muon(g, lr=0.02, adamw=adamw), params).train(4)
        for i in alone:
            assert torch.equal(params[i], expected.params[i])
        for optimizer in (run.optimizer, copy.deepcopy(run.optimizer)):
            optimizer.add_param_group({"params": parameters(shapes=[(3,)])})
            kinds = [g["use_muon"] for g in optimizer.param_groups]
            assert kinds == ([True, False, False] if use_muon else [False, False])
            assert [g["lr"] for g in optimizer.param_groups[-2:]] == [3e-4] * 2


def test_params_of_groups() -> None:
    params = parameters(shapes=BOTH)
    names = [(str(i), p) for i, p in enumerate(params)]
    groups = Muon([{"params": names, "lr": 0.5}]).param_groups
    assert [g["param_names"] for g in groups] == [["0", "2"], ["1", "3", "4"]]
    assert [g["lr"] for g in groups] == [0.5, 0.5], "a group's own settings hold for both"
    with pytest.raises(ValueError, match=r"^Muon: adamw may hold lr, betas, eps, .*, got beta1"):
        Muon(params, adamw={"beta1": 0.9})
    optimizer = Muon(params[:1])
    with pytest.raises(ValueError, match="params must be fp32"):
        optimizer.add_param_group({"params": [params[2], torch.ones(3, dtype=torch.int32)]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=r"^Muon.load_state_dict: use_muon must be False for"):
        Muon(params[1:2]).load_state_dict(optimizer.state_dict())


def test_8_bits_are_refused_and_loaded() -> None:
    with pytest.raises(ValueError, match=r'^Muon: state_dtype must .* got "int8", whose rounding'):
        Muon(parameters(shapes=[(64, 64)]), state_dtype="int8")
    run = Run(Muon, parameters(shapes=[(64, 64)])).train()
    saved = run.optimizer.state_dict()
    codes, scale = encode(run.states[0]["momentum_buffer"], SIGNED)
    saved["state"][0].update(momentum_buffer=codes, momentum_buffer_scale=scale)
    for dtype in (torch.float32, torch.bfloat16):
        other = Run(Muon, clones(run.params), state_dtype=dtype)
        other.optimizer.load_state_dict(saved)
        assert_same([other.states[0]["momentum_buffer"]], [decode(codes, scale, SIGNED).to(dtype)])
        assert other.train().counts() == [2]


def sharded(model: nn.Module, kind: str) -> nn.Module:
    """kind: "fsdp", "hsdp", or "mixed", of 2 ranks of FSDP2 and 2 of tensor parallelism."""
    if kind != "mixed":
        return wrapped(kind, model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "parallel"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["parallel"], plan)
    return fully_shard(model, mesh=mesh["shard"])


def train(model: nn.Module, optimizer: Muon, first: int = 0, bad: int = -1) -> None:
    """4 steps; in step `bad` rank 0 has an Inf in a gradient."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, first + 4):
        model(normal((4, 6), torch.float32, seed=step)).square().mean().backward()
        if step == bad and rank == 0:
            local_part(model[0].weight.grad)[0, 0] = torch.inf
        optimizer.step()
        optimizer.zero_grad()


CASES: tuple[dict[str, Any], ...] = (
    {"max_grad_norm": 0.1},
    {"ns_dtype": "fp8", "nesterov": False, "max_grad_value": 1e-3},
)


def trained(kind: str = "") -> list[list[torch.Tensor]]:
    results = []
    for options in CASES:
        model = make_model(6, 8, 7, 3, 1)
        model = sharded(model, kind) if kind else model
        optimizer = Muon(model.parameters(), lr=0.02, **options)
        train(model, optimizer, bad=1 if "max_grad_norm" in options else -1)
        assert optimizer.skipped == ("max_grad_norm" in options)
        results.append(whole(model.parameters()))
    return results


def test_ranks_train_as_one() -> None:
    """With the same bits: each matrix is whole on one rank. Chunks are uneven, and some empty."""
    alone = trained()
    for world, kind in ((2, "fsdp"), (4, "hsdp"), (4, "mixed")):
        for rank in on_ranks(world, trained, kind=kind):
            # The norm that clips, and products of tensor parallelism, are sums in another order.
            torch.testing.assert_close(rank[0], alone[0], rtol=0, atol=1e-6)
            limit = 1e-6 if kind == "mixed" else 0.0
            torch.testing.assert_close(rank[1], alone[1], rtol=0, atol=limit)


def resumed(folder: Path, load: bool) -> list[torch.Tensor]:
    model = sharded(make_model(6, 8, 7, 3, 1), "fsdp")
    optimizer = Muon(model.parameters(), lr=0.02)
    if not load:
        train(model, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if not load:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    train(model, optimizer, first=4)
    return whole(model.parameters())


def test_a_distributed_checkpoint_resumes_on_other_ranks(tmp_path: Path) -> None:
    want = on_ranks(2, resumed, folder=tmp_path, load=False)[0]
    for rank in on_ranks(4, resumed, folder=tmp_path, load=True):
        assert_same(rank, want)


def test_matrices_are_shared_by_size() -> None:
    """The largest first, each to the rank with the least to do; whole ones by every rank."""
    on_ranks(2, check_plan)


def check_plan() -> None:
    mesh = init_device_mesh("cpu", (2,))
    sizes = [(8, 8), (64, 64), (32, 32), (4, 4), (31, 31)]
    params: list[torch.Tensor] = [
        distribute_tensor(torch.zeros(s), mesh, [Shard(0)]) for s in sizes
    ]
    owners = [work.matrices for work in plan([*params, torch.zeros(3, 3)])]
    assert owners == [[5], [1, 2], [0, 4], [None, 3]]
