"""Op: a line of an audit, calls of an op that are the same in all that it says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ...functional._products import ROLES
from ...optim._state8 import short
from ...recipes import Recipe
from .lost import Lost

FORWARD, BACKWARD, AGAIN, STEP = "forward", "backward", "recomputation", "optimizer"
PRODUCTS = ("product", "convolution", "attention", "rnn")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_FP8 = {"e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
_BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "mxfp8": 8, "mxfp6": 6}


def operand_formats(recipe: Recipe, kind: str) -> tuple[str, ...]:
    """The names of the formats of a and b in one of a recipe's products."""
    formats = zip(ROLES[kind], getattr(recipe, kind), strict=True)
    one = recipe.product(kind)
    return tuple(one.block_format(role) or format.name for role, format in formats)


@dataclass(frozen=True)
class Op:
    """Calls of an op that are the same in all of this.

    module: its path in the model, "" for the model, None for the code outside, then with `line`,
    the file and line that called it; kind: "product", "convolution", "attention", "rnn" or
    "reduction"; phase: "forward", "backward", "recomputation" (what a checkpoint computes again)
    or "optimizer"; op: torch's name; shapes and formats: of the operands; accumulation: in what is
    summed; result: its dtype; calls, flops, and bytes of operands and results: of all calls.

    decided: who chose the operands' formats: "recipe fp8", "override bf16" (of convert),
    "mixprec.autocast fp8", "torch.autocast", "cast" (x.to(dtype) in the program), "torch" (inside
    of one of its functions), "mixprec" (inside of one of its functions that has no recipe),
    "as made" (of parameters and inputs) or "unknown". weight: of a product of torch, the name of
    the parameter that is an operand, as it is, cast or transposed; "" for none.

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
    calls: int = 0
    flops: int = 0
    bytes: int = 0
    lost: dict[str, Lost] = field(default_factory=dict, compare=False)

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
    return "fp8" if name in _FP8 else SHORT.get(name, name.partition("_")[0])


@dataclass
class Total:
    """Of the calls of an Op: their number, FLOPs, bytes of operands and results, and losses."""

    calls: int = 0
    flops: int = 0
    bytes: int = 0
    lost: dict[str, Lost] = field(default_factory=dict)

    def add(self, flops: int, size: int, lost: Mapping[str, Lost]) -> None:
        self.calls += 1
        self.flops += flops
        self.bytes += size
        for name, one in lost.items():
            self.lost.setdefault(name, Lost()).add(one)


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


def joined(words: Iterable[str], most: int | None = None) -> str:
    """Each once, the first `most` of them."""
    found = [*dict.fromkeys(words)]
    rest = "" if most is None or len(found) <= most else f" and {len(found) - most} more"
    return ", ".join(found[:most]) + rest or "-"


def readable(n: int) -> str:
    """12,300,000 as "12.3 M", with three digits; nothing for 0."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= 0.9995 * size:
            return f"{n / size:.3g} {unit}"
    return f"{n} " if n else ""
