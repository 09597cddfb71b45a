"""The launchers of the Triton kernels, up to the launch itself, without a GPU.

Triton is told of a driver that knows one GPU, and every kernel is compiled for exactly the
arguments it would be launched with: names, types, sizes of 1, pointers that are not aligned.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from cases import FP8, WIDE, contiguous, name, normal, offset, padded_rows, transposed
from emulated.agreement import launcher
from emulated.shim.runner import ROOT
from emulated.triton_compiled.helpers import Launch, record_launches
from emulated.values.test_updates import BF16, F32, INT16, RATES, RULES, Mix, arguments

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
    for converts in (False, True):
        monkeypatch.setattr(launch, "_converts_fp8", lambda _, converts=converts: converts)
        assert not launch.soft_cast(device, torch.bfloat16, torch.float16, torch.float64)
        for dtype in FP8:
            assert launch.soft_cast(device, torch.float32, dtype) is not converts
    monkeypatch.undo()
    for capability, converts in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        launch._converts_fp8.cache_clear()
        assert launch._converts_fp8(device) is converts
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


@pytest.mark.parametrize("dtype", [BF16, FP8[0]], ids=name)
def test_how_a_product_is_launched(launched: list[Launch], dtype: torch.dtype) -> None:
    a, b = operands(2048, 4096, 256, dtype)
    gemm.gemm(a, b, torch.ones(()), torch.ones(1, 4096), None, BF16, False)
    (one,) = launched
    assert (one.name, one.grid) == ("gemm_kernel", (132,))
    assert one.keywords["TMA"] is True
    assert one.keywords["PROMOTE"] is (dtype in FP8)
    assert [one.values[x].MODE.value for x in ("a_scale", "b_scale")] == ["scalar", "rows"]
    assert "wgmma" in one.compiled.asm["ptx"]


def test_how_a_split_product_is_launched(launched: list[Launch]) -> None:
    gemm.gemm_accumulate_(torch.zeros(16, 512), *operands(16, 512, 8192, BF16), None, None)
    first, second = launched
    assert (first.name, second.name) == ("gemm_kernel", "reduce_kernel")
    assert first.grid == (64,)  # 8 tiles, 8 parts
    assert (first.keywords["SPLIT"], second.values["out"].ACCUMULATE.value) == (True, True)


@pytest.mark.parametrize("rule", ["decoupled", "momentum"])
def test_one_kernel_for_all_seeds_and_params(launched: list[Launch], rule: str) -> None:
    """Triton makes another for an integer of 1, of a multiple of 16, or of more than 32 bits."""
    op, mixed = RULES[rule][0], [Mix(BF16, BF16)] * 17
    for seed in (0, 1, 16, 17, -1, 2**63 - 1):
        options = {"indices": list(range(17)), "stochastic_rounding": True, "seed": seed}
        launcher(op)(*arguments(rule, mixed, [(32,)], **options))
    assert len({id(one.compiled) for one in launched if one.name == "step_kernel"}) == 1


X, ONE, E4M3 = normal((64, 32), BF16), torch.ones(()), FP8[0]
MX_SCALES, NVFP4_SCALES = torch.ones((64, 1), dtype=torch.uint8), torch.ones(64, 2).to(E4M3)
CODES = torch.zeros((64, 16), dtype=torch.uint8)
GRADS = [normal((n,), F32) for n in (5, 0, 50_000)]
EMPTY = [operands(*sizes, BF16) for sizes in ((0, 3, 5), (3, 0, 5), (3, 4, 0))]


def updates(rule: str) -> list[list[Any]]:
    """Of three params, one of them empty; masters and states of every kind, and rates on the device
    of both widths."""
    kinds = (None, BF16), (F32, F32), (INT16, BF16)
    mixed = [[Mix(BF16, BF16, masters, (state, state))] * 3 for masters, state in kinds]
    shapes = [(33,), (0,), (2048,)]
    return [
        arguments(rule, mix, shapes, lr_tensor=lr, stochastic_rounding=True)
        for mix, lr in zip(mixed, RATES, strict=True)
    ]


# An op, calls of it, and the kernels that are launched for them.
LAUNCHES: list[tuple[str, list[Any], str]] = [
    # To FP8 amax, which returns at once where a scale is given, then the cast; to 16 bits: one.
    ("quantize", [(X, E4M3, None, True, "tensor", True), (X, FP8[1], ONE, False, "tensor", True)],
     "amax quantize_transpose amax quantize"),
    ("quantize", [(X, torch.float16, None, True, "tensor", True)], "quantize_transpose"),
    # One, but for rows with transpose, whose scales need all tiles.
    ("quantize", [(X, E4M3, None, turned, "row", True) for turned in (False, True)],
     "quantize_rows tile_maxima quantize_tiles"),
    ("quantize", [(X, E4M3, None, turned, by, True) for turned in (False, True)
                  for by in ("block1x128", "block128x128")], 4 * "quantize_tiles "),
    # One, but for NVFP4, whose scales need the amax of x; none for empty tensors.
    *(("quantize_mx", [(x, fmt, "rceil", x is X, None, x is X, x is not X)
                       for x in (X, X[:, 1:8], X[:0])], names)
      for fmt, names in (("mxfp8_e4m3", 2 * "quantize_mx "), ("mxfp4", 2 * "quantize_mx "),
                         ("nvfp4", 2 * "amax quantize_mx "))),
    # Values are computed as they are cast: two gradients in one launch. A norm is one if its cast
    # needs a row at a time, besides the amax of all if no scale is given.
    ("act_backward", [(X, X, X, "silu", *cast, True) for cast in (
        (BF16, None, False, "tensor"), (E4M3, None, True, "tensor"), (E4M3, ONE, False, "tensor"),
        (E4M3, None, True, "row"), (E4M3, None, True, "block1x128"), (E4M3, None, True, "mx"))],
     "quantize amax quantize_transpose amax quantize tile_maxima quantize_tiles quantize_tiles "
     "quantize_mx"),
    ("norm_quantize", [(X, X, None, None, 1e-5, True, *cast, True) for cast in (
        (BF16, None, False, "tensor"), (E4M3, ONE, False, "tensor"), (E4M3, None, True, "tensor"),
        (E4M3, ONE, True, "tensor"), (E4M3, None, True, "mx"))],
     "norm_rows norm_rows norm_rows norm_rows quantize_transpose norm_rows norm_rows "
     "quantize_transpose norm_rows quantize_mx"),
    ("dequantize_mx", [(X.to(E4M3), MX_SCALES, None, "mxfp8_e4m3", 32, BF16),
                       (CODES, NVFP4_SCALES, None, "nvfp4", 32, BF16),
                       (CODES[:0], NVFP4_SCALES[:0], None, "nvfp4", 0, BF16)],
     "dequantize_mx dequantize_mx"),
    # The constants of all params, then one launch a param; nothing for empty ones.
    *((RULES[rule][0], updates(rule), 3 * "step_constants step step ")
      for rule in ("decoupled", "momentum")),
    # One a gradient; two where there is more than one partial sum to add; none for empty ones.
    ("grad_stats_", [(GRADS, ONE, torch.zeros(()), torch.zeros(3).double(), None)],
     "grad_stats grad_stats sum"),
    ("gemm", [(a, b, None, None, None, BF16, False) for a, b in EMPTY], ""),
    ("gemm_accumulate_", [(a.new_zeros(len(a), b.shape[1], dtype=F32), a, b, None, None)
                          for a, b in EMPTY], ""),
]  # fmt: skip


@pytest.mark.parametrize(("op", "calls", "names"), LAUNCHES, ids=[op for op, *_ in LAUNCHES])
def test_which_kernels_are_launched(
    launched: list[Launch], op: str, calls: list[Any], names: str
) -> None:
    for args in calls:
        launcher(op)(*args)
    assert [one.stem for one in launched] == names.split()
    fused = [one.keywords.get("enable_fp_fusion", "no word") for one in launched]
    assert not op.endswith(("adamw_", "sgd_")) or not any(fused)
