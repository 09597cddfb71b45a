"""gemm and gemm_accumulate_: matrix products of low-precision operands, accumulated in FP32."""

from __future__ import annotations

from typing import Any

import torch

from ..quantized import Quantized
from ._dispatch import autocast, checks, gemm_table, gemm_vendor, scaled_mm, simulation
from ._dispatch.op import Op
from ._dispatch.scaled_mm import Blocks
from ._reference import gemm_scales
from ._reference.gemm_scales import Operands
from .block_operands import blocks_of, decode, exponents, is_block

Operand = torch.Tensor | Quantized


def _finish(acc: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    if bias is not None:
        acc = acc + bias.float()
    return acc.to(out_dtype)


def gemm_reference(
    operands: Operands, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return _finish(gemm_scales.product(operands), bias, out_dtype)


def gemm_simulated_reference(args: Any) -> torch.Tensor:
    by_block = args.a_exponents, args.b_exponents
    acc = simulation.product(Operands(*args[:4]), args.fast_accum, args.arch, by_block)
    return _finish(acc, args.bias, args.out_dtype)


def gemm_accumulate_reference_(acc: torch.Tensor, operands: Operands) -> None:
    acc.add_(gemm_scales.product(operands))


def _check_operands(op: str, operands: Operands) -> tuple[int, int]:
    """The shape of the product."""
    a, b, a_scale_inv, b_scale_inv = operands
    gemm_scales.check_operands(op, a, b)
    if a.dim() != 2:
        raise ValueError(f"{op}: a must be [M, K], got shape {tuple(a.shape)}")
    if b.dim() != 2:
        raise ValueError(f"{op}: b must be [K, N], got shape {tuple(b.shape)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{op}: a [M, K] and b [K, N] must agree in K, "
            f"got a {tuple(a.shape)} and b {tuple(b.shape)}"
        )
    m, k, n = *a.shape, b.shape[1]
    gemm_scales.check(op, "a_scale_inv", a_scale_inv, m, k, a, is_b=False)
    gemm_scales.check(op, "b_scale_inv", b_scale_inv, n, k, a, is_b=True)
    return m, n


def _check_gemm(operands: Operands, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    _, n = _check_operands("gemm", operands)
    _check_result(bias, out_dtype, n, operands.a)


def _check_result(
    bias: torch.Tensor | None, out_dtype: torch.dtype, n: int, a: torch.Tensor
) -> None:
    checks.is_float("gemm", "out_dtype", out_dtype)
    checks.matches("gemm", "bias", bias, checks.FLOATS, a, (n,), "[N]", "a")


def _check_simulated(args: Any) -> None:
    _check_gemm(Operands(*args[:4]), args.bias, args.out_dtype)
    simulation.check(args.arch, args.a.dtype)
    if args.a_exponents is None is args.b_exponents:
        return
    of_blocks = args.arch == "blackwell" and args.a.dtype == torch.bfloat16
    rows, k = (args.a.shape[0], args.b.shape[1]), -(-args.a.shape[1] // 64) * 64
    given = [(t.dtype, *t.shape) for t in args[-2:] if isinstance(t, torch.Tensor)]
    if not of_blocks or given not in [[(torch.int32, r, k // s) for r in rows] for s in (32, 16)]:
        raise ValueError(
            "gemm_simulated: a_exponents and b_exponents must be None or, with bfloat16 operands "
            f"on blackwell, int32 [rows, K/32] or [rows, K/16], K rounded up to 64, got {given}"
        )


def _check_accumulate(acc: torch.Tensor, operands: Operands) -> None:
    op = "gemm_accumulate_"
    shape = _check_operands(op, operands)
    gemm_scales.check_acc(op, acc, shape, "[M, N]", operands.a, **operands._asdict())


def _fake(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_OPERANDS = "Tensor a, Tensor b, Tensor? a_scale_inv, Tensor? b_scale_inv"
_RESULT = "Tensor? bias, ScalarType out_dtype, bool fast_accum"
_ON_GPU: dict[str, Any] = {
    "triton": "gemm",
    "prefers": gemm_table.order,
    "refuses": {"vendor": gemm_vendor.gemm_why_not, "cuda": gemm_table.cuda_why_not},
}
gemm_op = Op(
    "gemm",
    f"({_OPERANDS}, {_RESULT}) -> Tensor",
    reference=gemm_reference,
    fake=_fake,
    check=_check_gemm,
    vendor=gemm_vendor.gemm_vendor,
    operands=("a", "b"),
    **_ON_GPU,
)
gemm_simulated_op = Op(
    "gemm_simulated",
    f"({_OPERANDS}, {_RESULT}, str arch, Tensor? a_exponents=None, Tensor? b_exponents=None)"
    " -> Tensor",
    reference=gemm_simulated_reference,
    fake=_fake,
    check=_check_simulated,
    operands=("a", "b"),
)
gemm_accumulate_op = Op(
    "gemm_accumulate_",
    f"(Tensor(a!) acc, {_OPERANDS}) -> ()",
    reference=gemm_accumulate_reference_,
    check=_check_accumulate,
    vendor=gemm_vendor.gemm_accumulate_vendor_,
    operands=("a", "b"),
    **_ON_GPU,
)


def run(
    operands: Operands,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    simulated: str | None,
) -> torch.Tensor:
    """`gemm` of plain tensors without the autograd check and autocast: for autograd functions,
    which have cast the operands. simulated: the GPU of a `simulate` block."""
    if simulated is not None and operands.a.device.type == "cpu":
        return gemm_simulated_op(*operands, bias, out_dtype, fast_accum, simulated)
    return gemm_op(*operands, bias, out_dtype, fast_accum)


def accumulate(acc: torch.Tensor, operands: Operands, simulated: str | None) -> None:
    """`gemm_accumulate_` of plain tensors; see `run`."""
    if simulated is not None and operands.a.device.type == "cpu":
        if not torch.compiler.is_compiling():
            gemm_accumulate_op.check(acc, *operands)
        acc.add_(run(operands, None, torch.float32, False, simulated))
    else:
        gemm_accumulate_op(acc, *operands)


def product_of_blocks(
    a: Blocks,
    b: Blocks,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    simulated: str | None = None,
) -> torch.Tensor | None:
    """a @ b^T + bias by a GPU, or a simulated one, that multiplies these formats; else None."""
    if a.data.is_cuda:
        return scaled_mm.product(a, b, bias, out_dtype)
    if simulated is None or a.data.device.type != "cpu":
        return None
    size = simulation.check_blocks(simulated, a.fmt, b.fmt)
    rest = bias, out_dtype, False, simulated, exponents(a, size), exponents(b, size)
    return gemm_simulated_op(*_decoded(a, b), *rest)


def run_blocks(
    a: Blocks,
    b: Blocks,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    simulated: str | None,
) -> torch.Tensor:
    """a @ b^T + bias of two matrices in block formats; see `run`."""
    y = product_of_blocks(a, b, bias, out_dtype, simulated)
    return run(_decoded(a, b), bias, out_dtype, fast_accum, simulated) if y is None else y


def accumulate_blocks(acc: torch.Tensor, a: Blocks, b: Blocks, simulated: str | None) -> None:
    """acc += a @ b^T of two matrices in block formats; see `run`."""
    y = product_of_blocks(a, b, None, torch.float32, simulated)
    if y is None:
        return accumulate(acc, _decoded(a, b), simulated)
    gemm_scales.check_acc("gemm_accumulate_", acc, y.shape, "[M, N]", y)
    acc.add_(y)
    return None


def _decoded(a: Blocks, b: Blocks) -> Operands:
    (a_data, a_inv), (b_data, b_inv) = decode(a), decode(b)
    return Operands(a_data, b_data.t(), a_inv, None if b_inv is None else b_inv.t())


def _along_k(
    a: Operand, b: Operand, *scales: float | torch.Tensor | None
) -> tuple[Blocks, Blocks] | None:
    """a and b^T, if both are in block formats with blocks along K; scales: those given for them."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized) and is_block(a) and is_block(b)):
        return None
    if a.is_t or not b.is_t or any(scale is not None for scale in scales):
        return None
    return blocks_of(a), blocks_of(b)


def plain_operand(
    op: str, name: str, x: torch.Tensor, scale_inv: float | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An operand, cast by torch.autocast where that is on, and the fp32 tensor that undoes its
    scale."""
    if not isinstance(x, torch.Tensor):
        checks.is_tensor(op, name, x)  # whose other checks are those of the op
    inv = None
    if scale_inv is not None:
        inv = gemm_scales.positive(op, f"{name}_scale_inv", scale_inv, x.device)
    return autocast.operand(x), inv


def _unpack(
    op: str, name: str, x: Quantized, scale_inv: float | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`plain_operand` of a Quantized, block formats as bf16."""
    if scale_inv is not None:
        raise ValueError(f"{op}: {name} is Quantized and brings its own {name}_scale_inv")
    if not is_block(x):
        return autocast.operand(x.data), x.scale_inv
    if (arch := simulation.current()) is not None:
        raise ValueError(
            f"{op}: simulate has no instruction of {arch} for {name} in a block format unless both "
            "operands are, with blocks along K"
        )
    data, inv = decode(blocks_of(x))
    return (data.t(), None if inv is None else inv.t()) if x.is_t else (data, inv)


def _unpack_both(
    op: str,
    a: Operand,
    b: Operand,
    a_scale_inv: float | torch.Tensor | None,
    b_scale_inv: float | torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """What `Operands` has."""
    unscaled = a_scale_inv is None is b_scale_inv and type(a) is type(b) is torch.Tensor
    if unscaled and not torch._C._is_any_autocast_enabled():
        return a, b, None, None  # type: ignore[return-value]
    unpack_a: Any = _unpack if isinstance(a, Quantized) else plain_operand
    unpack_b: Any = _unpack if isinstance(b, Quantized) else plain_operand
    a_data, a_inv = unpack_a(op, "a", a, a_scale_inv)
    b_data, b_inv = unpack_b(op, "b", b, b_scale_inv)
    plain = unpack_a is plain_operand is unpack_b
    if not plain and is_block(a) != is_block(b):
        name, dtype = ("b", b_data.dtype) if is_block(a) else ("a", a_data.dtype)
        if dtype != torch.bfloat16:
            raise ValueError(
                f"{op}: {name} must be bfloat16 or in a block format, as the other operand is, "
                f"got {dtype}"
            )
    return a_data, b_data, a_inv, b_inv


def gemm(
    a: Operand,
    b: Operand,
    *,
    a_scale_inv: float | torch.Tensor | None = None,
    b_scale_inv: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Return (a @ b) * a_scale_inv * b_scale_inv + bias, [M, N] contiguous.

    a: [M, K], b: [K, N], any strides: both fp16, both bf16, on a CPU both fp32, or FP8 (E4M3 and
    E5M2 in any mix); a Quantized, or its t(), includes its scale_inv. Block formats ("mx", "nvfp4")
    in any mix, or beside bf16: they are decoded to bf16, which is exact for magnitudes from 2^-133
    to bf16's maximum, and the FP32 scale of an "nvfp4" tensor multiplies the sum. GPUs of compute
    capability 10 and 12 multiply MXFP8 (not E5M2 by E5M2) and NVFP4 as they are, for blocks along
    K, K a multiple of 32 and N of 16. a_scale_inv: fp32, any strides:

        one element (a number is accepted)   for all of a
        [M, 1]                               per row
        [M, ceil(K/128)]                     per 128 of K in a row
        [ceil(M/128), ceil(K/128)]           per square of 128 x 128

    b_scale_inv: the transposes of these, for b; the two operands may differ. bias: [N], fp32, bf16
    or fp16. out_dtype: fp32, bf16 or fp16; None takes the operands' dtype, bf16 for FP8.

    Accumulation is FP32, with one rounding at the end. Scales that change along K multiply the FP32
    sum of each 128 of K; other scales multiply the whole sum. fast_accum allows the shorter
    accumulator of FP8 tensor cores; it has no effect on a CPU, except inside `simulate`. K = 0
    gives the bias or zeros. Inside torch.autocast a and b of fp32, bf16 or fp16 are first cast to
    the autocast dtype; FP8, scales and bias are not cast. Raises ValueError naming the invalid
    argument.
    """
    both = _along_k(a, b, a_scale_inv, b_scale_inv) if isinstance(a, Quantized) else None
    if both is not None:
        checks.needs_no_grad("gemm", "use mixprec.functional.linear", bias)
        out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
        _check_result(bias, out_dtype, b.shape[1], both[0].data)
        return run_blocks(*both, bias, out_dtype, fast_accum, simulation.current())
    operands = _unpack_both("gemm", a, b, a_scale_inv, b_scale_inv)
    hint, dtype = "use mixprec.functional.matmul or linear", operands[0].dtype
    checks.needs_no_grad("gemm", hint, operands[0], operands[1], bias)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if dtype in checks.FP8 else dtype
    if (simulated := simulation.current()) is not None:
        return run(Operands(*operands), bias, out_dtype, fast_accum, simulated)
    return gemm_op(*operands, bias, out_dtype, fast_accum)


def gemm_accumulate_(
    acc: torch.Tensor,
    a: Operand,
    b: Operand,
    *,
    a_scale_inv: float | torch.Tensor | None = None,
    b_scale_inv: float | torch.Tensor | None = None,
) -> None:
    """acc += (a @ b) * a_scale_inv * b_scale_inv in FP32, in place: weight gradients.

    acc: [M, N] fp32, any strides, inside torch.autocast too. a: [M, K], b: [K, N] and their scales
    as in `gemm`. K = 0 leaves acc unchanged. ValueError also if acc overlaps in memory with an
    operand or its scales.
    """
    op = "gemm_accumulate_"
    if (both := _along_k(a, b, a_scale_inv, b_scale_inv)) is not None:
        checks.needs_no_grad(op, "use mixprec.functional.linear", acc)
        return accumulate_blocks(acc, *both, simulation.current())
    operands = Operands(*_unpack_both(op, a, b, a_scale_inv, b_scale_inv))
    checks.needs_no_grad(op, "use mixprec.functional.linear", acc, operands.a, operands.b)
    return accumulate(acc, operands, simulation.current())
