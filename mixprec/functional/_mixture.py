"""mixture: tokens sorted by expert, so that each expert's are the rows of one product."""

from __future__ import annotations

from collections.abc import Callable

import torch

# What all experts compute of x [S, H], with the ends int32 [E] of the rows of each, and the expert
# int64 [S] of each row.
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mixture(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int, experts: Experts
) -> torch.Tensor:
    """Return y [T, H] = sum over j of weights[:, j] * expert index[:, j] of x.

    x: [T, H]; index, weights: [T, k], of `count` experts. An index of `count` or more is that of
    another rank's expert, whose part is 0 here. Sums are in the dtype of the weighted parts; y has
    x's.
    """
    k = index.shape[-1]
    chosen, order = torch.sort(index.reshape(-1), stable=True)
    ends = torch.searchsorted(chosen, torch.arange(count, device=x.device), right=True)
    inside = (chosen < count).unsqueeze(-1)
    y = experts(x[order // k], ends.to(torch.int32), chosen.clamp(max=count - 1))
    y = torch.where(inside, y * weights.reshape(-1)[order, None], 0.0)
    y = torch.empty_like(y).index_copy(0, order, y)
    return y.view(-1, k, y.shape[-1]).sum(1).to(x.dtype)
