"""The bf16 products of a CPU that are torch's, as they are on a processor with AMX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import contextlib
import torch
from torch.profiler import profile
import mixprec
from mixprec.ops._dispatch import library

M, N, K = 64, 256, 256
torch.manual_seed(0)
x, w, bias = (torch.randn(s).bfloat16() for s in ((M, K), (N, K), (N,)))


def names(run):
    with profile() as p:
        result = run()
    found = {event.name for event in p.events()}
    return result, bool(found & {"aten::mm", "aten::addmm"})


def by_torch(*args, **kwargs):
    return names(lambda: mixprec.gemm(*args, **kwargs))[1]


assert library.C.products_are_torchs()
for b in (None, bias):
    y, torchs = names(lambda: mixprec.gemm(x, w.t(), bias=b))
    assert torchs and y.is_contiguous()
    want = x.double() @ w.t().double() + (0 if b is None else b.double())
    size = x.double().abs() @ w.t().double().abs()
    assert ((y - want).abs() <= 2**-8 * want.abs() + 2 * K * 2**-24 * size).all()
# What torch computes in another way, or no faster, is ours.
assert not by_torch(x, w.t(), out_dtype=torch.float32)
assert not by_torch(x, w.t(), bias=bias.float())
assert not by_torch(x.half(), w.half().t())
assert not by_torch(x[:32], w.t()) and not by_torch(x[:, :31], w[:, :31].t())
assert not by_torch(x, w.t(), a_scale_inv=2.0)
with mixprec.simulate("a100"):
    assert not by_torch(x, w.t())
for wrong in (bias[:1], bias[:7]):
    try:
        mixprec.gemm(x, w.t(), bias=wrong)
    except ValueError as error:
        assert "bias" in str(error)
    else:
        raise AssertionError("a bias of another length")

# A layer has the same bits in one call and op by op, whatever torch.autocast would cast to.
BF16, FP32 = torch.bfloat16, torch.float32
for recipe, params in (("bf16", BF16), ("bf16", FP32), ("mxfp8", BF16)):
    layer = mixprec.convert(torch.nn.Linear(K, N).to(params), recipe)
    for autocast in (None, torch.bfloat16, torch.float16):
        results = []
        for around in (contextlib.nullcontext(), mixprec.use_backend("cpp")):
            xs = x.to(params).requires_grad_()
            with around, torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
                y = layer(xs)
            grads = torch.autograd.grad(y.float().square().sum(), [xs, layer.weight])
            results.append([y, *grads])
        assert all(map(torch.equal, *results)), (recipe, params, autocast)
    _, torchs = names(lambda: layer(x.to(params)))
    assert torchs == (params == BF16)
"""


def run(program: str, folder: Path, **variables: str) -> str:
    """Its error."""
    command, environment = [sys.executable, "-c", program], {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    return done.stderr[-2000:] if done.returncode else ""


def test_torchs_products(tmp_path: Path) -> None:
    assert run(PROGRAM, tmp_path, MIXPREC_PRODUCTS="torch") == ""


def test_whose_products_they_are_can_be_said(tmp_path: Path) -> None:
    load = "from mixprec.ops._dispatch import library; "
    ours = load + "assert not library.C.products_are_torchs()"
    assert run(ours, tmp_path, MIXPREC_PRODUCTS="mixprec") == ""
    assert run(ours, tmp_path, MIXPREC_ISA="base", MIXPREC_PRODUCTS="") == ""
    wrong = run(load + "raise SystemExit(library.LOAD_ERROR)", tmp_path, MIXPREC_PRODUCTS="both")
    assert "MIXPREC_PRODUCTS must be torch or mixprec, got both" in wrong
