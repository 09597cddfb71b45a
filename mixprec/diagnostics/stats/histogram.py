"""How the magnitudes of a tensor are distributed, for the page that shows formats."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

_SHIFT = 20  # of the 23 bits of an FP32 mantissa 3 are kept
_INF = 0x7F800000
_PART = 1 << 22  # elements at a time, which take 30 bytes each


@dataclass(frozen=True)
class Histogram:
    """Counts of |x| by eighths of a power of two.

    counts: 2 k stands for the number low(k) itself, 2 k + 1 for what lies between low(k) and
    low(k + 1), where low(k) is (1 + (k % 8) / 8) 2^(k // 8 - 127), and k 2^-129 below 8: k is the
    upper 11 of the 31 bits of |x| in FP32. Only finite numbers other than 0 are in it; numel
    counts all, and zeros, inf and nan those that are not.
    """

    numel: int
    zeros: int
    inf: int
    nan: int
    counts: dict[int, int] = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file that the page docs/explorer.html reads."""
        found = {"format": "mixprec histogram", "version": 1, **asdict(self)}
        Path(path).write_text(json.dumps(found))


def histogram(tensor: torch.Tensor) -> Histogram:
    """Count the magnitudes of a tensor of floating-point numbers, of any shape, on any device.

        mixprec.stats.histogram(model.head.weight.grad).save("grad.json")

    Numbers are seen in FP32. Waits for the device. TypeError for integers, complex numbers, and
    tensors that are sparse or on the meta device.
    """
    dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    if not dense or not tensor.is_floating_point() or tensor.is_meta:
        got = getattr(tensor, "dtype", "") if dense else ""
        raise TypeError(
            "histogram: tensor must be a dense torch.Tensor of floating-point numbers, got "
            f"{type(tensor).__name__} {got}".rstrip()
        )
    special = torch.zeros(3, dtype=torch.long, device="cpu")
    counts = torch.zeros(2 * (_INF >> _SHIFT), dtype=torch.long, device="cpu")
    for part in tensor.detach().resolve_neg().reshape(-1).split(_PART):
        bits = part.float().view(torch.int32) & 0x7FFFFFFF
        kinds = [(bits == 0).sum(), (bits == _INF).sum(), (bits > _INF).sum()]
        special += torch.stack(kinds).cpu()
        finite = bits[(bits != 0) & (bits < _INF)]
        between = (finite & ((1 << _SHIFT) - 1)) != 0
        counts += torch.bincount(finite >> _SHIFT << 1 | between, minlength=len(counts)).cpu()
    keys = counts.nonzero().flatten()
    zeros, inf, nan = special.tolist()
    found = dict(zip(keys.tolist(), counts[keys].tolist(), strict=True))
    return Histogram(tensor.numel(), zeros, inf, nan, found)
