"""The forms in which tensors are kept, so that the gradients that come of them have the right mean.

Codes are unbiased, and so is what is linear in them. Where a derivative is not, its form
keeps the sign, or the part of the values in which the derivative changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..ops import saved_values as values
from .packed import Form, Make, Pieces


@dataclass(frozen=True)
class Linear(Form):
    """Codes."""

    bits: int

    @property
    def served_by(self) -> tuple[Form, ...]:
        return Wide(4), *(Linear(bits) for bits in (8, 4) if bits >= self.bits)

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        return (make(t, self.bits),)

    def decode(self, t: torch.Tensor) -> torch.Tensor:
        return t


@dataclass(frozen=True)
class Limited(Form):
    """Codes of values limited to where a derivative changes: their range is the smaller one.
    below: what stands for all values up to `low`."""

    bits: int
    low: float | None
    high: float | None = None
    below: float | None = None

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        return (make(values.limited(t, self.low, self.high), self.bits),)

    def decode(self, t: torch.Tensor) -> torch.Tensor:
        return values.with_below(t, self.low, self.below)


@dataclass(frozen=True)
class Gate(Form):
    """`Limited`, and codes of what is above: for a gradient that also has act(t), which is t there
    and 0 below."""

    bits: int
    low: float
    high: float
    below: float

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        limited = make(values.limited(t, self.low, self.high), self.bits)
        return limited, make(values.above(t, self.high), 4)  # exactly 0 where t is below

    def decode(self, limited: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        return values.plus(values.with_below(limited, self.low, self.below), above)


@dataclass(frozen=True)
class Mask(Form):
    """A bit an element, whether low < t < high, and in the place of t one of two numbers.
    nan_inside: what backward takes NaN for."""

    low: float
    high: float | None
    nan_inside: bool
    inside: float
    outside: float

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        mask = values.between(t, self.low, self.high, self.nan_inside)
        return values.pack_mask(mask), t.new_empty((t.numel(), 0))

    def decode(self, bits: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        mask = values.unpack_mask(bits, like.shape[0])
        return torch.where(mask, like.new_tensor(self.inside), like.new_tensor(self.outside))


@dataclass(frozen=True)
class Negative(Form):
    """The sign of each element, and codes of those below 0, down to `-limit`."""

    bits: int
    limit: float | None

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        return values.pack_mask(t > 0), make(values.negative(t, self.limit), self.bits)

    def decode(self, bits: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        return values.with_signs(values.unpack_mask(bits, below.numel()), below)


@dataclass(frozen=True)
class Rows(Form):
    """Codes of (t - mean) / std, by the statistics of what a norm normalizes: backward multiplies
    the values with each other, and other rows would bring larger errors than the row has values.

    what: of the dimensions, "last" n; of [N, C, ...], n "groups" or the "channels"."""

    flat: ClassVar[bool] = False
    bits: int
    what: str
    n: int = 0

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        x, first = t, 1
        if self.what == "last":
            first = t.dim() - self.n
        elif self.what == "groups":
            x, first = x.unflatten(1, (self.n, -1)), 2
        else:
            x = x.transpose(0, 1)
        rows, mean, std = values.normalized(x, list(range(first, x.dim())))
        return make(rows, self.bits), mean, std, t.new_empty(0)

    def decode(
        self, rows: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, like: torch.Tensor
    ) -> torch.Tensor:
        x = values.not_normalized(rows, mean, std, like.dtype)
        if self.what == "last":
            return x
        return x.flatten(1, 2) if self.what == "groups" else x.transpose(0, 1)


@dataclass(frozen=True)
class GLU(Form):
    """a in codes, and b limited, for a * sigmoid(b), where t is (a, b) along `dim`."""

    flat: ClassVar[bool] = False
    bits: int
    dim: int

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        a, b = t.chunk(2, self.dim)
        return make(a, self.bits), make(values.limited(b, -16.0, 16.0), self.bits)

    def decode(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a, b], self.dim)


@dataclass(frozen=True)
class Wide(Form):
    """Codes of 8 bits, and codes of what they lack, in `rest` bits."""

    rest: int = 8
    STEPS: ClassVar[int] = 255 * 127  # in a range: what the first lack is up to two of their steps

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        codes = make(t, 8)
        return codes, make(t - codes.unpack(), self.rest)

    def decode(self, t: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return values.plus(t, rest)


@dataclass(frozen=True)
class Exact(Form):
    """A copy of a view, whose storage is larger and ends before backward."""

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        return (t.clone(),)

    def decode(self, t: torch.Tensor) -> torch.Tensor:
        return t


@dataclass(frozen=True)
class Dropped(Form):
    """Nothing: backward gets a tensor without elements, which stands for zeros."""

    flat: ClassVar[bool] = False

    def encode(self, t: torch.Tensor, make: Make) -> Pieces:
        return (t.new_empty(0),)

    def decode(self, nothing: torch.Tensor) -> torch.Tensor:
        return nothing
