"""update_delayed_scales_: update the amax histories and scales of many tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._dispatch import checks
from ._dispatch.op import Op
from .scale import scale_from_amax

UNUSED = -1.0  # marks an amax as unused: nothing was cast since the last update


def update_delayed_scales_reference_(args: Any) -> None:
    amax_histories, scales, amaxes, fmt_max, margin, power_of_two, most_recent = args
    history, scale, amax = (torch.stack(t) for t in (amax_histories, scales, amaxes))
    recorded = torch.isfinite(amax) & (amax >= 0)
    rolled = torch.cat([amax[:, None], history[:, :-1]], 1)
    history = torch.where(recorded[:, None], rolled, history)
    largest = amax if most_recent else history.amax(1)
    new = torch.empty_like(scale)
    for limit in set(fmt_max):
        of_this_format = torch.tensor([f == limit for f in fmt_max], device=amax.device)
        scales_of_it = scale_from_amax(largest, limit, margin, power_of_two, scale)
        new = torch.where(of_this_format, scales_of_it, new)
    torch._foreach_copy_(amax_histories, list(history))
    torch._foreach_copy_(scales, list(torch.where(recorded, new, scale)))
    torch._foreach_copy_(amaxes, [torch.full_like(scale[0], UNUSED)] * len(amaxes))


def _check(args: Any) -> None:
    op = "update_delayed_scales_"
    amax_histories, scales, amaxes, fmt_max, margin, _, _ = args
    lists = {"amax_histories": amax_histories, "scales": scales, "amaxes": amaxes}
    for name, tensors in lists.items():
        checks.is_list(op, name, tensors)
    for name, items in {**lists, "fmt_max": fmt_max}.items():
        if len(items) != len(scales):
            raise ValueError(
                f"{op}: {name} must be as many as scales, {len(scales)}, got {len(items)}"
            )
    for limit in fmt_max:
        if not 0 < limit < math.inf:
            raise ValueError(f"{op}: fmt_max must be positive and finite, got {list(fmt_max)}")
    if not isinstance(margin, int) or not -64 <= margin <= 64:
        raise ValueError(f"{op}: margin must be an int between -64 and 64, got {margin!r}")
    if not scales:
        return
    first = amax_histories[0]
    if first.dim() != 1 or first.shape[0] < 1:
        raise ValueError(
            f"{op}: amax_histories[0] must be [L] with L of 1 or more, got {tuple(first.shape)}"
        )
    for name, tensors in lists.items():
        shape, meaning = (first.shape, "[L]") if name == "amax_histories" else ((), "[]")
        for i, t in enumerate(tensors):
            label, owner = f"{name}[{i}]", "scales[0]"
            checks.matches(op, label, t, (torch.float32,), scales[0], shape, meaning, owner)
            checks.is_writable(op, f"{name}[{i}]", t)
    checks.check_disjoint(op, "amax_histories", amax_histories)


delayed_scales_op = Op(
    "update_delayed_scales_",
    "(Tensor(a!)[] amax_histories, Tensor(b!)[] scales, Tensor(c!)[] amaxes, float[] fmt_max, "
    "int margin, bool power_of_two, bool most_recent) -> ()",
    reference=update_delayed_scales_reference_,
    check=_check,
)


def update_delayed_scales_(
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor],
    fmt_max: Sequence[float],
    *,
    margin: int = 0,
    power_of_two: bool = True,
    most_recent: bool = False,
) -> None:
    """End a step of delayed scaling, for n tensors that were cast, in place.

        history = [amax, history[0], ..., history[L - 2]]
        scale   = fmt_max / max(history) * 2^-margin      most_recent: fmt_max / amax * 2^-margin
        amax    = -1                                      (unused)

    amax_histories: n of fp32 [L], one L, newest first; scales, amaxes: n of fp32 []; fmt_max: n
    numbers, the largest value of the format of each. A tensor whose amax is -1 was not used and is
    not rolled; one whose amax is Inf or NaN keeps its history and scale. Where the largest amax is
    0 the scale keeps its value. power_of_two rounds it down to a power of two; its range is
    [2^-126, 2^126], and 0 means "not initialized" until the first amax above 0. ValueError or
    TypeError names an invalid argument.

    Source: delayed scaling of FP8 Formats for Deep Learning (Micikevicius et al., 2022) and of
    NVIDIA Transformer Engine, whose window of L also includes the current amax.
    """
    op = "update_delayed_scales_"
    checks.is_list(op, "scales", scales)
    limits = [float(limit) for limit in fmt_max]
    arguments = (amax_histories, scales, amaxes, limits, margin, power_of_two, most_recent)
    if not scales:  # the dispatcher selects a kernel by the device of the tensors
        delayed_scales_op.check(*arguments)
        return
    delayed_scales_op(*arguments)
