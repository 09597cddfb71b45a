"""Updates that 16-bit weights lose, because they are smaller than half of the last bit."""

from __future__ import annotations

import torch

from ...optim._state8 import short

_SAMPLE = 4096  # elements of each parameter
_TORCHS = {c for c in vars(torch.optim).values() if isinstance(c, type)} - {torch.optim.LBFGS}
_LOW = (torch.bfloat16, torch.float16)


class Updates:
    """Of the sampled elements with a gradient: how many there are, and how many no step changed.

    Only of torch's optimizers: others may keep masters of the weights, which change. LBFGS does
    nothing where it has converged, and a GradScaler makes fused kernels skip a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_known = type(optimizer) in _TORCHS
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._counts: list[torch.Tensor] = []
        self.dtype = ""

    def before(self) -> None:
        """A step begins."""
        self._before = []
        is_scaled = getattr(self._optimizer, "found_inf", None) is not None
        for group in self._optimizer.param_groups if self._is_known and not is_scaled else ():
            for p in group["params"] if float(group["lr"]) != 0 else ():
                if p.dtype in _LOW and p.grad is not None and not p.grad.is_sparse:
                    self.dtype = short(p.dtype)
                    self._before.append((p, _some(p).clone(), _some(p.grad) != 0))

    def after(self) -> None:
        """It has ended."""
        for p, old, has_gradient in self._before:
            lost = has_gradient & (_some(p) == old)
            counts = torch.stack([torch.count_nonzero(lost), torch.count_nonzero(has_gradient)])
            self._counts.append(counts.to("cpu", non_blocking=True))
        self._before = []

    def lost(self) -> float:
        """The share of the elements; 0 if there is none."""
        if not self._counts:
            return 0.0
        lost, all_of_them = torch.stack(self._counts).sum(0).tolist()
        return lost / all_of_them if all_of_them else 0.0


def _some(t: torch.Tensor) -> torch.Tensor:
    return t.detach().reshape(-1)[:_SAMPLE]
