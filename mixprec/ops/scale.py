"""amax, and scalar arithmetic: the scale from amax, the update of the loss scale, clipping."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import formats
from ._dispatch import checks
from ._dispatch.op import Op

_EXPONENT = 0x7F800000  # the sign and mantissa bits of an fp32 masked away


def amax_reference(x: torch.Tensor) -> torch.Tensor:
    """max |x| in FP32; NaN if any element is NaN, else Inf if any is; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.float().abs().amax()


amax_op = Op(
    "amax",
    "(Tensor x) -> Tensor",
    reference=amax_reference,
    fake=lambda x: x.new_empty((), dtype=torch.float32),
    check=lambda x: checks.has_dtype("amax", "x", x, checks.FLOATS),
    triton="amax",
)


def amax(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| as an fp32 scalar tensor [] on x's device, without a host sync.

    x: any shape and strides, fp32, bf16 or fp16. NaN if any element is NaN, else Inf if any is
    infinite; 0 for an empty tensor. Raises TypeError or ValueError for other inputs.
    """
    checks.needs_no_grad("amax", "call it on x.detach()", x)
    return amax_op(x)


def scale_from_amax(
    amax: torch.Tensor,
    fmt_max: float,
    margin: int,
    power_of_two: bool,
    previous: torch.Tensor | float,
) -> torch.Tensor:
    """scale = fmt_max / amax * 2^-margin, elementwise in FP32: one rounding, in the division.

    Rounded down to a power of two if asked, clamped to [2^-126, 2^126] so that its inverse is
    normal. Where amax is 0, Inf or NaN the scale is `previous`.
    """
    scale = torch.full_like(amax, fmt_max) / amax * 2.0**-margin
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    usable = torch.isfinite(amax) & (amax > 0)
    return torch.where(usable, scale.clamp(checks.MIN_SCALE, checks.MAX_SCALE), previous)


def new_scales(
    amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales for these maxima, of their shape, 1 where there is none; and the inverses."""
    # Selective checkpointing repeats what an op returned, not what it wrote.
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0:
        scale = scale_from_amax(amax, formats.parse(dtype).max, 0, power_of_two, 1.0)
        return scale, 1.0 / scale
    scale, inverse = torch.ones_like(amax), torch.ones_like(amax)
    scale_from_amax_op(scale, inverse, amax, dtype, 0, power_of_two)
    return scale, inverse


def scale_from_amax_reference_(args: Any) -> None:
    scale, scale_inv, amax, dtype, margin, power_of_two = args
    fmt_max = formats.parse(dtype).max
    scale.copy_(scale_from_amax(amax, fmt_max, margin, power_of_two, scale))
    scale_inv.copy_(1.0 / scale)


def _check_scale_from_amax(args: Any) -> None:
    op, scale = "scale_from_amax_", args.scale
    formats.parse(args.dtype, who=op)
    checks.is_tensor(op, "scale", scale)
    for name in ("scale", "scale_inv", "amax"):
        checks.is_like(op, name, t := getattr(args, name), scale, (torch.float32,), "scale")
        if t is not args.amax:
            checks.is_writable(op, name, t)
    if not isinstance(args.margin, int) or not -64 <= args.margin <= 64:
        raise ValueError(f"{op}: margin must be an int between -64 and 64, got {args.margin!r}")


scale_from_amax_op = Op(
    "scale_from_amax_",
    "(Tensor(a!) scale, Tensor(b!) scale_inv, Tensor amax, ScalarType dtype, int margin, "
    "bool power_of_two) -> ()",
    reference=scale_from_amax_reference_,
    check=_check_scale_from_amax,
    triton="scale",
)


def scale_from_amax_(
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    amax: torch.Tensor,
    fmt: formats.Format | str | torch.dtype,
    *,
    margin: int = 0,
    power_of_two: bool = True,
) -> None:
    """Set scale = fmt.max / amax * 2^-margin and scale_inv = 1 / scale, for many tensors at once.

    scale, scale_inv, amax: fp32, one shape, any number of elements. Where amax is 0 or not
    finite, scale keeps its value. power_of_two rounds the scale down to a power of two. The range
    of the result is [2^-126, 2^126].
    """
    op = "scale_from_amax_"
    dtype = formats.parse(fmt, who=op).dtype
    scale_from_amax_op(scale, scale_inv, amax, dtype, margin, power_of_two)


def inv_scale_reference(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, computed in FP64 and rounded to FP32."""
    return scale.double().reciprocal().float()


inv_scale_op = Op(
    "inv_scale",
    "(Tensor scale) -> Tensor",
    reference=inv_scale_reference,
    fake=lambda scale: torch.empty_like(scale),
    check=lambda scale: checks.is_scalar("inv_scale", "scale", scale, torch.float32),
    triton="scale",
)


def inv_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale (fp32, one element), computed in FP64 and rounded once to FP32."""
    return inv_scale_op(scale)


def clip_coef_reference(sum_sq: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (sqrt(sum of sum_sq) + 1e-6)) in FP64, rounded to FP32."""
    total = sum_sq.sum()
    limit = torch.full_like(total, max_norm)  # number / tensor would round twice
    return (limit / (total.sqrt() + 1e-6)).clamp(max=1.0).float()


def _check_clip_coef(sum_sq: torch.Tensor, max_norm: float) -> None:
    checks.has_dtype("clip_coef", "sum_sq", sum_sq, (torch.float64,))
    if not sum_sq.is_contiguous():
        raise ValueError(f"clip_coef: sum_sq must be contiguous, got strides {sum_sq.stride()}")
    if not max_norm > 0:
        raise ValueError(f"clip_coef: max_norm must be positive, got {max_norm}")


clip_coef_op = Op(
    "clip_coef",
    "(Tensor sum_sq, float max_norm) -> Tensor",
    reference=clip_coef_reference,
    fake=lambda sum_sq: sum_sq.new_empty((), dtype=torch.float32),
    check=_check_clip_coef,
    triton="scale",
)


def clip_coef(sum_sq: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that clips gradients to the norm `max_norm`.

    clip = min(1, max_norm / (sqrt(sum of sum_sq) + 1e-6)), as torch.nn.utils.clip_grad_norm_
    computes it. sum_sq: fp64, any shape, contiguous: the squared norms of `grad_stats_`, added in
    a fixed order. Returns fp32 [] on the same device; NaN if the sum is NaN. ValueError if
    max_norm is not positive.
    """
    return clip_coef_op(sum_sq, float(max_norm))


def underflow_share(counts: torch.Tensor, elements: int | torch.Tensor) -> torch.Tensor:
    """The share of subnormal numbers among the gradients that are not 0: fp32 [].

    counts: int64 [n, 4] of `grad_stats_`, over `elements` elements in all. 1 if all are 0.
    Otherwise zeros do not count, because most are not underflow: for example, unused rows of an
    embedding.
    """
    some, subnormals = elements - counts[:, 2].sum(), counts[:, 3].sum()
    return torch.where(some > 0, subnormals.float() / some.clamp(min=1).float(), elements > 0)


COUNTERS = 3  # of updates: with an overflow, without one, and consecutive ones with one
# Early growth waits for this part of growth_interval without an overflow, so that a scale which
# underflow drives up and overflow drives down costs at most a few skipped steps in a hundred.
_EARLY = 20


def update_scale_reference_(args: Any) -> None:
    scale, growth_tracker, hysteresis_tracker, counters, found_inf, underflow = args[:6]
    found = found_inf.reshape(()) != 0
    now, clean, left = (t.reshape(()) for t in (scale, growth_tracker, hysteresis_tracker))
    left = torch.where(found, left - 1, left)
    clean = torch.where(found, 0, clean.long() + 1)  # long: growth_interval may be
    grows = ~found & (clean >= args.growth_interval)
    if underflow is not None:
        early = clean * _EARLY >= args.growth_interval
        grows = grows | (~found & early & (underflow.reshape(()) > args.grow_on_underflow))
    backs_off = found & (left <= 0)
    # min_scale and max_scale bound what a step does; a scale set manually outside them is kept.
    lower = torch.minimum(
        now, (now.double() * args.backoff_factor).float().clamp(min=args.min_scale)
    )
    higher = (now.double() * args.growth_factor).float().clamp(max=args.max_scale)
    higher = torch.where(torch.isfinite(higher), torch.maximum(now, higher), now)
    later = torch.where(backs_off, lower, torch.where(grows, higher, now))
    scale.copy_(later.reshape(scale.shape))
    growth_tracker.copy_(torch.where(grows, 0, clean).reshape(growth_tracker.shape))
    left = torch.where(grows, args.hysteresis, left.clamp(min=0))
    hysteresis_tracker.copy_(left.reshape(hysteresis_tracker.shape))
    skipped, applied, in_a_row = counters.unbind()
    in_a_row = torch.where(found, in_a_row + 1, 0)
    counters.copy_(torch.stack([skipped + found, applied + ~found, in_a_row]))


def _check_update_scale(args: Any) -> None:
    op = "update_scale_"
    checks.is_tensor(op, "scale", args.scale)
    fp32 = ("scale", "found_inf", "underflow")
    for name in (*fp32, "growth_tracker", "hysteresis_tracker"):
        if (t := getattr(args, name)) is not None:
            dtype = torch.float32 if name in fp32 else torch.int32
            checks.is_scalar(op, name, t, dtype, args.scale, "scale")
    checks.is_table(op, "counters", args.counters, torch.int64, (COUNTERS,), args.scale, "scale")
    for name, is_valid, meaning in (
        ("growth_factor", lambda x: 1 <= x < math.inf, "finite, 1 or more"),
        ("backoff_factor", lambda x: 0 < x <= 1, "in (0, 1]"),
        ("growth_interval", lambda x: x >= 1, "1 or more"),
        ("min_scale", lambda x: 0 <= x < math.inf, "finite, 0 or more"),
        ("max_scale", lambda x: x > 0, "positive"),
        ("hysteresis", lambda x: x >= 1, "1 or more"),
        ("grow_on_underflow", lambda x: 0 <= x <= 1, "in [0, 1]"),
    ):
        if not is_valid(number := getattr(args, name)):
            raise ValueError(f"{op}: {name} must be {meaning}, got {number}")


update_scale_op = Op(
    "update_scale_",
    "(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) hysteresis_tracker, "
    "Tensor(d!) counters, Tensor found_inf, Tensor? underflow, float growth_factor, "
    "float backoff_factor, int growth_interval, float min_scale, float max_scale, int hysteresis, "
    "float grow_on_underflow) -> ()",
    reference=update_scale_reference_,
    check=_check_update_scale,
    triton="scale",
)


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    counters: torch.Tensor,
    found_inf: torch.Tensor,
    underflow: torch.Tensor | None = None,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-24,
    max_scale: float | None = None,
    hysteresis: int = 1,
    grow_on_underflow: float = 1.0,
) -> None:
    """Advance the dynamic loss scale by one step, on the device.

    found_inf != 0: growth_tracker = 0, hysteresis_tracker -= 1 (not below 0); once that is 0,
    scale = max(scale * backoff_factor, min_scale). found_inf == 0: growth_tracker += 1; when it
    reaches growth_interval, scale = min(scale * growth_factor, max_scale) unless that is
    infinite, growth_tracker = 0, hysteresis_tracker = hysteresis. Where underflow >
    grow_on_underflow, growth_interval / 20 updates suffice.

    scale, found_inf, underflow: fp32, one element; the trackers: int32, one element. counters:
    int64 [3]: the numbers of updates with an overflow, without one, and of the latest consecutive
    updates with one. Sources: dynamic loss scaling of Mixed Precision Training (Micikevicius et
    al., 2018); hysteresis as in Megatron-LM.
    """
    update_scale_op(
        scale,
        growth_tracker,
        hysteresis_tracker,
        counters,
        found_inf,
        underflow,
        growth_factor,
        backoff_factor,
        growth_interval,
        min_scale,
        math.inf if max_scale is None else max_scale,
        hysteresis,
        grow_on_underflow,
    )
