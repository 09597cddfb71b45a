"""simulate: matrix products on the CPU as the tensor cores of a GPU compute them.

A step of a sum of products is computed in exact integers; the formula is that of
csrc/math/tensor_core.h, which says where it is from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack

from ..._modes import Block, follow_checkpoints
from .._reference import gemm_scales
from . import checks


class TensorCore(NamedTuple):
    """fraction_bits: below the exponent of the largest addend; terms: products that a step adds;
    min_exponent: of the largest addend; significant_bits: of the result; promoted: whether our
    kernels add the sum of each 128 of K to an FP32 register."""

    fraction_bits: int
    terms: int
    min_exponent: int
    significant_bits: int
    promoted: bool = False


_F16, _BF16, _FP8 = (torch.float16,), (torch.bfloat16,), checks.FP8
_WIDE = TensorCore(25, 16, -133, 24)
_TABLE: dict[str, dict[tuple[torch.dtype, ...], TensorCore]] = {
    "v100": {_F16: TensorCore(23, 4, -131, 24)},
    "a100": {_F16 + _BF16: TensorCore(24, 8, -132, 24)},
    "ada": {
        _F16 + _BF16: TensorCore(24, 8, -132, 24),
        _FP8: TensorCore(13, 16, -132, 14, promoted=True),
    },
    "hopper": {_F16 + _BF16: _WIDE, _FP8: TensorCore(13, 32, -133, 14, promoted=True)},
    "blackwell": {_F16 + _BF16: _WIDE, _FP8: _WIDE._replace(terms=32)},
}
ARCHITECTURES = tuple(_TABLE)
# The exponent of the smallest normal number; that of a subnormal number, too.
_MIN_EXPONENT = {
    torch.float8_e4m3fn: -6,
    torch.float8_e5m2: -14,
    torch.float16: -14,
    torch.bfloat16: -126,
}
_NONE = -(1 << 20)  # the exponent of a product that is 0
_NAN = 0x7FFFFFFF
_GPUS = {  # by lower-case names without spaces
    **dict.fromkeys(("l4", "l40s", "4090", "rtx4090"), "ada"),
    **dict.fromkeys(("h100", "h200"), "hopper"),
    "b200": "blackwell",
}


class simulate(Block):
    """Inside, `gemm` and `gemm_accumulate_` of CPU tensors give the bits of a GPU's tensor cores.

        with mixprec.simulate("hopper"):
            loss = model(x)          # mixprec.nn.Linear, mixprec.functional.linear, ...
        loss.backward()              # the same GPU, inside or outside

    arch: "v100" (fp16), "a100" (fp16, bf16), "ada", "hopper" or "blackwell" (fp16, bf16, FP8), or a
    GPU of the last three: "L4", "L40S", "RTX 4090" or "4090"; "H100", "H200"; "B200", in any case.
    A GEMM in a format without an instruction raises ValueError. Products are added in groups of 4
    to 32 to the sum so far, every addend cut below the largest one, along K in
    ascending order; FP8 sums of Ada and Hopper enter an FP32 register after each 128 of K, unless
    fast_accum is set. Scales, bias and the rounding of the result are those of `gemm`.
    docs/numerics.md has the formula, what of it was measured on GPUs, and what it leaves out: a
    kernel that splits K, or adds in another order, gives other bits.

    Only GEMMs of this library on a CPU are simulated, not torch's own ops, and not convolutions.
    A backward pass uses what its forward pass was
    in, and so does torch.utils.checkpoint; for second derivatives, call it inside the block too.
    The block holds for the thread that entered it; blocks nest; leaving one, also by an exception,
    restores the one before. ValueError for another arch.
    Sources: arXiv 2512.07004, arXiv 2511.10909.
    """

    def __init__(self, arch: str) -> None:
        super().__init__()
        if not torch.compiler.is_compiling():
            follow_checkpoints()
        name = str(arch).lower().replace(" ", "")
        self.arch = _GPUS.get(name, name)
        if self.arch not in ARCHITECTURES:
            raise ValueError(
                f"simulate: arch must be one of {', '.join(ARCHITECTURES)}, or a GPU "
                f"({', '.join(f'{gpu}: {kind}' for gpu, kind in _GPUS.items())}), got {arch!r}"
            )


def current() -> str | None:
    """The GPU of the innermost `simulate` block of this thread; None outside of one."""
    if not torch._C._len_torch_function_stack():
        return None
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, simulate):
            return mode.arch
    return None


def check(arch: str, dtype: torch.dtype) -> None:
    """The GPU has an instruction for operands of `dtype`."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"gemm_simulated: arch must be one of {ARCHITECTURES}, got {arch!r}")
    if tensor_core(arch, dtype) is None:
        names = ", ".join(str(d).removeprefix("torch.") for d in formats(arch))
        raise ValueError(
            f"simulate: the tensor cores of {arch} have no instruction for {dtype} operands, "
            f"only for {names}"
        )


def tensor_core(arch: str, dtype: torch.dtype) -> TensorCore | None:
    """That of an architecture for operands of `dtype`; None if it has none."""
    for dtypes, core in _TABLE[arch].items():
        if dtype in dtypes:
            return core
    return None


def formats(arch: str) -> tuple[torch.dtype, ...]:
    return tuple(dtype for dtypes in _TABLE[arch] for dtype in dtypes)


def _parts(x: torch.Tensor, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed significands and exponents of fp32 x: x = significand * 2^(exponent - 23), where the
    exponent is `least` or more. Exact for finite numbers of a format whose smallest exponent is
    `least`."""
    bits = x.view(torch.int32).long() & 0x7FFFFFFF
    exponent = (bits >> 23).clamp(min=1) - 127
    significand = bits & 0x7FFFFF | (bits >= 1 << 23).long() << 23
    significand = significand >> (least - exponent).clamp(0, 63)
    return torch.where(x.signbit(), -significand, significand), exponent.clamp(min=least)


def _cut(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x * 2^-shift, toward zero."""
    kept = x.abs() >> shift.clamp(0, 63)
    return torch.where(x < 0, -kept, kept)


def step(
    core: TensorCore,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> torch.Tensor:
    """c + the sum over the last dimension of a * b, as one step of the tensor core computes it.

    a, b: fp32 [..., terms or fewer], broadcast to each other, values of `dtypes`; c: fp32 [...].
    """
    fraction = core.fraction_bits
    (ma, ea), (mb, eb) = (_parts(x, _MIN_EXPONENT[d]) for x, d in zip((a, b), dtypes, strict=True))
    mc, ec = _parts(c, -126)
    products, exponents = ma * mb, ea + eb
    top = torch.where(products != 0, exponents, _NONE).amax(-1)
    top = torch.maximum(top, torch.where(mc != 0, ec, _NONE)).clamp(min=core.min_exponent)
    total = _cut(products, 46 - fraction + top[..., None] - exponents).sum(-1)
    total = total + _cut(mc << max(fraction - 23, 0), max(23 - fraction, 0) + top - ec)
    unit = top - fraction
    length = torch.frexp(total.abs().double()).exponent.long()
    # No more bits than the result has, and none below the smallest FP32 number.
    drop = torch.maximum(length - core.significant_bits, -149 - unit).clamp(0, 63)
    kept = torch.where(total < 0, -(total.abs() >> drop << drop), total.abs() >> drop << drop)
    y = torch.ldexp(kept.double(), unit).float()
    # What Inf and NaN give. 0 * Inf is NaN, and the sum of Inf and -Inf.
    special = ((a.double() * b.double()).sum(-1) + c.double()).float()
    usual = torch.isfinite(a).all(-1) & torch.isfinite(b).all(-1) & torch.isfinite(c)
    y = torch.where(usual, y, special)
    nan = torch.full_like(y, _NAN, dtype=torch.int32).view(torch.float32)
    return torch.where(torch.isnan(y), nan, y)


def product(operands: gemm_scales.Operands, fast_accum: bool, arch: str) -> torch.Tensor:
    """`gemm_scales.product` by chained steps along K."""
    core = tensor_core(arch, operands.a.dtype)
    assert core is not None

    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        c = torch.zeros((x.shape[0], y.shape[1]), dtype=torch.float32, device=x.device)
        left, right = x.float()[:, None], y.float().t()[None]
        for start in range(0, x.shape[1], core.terms):
            part = slice(start, start + core.terms)
            c = step(core, left[..., part], right[..., part], c, (x.dtype, y.dtype))
        return c

    promoted = core.promoted and not fast_accum
    return gemm_scales.product(operands, multiply=multiply, promoted=promoted)
