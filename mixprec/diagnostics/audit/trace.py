"""What a step in FP32 has at each op, in a few numbers, so that two steps can be compared.

A sketch of n elements is R [4, n / 127] @ x [n / 127, 127], R of random signs: the squared distance
of two sketches, over 4, estimates that of the tensors (Alon, Matias and Szegedy, 1996).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

_DRAWS, _COLUMNS, _ROWS = 4, 127, 4096  # a prime: no column of a matrix is a column of this one


@dataclass
class Point:
    """Of an op in a step: module, phase and op, the how many of those that are the same in these.

    inputs: sketches of its operands in a step in FP32, by role; result: that of the result; wrong:
    what rounding does not explain of the op itself, in a sentence; beyond: by which factor; own:
    the op's own error, as a part of its result; made: the spacing at 1 of the formats that weights
    and inputs have so far, 0 for FP32; after: an op before it that was not computed again.
    """

    module: str
    phase: str
    op: str
    turn: int
    size: int
    inputs: dict[str, list[float]] = field(default_factory=dict)
    result: list[float] = field(default_factory=list)
    wrong: str = ""
    beyond: float = 0.0
    own: float = 0.0
    made: float = 0.0
    after: str = ""

    @classmethod
    def of_json(cls, row: dict[str, Any]) -> Point:
        """As `Audit.save` has written it, null for what is not finite."""
        values: dict[str, Any] = {n: math.inf if v is None else v for n, v in row.items()}
        point = cls(**values)
        for numbers in (*point.inputs.values(), point.result):
            numbers[:] = [math.inf if n is None else n for n in numbers]
        return point

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        module = self.module.replace("_orig_mod.", "")  # what torch.compile puts before it
        return module, self.phase, self.op, self.turn, self.size


@functools.cache
def _signs(block: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(block)
    return torch.randint(0, 2, (_DRAWS, _ROWS), generator=generator).float() * 2 - 1


def sketch(x: torch.Tensor) -> list[float]:
    """Of the values in the order of the elements."""
    flat = x.detach().reshape(-1)
    flat = flat.float() if flat.dtype != torch.float32 else flat
    whole = flat.numel() // _COLUMNS
    total = flat.new_zeros((_DRAWS, _COLUMNS))
    rows = flat[: whole * _COLUMNS].view(-1, _COLUMNS)
    for i, part in enumerate(rows.split(_ROWS)):
        total += _signs(i)[:, : part.shape[0]].to(part.device) @ part
    rest = flat[whole * _COLUMNS :]
    last = _signs(whole // _ROWS)[:, whole % _ROWS : whole % _ROWS + 1].to(flat.device)
    total[:, : rest.numel()] += last * rest
    found: list[float] = total.flatten().tolist()
    return found


def distance(a: list[float], b: list[float]) -> float:
    """Of two sketches, as a part of the larger one's norm; 0 where both are 0 or one is empty, inf
    if one is not finite."""
    if not a or not b:
        return 0.0
    x, y = (torch.tensor(s, dtype=torch.float64) for s in (a, b))
    size = torch.maximum(x.norm(), y.norm())
    if not bool(torch.isfinite(size)):
        return 0.0 if bool(torch.equal(torch.isfinite(x), torch.isfinite(y))) else float("inf")
    return float((x - y).norm() / size) if size > 0 else 0.0


class Trace:
    """The points of a step, in the order in which their ops ran."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._turns: Counter[tuple[str, str, str]] = Counter()

    def point(self, module: str, phase: str, op: str, size: int) -> Point:
        """The next one."""
        turn = self._turns[module, phase, op]
        self._turns[module, phase, op] += 1
        self.points.append(Point(module, phase, op, turn, size))
        return self.points[-1]
