"""The launchers of the Triton kernels, up to the launch itself, without a GPU.

Triton is told of a driver that knows one GPU, and every kernel is compiled for exactly the
arguments it would be launched with: names, types, sizes of 1, pointers that are not aligned.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from cases import FP8, WIDE, contiguous, name, normal, offset, padded_rows, transposed
from emulated.agreement import launcher
from emulated.shim.runner import ROOT
from emulated.triton_compiled.helpers import Launch, record_launches
from emulated.values.test_updates import BF16, RULES, Mix, arguments

from mixprec.triton_kernels import gemm, launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """On a GPU with 132 multiprocessors."""
    monkeypatch.setattr(gemm, "_gpu", lambda _: (90, 132))
    return record_launches(monkeypatch)


def test_the_folder_is_not_importable_under_its_own_name() -> None:
    """It would shadow Triton's own package triton_kernels."""
    command = [sys.executable, "-c", "import triton_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode != 0
    assert "mixprec.triton_kernels and cannot be imported as 'triton_kernels'" in done.stderr


def test_soft_casts_where_the_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit formats have instructions everywhere, FP8 from compute capability 8.9 on."""
    device = torch.device("cuda", 0)
    for capability, converts in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        launch._converts_fp8.cache_clear()
        assert not launch.soft_cast(device, torch.bfloat16, torch.float16, torch.float64)
        assert launch.soft_cast(device, torch.float32, FP8[0]) is not converts
    launch._converts_fp8.cache_clear()


@pytest.mark.parametrize("dtype", WIDE[:2], ids=name)  # fp16 takes the same way as bf16
def test_awkward_sizes_and_addresses(launched: list[Launch], dtype: torch.dtype) -> None:
    """A size of 1 becomes a constant in Triton, and addresses of odd elements lose alignment."""
    run = launcher
    one = torch.ones(())
    for x in (
        normal((1,), dtype),
        offset(normal((33,), dtype)),
        padded_rows(normal((3, 5), dtype)),
    ):
        run("amax")(x)
        run("quantize")(x, torch.float8_e4m3fn, None, False, "tensor", True)
        for counts in (None, torch.zeros((2, 4), dtype=torch.int64)):
            grads, flag = [x.clone(), x.clone()], torch.zeros(())
            run("unscale_")(grads, one, flag, counts)
            run("grad_stats_")(grads, None, flag, torch.zeros(2).double(), counts)
    for i, shape in enumerate(((1, 1), (1, 7), (7, 1))):
        run("quantize")(normal(shape, dtype), torch.float8_e5m2, one, True, "tensor", True)
        for j, granularity in enumerate(("row", "block1x128", "block128x128")):
            args = (normal(shape, dtype), torch.float8_e5m2, None, (i + j) % 2 == 0, granularity)
            run("quantize")(*args, True)
    options = {"seed": 1, "stochastic_rounding": True}  # whatever the rule, the kernel is one
    run("adamw_")(*arguments("decoupled", [Mix(dtype, dtype)], [(1,)], **options))
    for sums in (torch.ones(1), torch.ones(3)[1:]):
        run("clip_coef")(sums.double(), 1.0)


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(m, k).to(dtype), torch.zeros(n, k).to(dtype).t()


def test_products_of_awkward_sizes_and_addresses(launched: list[Launch]) -> None:
    sizes = ((1, 1, 1), (1, 7, 1), (7, 1, 33))
    orders = (contiguous, transposed, offset, padded_rows)
    for i, ((m, n, k), order) in enumerate(itertools.product(sizes, orders)):
        a, b = operands(m, n, k, (torch.float16, FP8[1])[i % 2])
        if i % 3:
            bias = torch.zeros(n)
            gemm.gemm(order(a), order(b), None, None, bias, torch.float16, False)
        else:
            scales = torch.ones(m, -(-k // 128)), torch.ones(-(-k // 128), 1)
            gemm.gemm_accumulate_(torch.zeros(n, m).t(), order(a), order(b), *scales)
    assert not any("\t.local" in one.compiled.asm["ptx"] for one in launched)


@pytest.mark.parametrize("rule", ["decoupled", "momentum"])
def test_one_kernel_for_all_seeds_and_params(launched: list[Launch], rule: str) -> None:
    """Triton makes another for an integer of 1, of a multiple of 16, or of more than 32 bits."""
    op, mixed = RULES[rule][0], [Mix(BF16, BF16)] * 17
    for seed in (0, 1, 16, 17, -1, 2**63 - 1):
        options = {"indices": list(range(17)), "stochastic_rounding": True, "seed": seed}
        launcher(op)(*arguments(rule, mixed, [(32,)], **options))
    assert len({id(one.compiled) for one in launched if one.name == "step_kernel"}) == 1
