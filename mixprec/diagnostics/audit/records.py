"""What an audit reports of ops: their precisions, and what they lose, as sums over calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ...formats import E4M3, E5M2
from ...functional._products import ROLES
from ...optim._state import short
from ...recipes import Recipe
from .. import measure
from ..writers import SHORT

FORWARD, BACKWARD, AGAIN, STEP = "forward", "backward", "recomputation", "optimizer"
PRODUCTS = ("product", "convolution", "attention", "rnn")
_FP8_NAMES = {"e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
_BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "mxfp8": 8, "mxfp6": 6}
# Errors of this multiple of what rounding explains are none of rounding: clean ops reach 1.5.
SUSPECT = 2.0
RESULT = "result"  # of an op that is none of a layer's products
# Of a layer's products, by name, the roles of a and b in a @ b.
ROLES_OF = {"y": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}
WORDS = {"x": "input", "w": "weight", "g": "gradient"}
# The SQNR in dB that an FP8 product should reach: the thresholds of torchao's tests.
BARS = {"y": 18.0, "grad_weight": 17.0}


def unexplained(what: str, beyond: float, why: str = "rounding") -> str:
    """A sentence about an error of this multiple of what is explained; empty if it is."""
    if beyond <= SUSPECT:
        return ""
    if math.isinf(beyond):
        return f"{what} has Inf or NaN where FP32 has none"
    return f"{what} is off by {beyond:.3g} times what {why} explains"


def product_of(roles: Iterable[str]) -> str | None:
    """The product of a layer with operands of these roles: "y", "grad_input" or "grad_weight"."""
    return next((name for name, of in ROLES_OF.items() if {*roles} == {*of}), None)


@dataclass
class Operand:
    """Elements of an operand: their number, the zeros, those that became 0, that became Inf or
    saturated, and of these that became Inf or NaN in the cast, the two halves of the SQNR of the
    cast, and the noise that the format explains."""

    elements: int = 0
    zeros: int = 0
    underflow: int = 0
    overflow: int = 0
    infinite: int = 0
    signal: float = 0.0
    noise: float = 0.0
    unsaturated: float = 0.0  # of the noise, that of elements which were not cut off
    expected: float = 0.0

    @property
    def beyond(self) -> float:
        """The root mean square error of the cast as a multiple of what its format explains."""
        if self.infinite:
            return math.inf
        return _ratio(self.unsaturated, self.expected)

    @property
    def sqnr(self) -> float | None:
        """Of the cast, in dB."""
        return measure.sqnr(self.signal, self.noise)

    def add(
        self,
        used: torch.Tensor,
        given: torch.Tensor,
        signal: float,
        expected: float | None,
        codes: torch.Tensor | None,
    ) -> None:
        """used: the values in the op's format; given: before the cast, or without one those of the
        step in FP32; signal: the sum of squares of a cast's, and expected: its noise, None without
        one; codes: FP8's."""
        kept, there = int(torch.count_nonzero(used)), int(torch.count_nonzero(given))
        self.elements += used.numel()
        self.zeros += used.numel() - kept
        self.underflow += max(there - kept, 0)
        noise = power(given - used)
        cut = _cut_off(used, given, codes, math.isfinite(noise))
        self.overflow += len(cut)
        if not math.isfinite(noise):
            self.infinite += int((~torch.isfinite(used) & torch.isfinite(given)).sum())
        if expected is None:
            return
        self.signal += signal
        self.noise += noise
        if len(cut) or not noise < math.inf:  # the cast has nothing to do with what was not finite
            off = (given - used).reshape(-1).index_fill(0, cut, 0.0)
            noise = power(off.nan_to_num_(0.0, 0.0, 0.0))
        if math.isfinite(expected):  # else what was cast had Inf or NaN
            self.unsaturated += noise
            self.expected += expected


_FP8_FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}


def _cut_off(
    used: torch.Tensor, given: torch.Tensor, codes: torch.Tensor | None, is_finite: bool
) -> torch.Tensor:
    """The places of finite elements that have become Inf or NaN, or the largest of FP8, from
    further away than rounding to nearest takes them."""
    places = [torch.empty(0, dtype=torch.long, device=used.device)]
    if not is_finite:
        cut = ~torch.isfinite(used) & torch.isfinite(given)
        places.append(cut.reshape(-1).nonzero()[:, 0])
    if codes is not None:
        fmt = _FP8_FORMATS[codes.dtype]
        largest = int(torch.tensor(fmt.max, dtype=codes.dtype).view(torch.uint8))
        at = ((codes.view(torch.uint8) & 0x7F) == largest).reshape(-1).nonzero()[:, 0]
        was = given.reshape(-1)[at]
        furthest = measure.largest_kept(fmt) / fmt.max * (1 + 2.0**-20)
        further = was.abs() > used.reshape(-1)[at].abs() * furthest
        places.append(at[further & torch.isfinite(was)])
    return torch.cat(places)


def power(x: torch.Tensor) -> float:
    """The sum of squares."""
    norm = float(torch.linalg.vector_norm(x))
    if 1e-12 < norm < 1e12:
        return norm**2
    largest = float(x.abs().amax()) if x.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest**2
    # Squares that would leave the range of FP32.
    return (float(torch.linalg.vector_norm(x.double() / largest)) * largest) ** 2


@dataclass
class Lost:
    """Of the calls of an op. own: against the op in FP32 on the operands that it had, as they were
    before they were cast for it; total: against the whole step in FP32; each the two halves of an
    SQNR. noise: against the op in FP32 on the operands as they were cast; expected: of noise, what
    rounding explains. operands: by role, "x", "w" or "g"; what_if: by recipe, as own, had the op's
    operands been cast by it."""

    own_signal: float = 0.0
    own_noise: float = 0.0
    total_signal: float = 0.0
    total_noise: float = 0.0
    noise: float = 0.0
    expected: float = 0.0
    operands: dict[str, Operand] = field(default_factory=dict)
    what_if: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def own(self) -> float | None:
        """SQNR in dB."""
        return measure.sqnr(self.own_signal, self.own_noise)

    @property
    def total(self) -> float | None:
        """SQNR in dB, of the op's own errors and those that its operands brought."""
        return measure.sqnr(self.total_signal, self.total_noise)

    @property
    def beyond(self) -> float:
        """The root mean square error of what the op computes of its operands, as a multiple of
        what rounding explains."""
        return _ratio(self.noise, self.expected)

    def sqnr_if(self, recipe: str) -> float | None:
        """Of the product in dB, with the operands that the recipe makes."""
        return measure.sqnr(*self.what_if[recipe]) if recipe in self.what_if else None

    def add(self, other: Lost) -> None:
        for recipe, halves in other.what_if.items():
            signal, noise = self.what_if.get(recipe, (0.0, 0.0))
            self.what_if[recipe] = signal + halves[0], noise + halves[1]
        for role, operand in other.operands.items():
            _add_numbers(self.operands.setdefault(role, Operand()), operand)
        _add_numbers(self, other)


def _add_numbers(total: Operand | Lost, other: Operand | Lost) -> None:
    for name, n in vars(other).items():
        if not isinstance(n, dict):
            setattr(total, name, getattr(total, name) + n)


def _ratio(noise: float, expected: float) -> float:
    if math.isnan(noise) or math.isnan(expected):
        return math.inf
    if noise <= 0 or expected <= 0:
        return math.inf if noise > 0 else 0.0
    return math.sqrt(noise / expected)


def operand_formats(recipe: Recipe, kind: str) -> tuple[str, ...]:
    """The names of the formats of a and b in one of a recipe's products."""
    formats = zip(ROLES[kind], getattr(recipe, kind), strict=True)
    one = recipe.product(kind)
    return tuple(one.block_format(role) or format.name for role, format in formats)


@dataclass(unsafe_hash=True)
class Op:
    """Calls of an op that are the same in all of this.

    module: its path in the model, "" for the model, None for the code outside, then with `line`,
    the file and line that called it; kind: "product", "convolution", "attention", "rnn" or
    "reduction"; phase: "forward", "backward", "recomputation" (what a checkpoint computes again)
    or "optimizer"; op: torch's name; shapes and formats: of the operands; accumulation: in what is
    summed; result: its dtype; calls, flops, and bytes of operands and results: of all calls.

    decided: what set the operands' formats: "recipe fp8", "override bf16" (of convert),
    "mixprec.autocast fp8", "torch.autocast", "cast" (x.to(dtype) in the program), "torch" (inside
    of one of its functions), "mixprec" (inside of one of its functions that has no recipe),
    "tensor dtype" (of parameters and inputs) or "unknown". weight: of a product of torch, the name
    of the parameter that is an operand, as it is, cast or transposed; "" for none.

    lost: with sqnr=True, if the op or its operands are rounded, by what it computes: "y",
    "grad_input" and "grad_weight" of a layer, or "result"; see `Lost`.
    """

    module: str | None
    module_class: str
    line: str
    kind: str
    phase: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    formats: tuple[str, ...]
    accumulation: str
    result: str
    decided: str
    weight: str = ""
    calls: int = field(default=0, compare=False)
    flops: int = field(default=0, compare=False)
    bytes: int = field(default=0, compare=False)
    lost: dict[str, Lost] = field(default_factory=dict, compare=False)

    def add(self, flops: int, size: int, lost: Mapping[str, Lost]) -> None:
        """A call."""
        self.calls += 1
        self.flops += flops
        self.bytes += size
        for name, one in lost.items():
            self.lost.setdefault(name, Lost()).add(one)

    @property
    def precision(self) -> str:
        """The formats as one word, or as in "bf16 x fp32" where they differ."""
        return " x ".join(dict.fromkeys(map(_word, self.formats)))

    @property
    def where(self) -> str:
        """The module, or the line."""
        if self.module is None:
            return self.line or "unknown"
        return self.module or self.module_class


def _word(name: str) -> str:
    """Of a format: "mxfp8" of "mxfp8_e4m3"."""
    return "fp8" if name in _FP8_NAMES else SHORT.get(name, name.partition("_")[0])


def product_name(op: Op, name: str) -> str:
    """What `name` of op.lost is."""
    return f"{op.kind}, {op.phase}" if name == RESULT else name


def flops_by(key: Callable[[Op], str], ops: Iterable[Op]) -> dict[str, int]:
    """FLOPs of a step by a key, the largest first."""
    flops: Counter[str] = Counter()
    for op in ops:
        if op.flops and op.phase != STEP:
            flops[key(op)] += op.flops
    return dict(flops.most_common())


def accumulation(kind: str, dtype: torch.dtype, device: str, library: str) -> str:
    """In what products of such operands are summed. library: "aten" or "mixprec"."""
    if not dtype.is_floating_point:
        return "int32"
    cuda = torch.backends.cuda.matmul
    if device == "cuda" and library == "aten" and kind in ("product", "convolution"):
        tf32 = cuda.allow_tf32 if kind == "product" else torch.backends.cudnn.allow_tf32
        if dtype == torch.float32 and tf32:
            return "float32, of tf32"
        reduced = {
            torch.float16: cuda.allow_fp16_reduced_precision_reduction,
            torch.bfloat16: cuda.allow_bf16_reduced_precision_reduction,
        }
        if kind == "product" and reduced.get(dtype):
            return f"float32, where K is split {short(dtype)}"
    return short(dtype if dtype.itemsize > 4 else torch.float32)


def bits(precision: str) -> int:
    """The most bits of an operand."""
    return max(_BITS.get(part, 4) for part in precision.split(" x "))
