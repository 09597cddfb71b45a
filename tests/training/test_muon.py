"""Muon: matrices as torch.optim.Muon and the paper have it, all other params as AdamW."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from cases import name, normal
from distributed_models import make_model, whole, wrapped
from optimizers import Run, assert_same, clones, parameters, through_a_file
from ranks import on_ranks

import mixprec
from mixprec.functional import orthogonalize
from mixprec.ops._reference.state8 import SIGNED, decode, encode
from mixprec.optim import AdamW, Muon

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


def train_models(shard: bool) -> list[list[torch.Tensor]]:
    trained = []
    for options in ({}, {"ns_dtype": "fp8", "nesterov": False}):
        model: torch.nn.Module = make_model(6, 5, 7, 3, 1)
        model = wrapped("fsdp", model) if shard else model
        optimizer = Muon(model.parameters(), lr=0.02, max_grad_norm=0.1, **options)
        for step in range(4):
            model(normal((4, 6), torch.float32, seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(whole(model.parameters()))
    return trained


def test_two_ranks_train_as_one() -> None:
    """Shards are gathered, and each rank updates its own; those of the last layer are uneven."""
    alone = train_models(shard=False)
    for rank in on_ranks(2, train_models, shard=True):
        torch.testing.assert_close(rank, alone, rtol=0, atol=1e-6)
