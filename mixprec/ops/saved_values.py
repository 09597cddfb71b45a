"""What is packed of a tensor saved for backward, and what is made of it again, in torch's ops."""

from __future__ import annotations

import torch


def limited(t: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """clamp, by which an Inf becomes NaN."""
    return t.clamp(low, high).add_(t, alpha=0)


def with_below(t: torch.Tensor, low: float | None, below: float | None) -> torch.Tensor:
    """t, with `below` where it is `low` or less. Changes t."""
    return t if low is None or below is None else torch.threshold_(t, low, below)


def score_error(q: torch.Tensor, k: torch.Tensor, scale: float | None, steps: int) -> float:
    """A bound of the standard deviation of scale * q k^T, where the elements of q and k are rounded
    at random to `steps` in the range of a group. NaN if they are not finite."""
    d = q.shape[-1]
    largest = [float(torch.stack(t.detach().aminmax()).abs().amax()) for t in (q, k)]
    scale = d**-0.5 if scale is None else abs(scale)
    # Each rounding has at most half a step, 2 * largest / steps, and the other factor beside it.
    return float(scale * (2 * d) ** 0.5 * largest[0] * largest[1] / steps)


def above(t: torch.Tensor, low: float) -> torch.Tensor:
    """max(t - low, 0)."""
    return (t - low).relu_()


def negative(t: torch.Tensor, limit: float | None) -> torch.Tensor:
    """-t where t is below 0, at most `limit`, and 0 elsewhere, which `pack` keeps exactly."""
    return limited(-t, 0.0, limit)


def with_signs(positive: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """1 where `positive`, elsewhere -t. Changes t."""
    return t.neg_().masked_fill_(positive, 1.0)


def plus(t: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """t + rest. Changes t."""
    return t.add_(rest)


def between(t: torch.Tensor, low: float, high: float | None, nan: bool) -> torch.Tensor:
    """Whether low < t < high; nan: what that is of NaN."""
    if t.dtype != torch.float32 and t.new_tensor(low).item() != low:
        t = t.float()  # torch compares in FP32
    if nan:
        inside = (t <= low).logical_not_()
        return inside if high is None else inside.logical_and_((t >= high).logical_not_())
    return t > low if high is None else (t > low).logical_and_(t < high)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """bool [n] as bytes [ceil(n / 8)], the first in the lowest bit."""
    more = -mask.numel() % 8
    eight = torch.cat([mask, mask.new_zeros(more)]) if more else mask
    # The product moves the lowest bit of byte i to bit 56 + i.
    words = eight.view(torch.uint8).view(torch.int64)
    return (words * 0x0102040810204080 >> 56).to(torch.uint8)


def unpack_mask(packed: torch.Tensor, n: int) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 1).view(-1)[:n].view(torch.bool)


def normalized(t: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(t - mean) / std, mean and std in fp32; those of equal values are 0."""
    x = t.float()
    mean = x.mean(dims, keepdim=True)
    rest = x - mean
    n = x.numel() // max(mean.numel(), 1)
    norm = torch.linalg.vector_norm(rest, dim=dims, keepdim=True, dtype=torch.float64)
    std = norm.mul_(n**-0.5).float()
    return rest.div_(std.masked_fill(std == 0, 1.0)), mean, std


def not_normalized(
    t: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """t * std + mean. Changes t. A number does not become Inf."""
    largest = torch.finfo(dtype).max
    return t.mul_(std).add_(mean).clamp_(-largest, largest).to(dtype)
