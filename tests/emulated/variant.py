"""One variant of gemm and gemm_accumulate_ on its own, for values/test_gemm_values.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from emulated.agreement import Budget, assert_bits, assert_nothing_beside, moved, tensors

import mixprec

# Products of parameters, of which an emulation takes every fifth.
THINNED = ("test_all_layouts", "test_scales_and_bias", "test_random_and_one_signed_data",
           "test_small_integers")  # fmt: skip


def thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = ([i for i in items if getattr(i, "originalname", "") == name] for name in THINNED)
    dropped = {item for test in tests for n, item in enumerate(test) if (n + n // 5) % 5}
    config.hook.pytest_deselected(items=[*dropped])
    items[:] = [item for item in items if item not in dropped]


@dataclass
class Variant(Budget):
    """Runs calls by one backend; None where it refuses a call."""

    backend: str
    device: torch.device
    most: int = 1 << 40
    quick: bool = True
    ran: int = 0
    refusals: set[str] = field(default_factory=set)

    def __call__(self, op: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The result of op, or its first argument where it returns nothing."""
        try:
            with mixprec.use_backend(self.backend):
                result = op(*args, **options)
        except RuntimeError as error:
            if "no backend can run" not in str(error):
                raise
            self.refusals.add(str(error))
            return None
        self.ran += 1
        return args[0] if result is None else result

    def gemm(self, *args: Any, **options: Any) -> torch.Tensor | None:
        """Of CPU tensors, on the CPU. Nothing else is written."""
        return self._on_device(mixprec.gemm, [], args, options)

    def accumulate(self, acc: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor | None:
        """A new tensor, and acc stays as it is."""
        return self._on_device(mixprec.gemm_accumulate_, [acc], args, options)

    def _on_device(self, op: Any, written: list[Any], args: Any, options: Any) -> Any:
        there, read = moved(written, self.device), moved(list(args), self.device)
        options = dict(zip(options, moved(list(options.values()), self.device), strict=True))
        result = self(op, *there, *read, **options)
        result = None if result is None else result.clone().cpu()
        assert_bits(tensors(read), tensors(list(args)), "an operand has changed, ")
        for x in tensors([there, read]):
            assert_nothing_beside(x, op.__name__)
        return result

    def finish(self) -> None:
        for reason in sorted(self.refusals):
            print(f"left out: {reason}")
        if not self.ran:
            pytest.skip("; ".join(sorted(self.refusals)))
