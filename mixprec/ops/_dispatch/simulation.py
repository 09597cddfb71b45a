"""simulate: matrix products on the CPU as the tensor cores of a GPU compute them.

A step of a sum of products is computed in exact integers; the formula is that of
csrc/math/tensor_core.h, which says where it is from.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from torch.overrides import _get_current_function_mode_stack

from ..._modes import Block, follow_checkpoints
from ...formats import Format
from .._reference import gemm_scales
from .._reference.block_formats import BLOCK_FORMATS
from . import checks


class TensorCore(NamedTuple):
    """fraction_bits: below the exponent of the largest addend; terms: products that a step adds;
    min_exponent: of the largest addend; significant_bits: of the result; promoted: whether our
    kernels add the sum of each 128 of K to an FP32 register; group: of so many products the exact
    sum is an addend; parts: AMD's, which cuts the products before it adds c, in so many sums."""

    fraction_bits: int
    terms: int
    min_exponent: int
    significant_bits: int
    promoted: bool = False
    group: int = 0
    parts: int = 0


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
    "mi300": {
        _F16 + _BF16: TensorCore(24, 8, -126, 24, parts=1),
        _FP8: TensorCore(24, 16, -126, 24, parts=2),
    },
}
# Blackwell's for block formats, by the number of elements that share the exponents it is given.
BLOCKS = {32: _WIDE._replace(terms=32), 16: TensorCore(35, 64, -139, 24, group=16)}
ARCHITECTURES = tuple(_TABLE)
_NONE = -(1 << 20)  # the exponent of a product that is 0
_NAN = 0x7FFFFFFF
_GPUS = {  # by lower-case names without spaces
    **dict.fromkeys(("l4", "l40s", "4090", "rtx4090"), "ada"),
    **dict.fromkeys(("h100", "h200"), "hopper"),
    "b200": "blackwell",
    **dict.fromkeys(("mi300a", "mi300x", "mi325x"), "mi300"),
}


class simulate(Block):
    """Inside, `gemm` and `gemm_accumulate_` of CPU tensors give the bits of a GPU's tensor cores.

        with mixprec.simulate("hopper"):
            loss = model(x)          # mixprec.nn.Linear, mixprec.functional.linear, ...
        loss.backward()              # the same GPU, inside or outside

    arch: "v100" (fp16), "a100" (fp16, bf16), "ada", "hopper", "blackwell" or "mi300" (fp16, bf16,
    FP8), or a GPU: "L4", "L40S", "RTX 4090" or "4090"; "H100", "H200"; "B200"; "MI300X", "MI300A",
    "MI325X", in any case. "blackwell" also multiplies block formats, MX in any mix and NVFP4, with
    blocks along K. A GEMM in a format without an instruction raises ValueError. Products are added
    in groups of 4 to 64 to the sum so far, every addend cut below the largest one, along K in
    ascending order; FP8 sums of Ada and Hopper enter an FP32 register after each 128 of K, unless
    fast_accum is set. Scales of rows, tensors and squares, bias and the rounding of the result are
    those of `gemm`. docs/numerics.md has the formulas, what of it was measured on GPUs (nothing of
    block formats), and what it leaves out: a kernel that splits K, or adds in another order, gives
    other bits.

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


def check_blocks(arch: str, *fmts: str) -> int:
    """The GPU multiplies these two block formats; returns the key of `BLOCKS`."""
    stored = {*fmts} <= {*BLOCK_FORMATS}
    if arch != "blackwell" or not stored or fmts.count("nvfp4") == 1:
        raise ValueError(
            f"simulate: the tensor cores of {arch} have no instruction for {' by '.join(fmts)}: "
            'those of "blackwell" multiply NVFP4 by NVFP4, and MX formats in any mix'
        )
    return 16 if set(fmts) <= {"mxfp4", "nvfp4"} else 32


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


def _parts(x: torch.Tensor, least: Any) -> tuple[torch.Tensor, torch.Tensor]:
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


def least_exponent(fmt: torch.dtype | Format) -> int:
    """That of the smallest normal number; a subnormal number has it, too."""
    limits = fmt if isinstance(fmt, Format) else torch.finfo(fmt)
    return math.frexp(limits.smallest_normal)[1] - 1


def _amd(
    core: TensorCore, products: torch.Tensor, exponents: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """c + the sum of the finite products * 2^(exponents - 46)."""
    products, exponents = (x.unflatten(-1, (-1, core.parts)) for x in (products, exponents))
    tops = torch.where(products != 0, exponents, _NONE).amax(-2)
    cut = _cut(products, 46 - core.fraction_bits + tops[..., None, :] - exponents).sum(-2)
    top = tops.amax(-1)
    dot = (cut >> (top[..., None] - tops).clamp(0, 63)).sum(-1)  # toward -Inf, as all from here on
    mc, ec = _parts(c, -126)
    high = torch.maximum(top, ec)
    if core.parts > 1:
        mc = torch.where(ec < high - core.fraction_bits - 1, 0, mc)
    total = dot << 8 >> (high - top).clamp(0, 63)
    total = total + (mc << 1 >> (high - ec).clamp(0, 63) << 8)
    drop = torch.frexp(total.abs().double()).exponent.long() - 32
    drop = torch.maximum(drop, -125 - high).clamp(0, 63)
    return torch.ldexp((total >> drop << drop).double(), high - 32).float() + 0.0  # not -0


def step(
    core: TensorCore,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    least: tuple[Any, Any],
) -> torch.Tensor:
    """c + the sum over the last dimension of a * b, as one step of the tensor core computes it.

    a, b: fp32 [..., terms], or fewer without `group` and `parts`, broadcast to each other; c: fp32
    [...]. least: the smallest exponents of a's and of b's numbers; with `group` the exponents of
    the scales, [..., terms / group].
    """
    fraction = core.fraction_bits
    exact = a.double() * b.double()
    if core.group:
        in_groups, exponents = exact.unflatten(-1, (-1, core.group)), least[0] + least[1]
        there = (in_groups != 0).any(-1)
        products = torch.ldexp(in_groups.sum(-1), 46 - exponents).long()
    else:
        (ma, ea), (mb, eb) = (_parts(x, e) for x, e in zip((a, b), least, strict=True))
        products, exponents = ma * mb, ea + eb
        there = products != 0
    if core.parts:
        y = _amd(core, products, exponents, c)
        exact = torch.where(exact.abs() < 2.0**128, exact, exact * math.inf)
    else:
        mc, ec = _parts(c, -126)
        top = torch.where(there, exponents, _NONE).amax(-1)
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
    usual = torch.isfinite(exact).all(-1) & torch.isfinite(c)
    y = torch.where(usual, y, (exact.sum(-1) + c.double()).float())
    nan = torch.full_like(y, _NAN, dtype=torch.int32).view(torch.float32)
    return torch.where(torch.isnan(y), nan, y)


def product(
    operands: gemm_scales.Operands,
    fast_accum: bool,
    arch: str,
    exponents: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """`gemm_scales.product` by chained steps along K. exponents: of blocks, see `step`."""
    core = tensor_core(arch, operands.a.dtype)
    of_a, of_b = exponents
    if of_a is not None:
        core = BLOCKS[32 if of_a.shape[1] == -(-operands.a.shape[1] // 64) * 2 else 16]
    assert core is not None

    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        c = torch.zeros((x.shape[0], y.shape[1]), dtype=torch.float32, device=x.device)
        more = -x.shape[1] % core.terms if core.group or core.parts else 0
        left, right = (pad(t.float(), (0, more)) for t in (x, y.t()))
        least: Any = least_exponent(x.dtype), least_exponent(y.dtype)
        for i, start in enumerate(range(0, x.shape[1], core.terms)):
            part = slice(start, start + core.terms)
            if of_a is not None and of_b is not None:
                blocks = slice(i, i + 1) if not core.group else slice(4 * i, 4 * i + 4)
                least = of_a[:, None, blocks], of_b[None, :, blocks]
            c = step(core, left[:, None, part], right[None, :, part], c, least)
        return c

    promoted = core.promoted and not fast_accum
    return gemm_scales.product(operands, multiply=multiply, promoted=promoted)
