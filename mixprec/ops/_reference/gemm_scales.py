"""The scales of a GEMM's operands: valid shapes, the scale of each element, the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .._dispatch import checks

CHUNK = 128  # of K, and of the rows of a square block


class Operands(NamedTuple):
    """a [M, K] and b [K, N] of a product, and the fp32 tensors that undo the scales of their casts,
    in one of the shapes that `gemm` describes."""

    a: torch.Tensor
    b: torch.Tensor
    a_scale_inv: torch.Tensor | None = None
    b_scale_inv: torch.Tensor | None = None


def chunks(size: int) -> int:
    return (size + CHUNK - 1) // CHUNK


def check_dtypes(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    both_fp8 = a.dtype in checks.FP8 and b.dtype in checks.FP8
    if not both_fp8 and (a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16)):
        raise ValueError(
            f"{op}: a and b must both be float16, both bfloat16, or FP8 in any mix of "
            f"float8_e4m3fn and float8_e5m2, got a {a.dtype} and b {b.dtype}"
        )


def check(
    op: str, name: str, t: torch.Tensor, rows: int, k: int, owner: torch.Tensor, *, is_b: bool
) -> None:
    """t is fp32 on owner's device and has one element, or the shape of a granularity.

    rows: M for the scales of a, N for those of b, whose shapes are the transposes of a's.
    """
    checks.has_dtype(op, name, t, (torch.float32,))
    checks.on_device(op, name, t, owner.device, "a")
    if t.numel() == 1:
        return
    if t.dim() == 2:
        r, c = reversed(t.shape) if is_b else t.shape
        if (r == rows or r == chunks(rows)) and (c == 1 or c == chunks(k)):
            return
    letters = "N" if is_b else "M"
    row, block, along = letters, f"ceil({letters}/128)", "ceil(K/128)"
    shapes = [(row, "1"), (row, along), (block, along)]
    sizes = [(rows, 1), (rows, chunks(k)), (chunks(rows), chunks(k))]
    fitting = [
        f"[{', '.join(s[::-1] if is_b else s)}] = {n[::-1] if is_b else n}"
        for s, n in zip(shapes, sizes, strict=True)
    ]
    raise ValueError(
        f"{op}: {name} must hold one element or have shape {fitting[0]}, {fitting[1]} or "
        f"{fitting[2]}, got shape {tuple(t.shape)}"
    )


def positive(
    op: str, name: str, scale_inv: float | torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """A public function's scale_inv as a tensor: a number, one element, or one per row or block.

    Checked to be positive and finite where this needs no host sync.
    """
    if not isinstance(scale_inv, torch.Tensor) or scale_inv.numel() == 1:
        return checks.positive_scale(op, name, scale_inv, device)
    checks.has_dtype(op, name, scale_inv, (torch.float32,))
    checks.on_device(op, name, scale_inv, device, "the input")
    checks.needs_no_grad(op, f"detach {name}", scale_inv)
    seen = device.type == "cpu" and not torch.compiler.is_compiling() and scale_inv.numel() > 0
    if seen and type(scale_inv) is torch.Tensor:
        low, high = (t.item() for t in scale_inv.aminmax())
        if not checks.MIN_SCALE <= low <= high <= checks.MAX_SCALE:
            raise ValueError(
                f"{op}: {name} must be positive and finite, got values from {low} to {high} "
                f"(allowed: 2^-126 to 2^126)"
            )
    return scale_inv


def _per_row(t: torch.Tensor | None, rows: int, *, is_b: bool) -> torch.Tensor | None:
    """[rows, chunks], [rows, 1] or [1, 1] for a; the transposes for b."""
    if t is None:
        return None
    if t.numel() == 1:
        return t.reshape(1, 1)
    dim = 1 if is_b else 0
    if t.shape[dim] != rows:
        t = t.repeat_interleave(CHUNK, dim).narrow(dim, 0, rows)
    return t


def in_fp64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, summed in FP64, which no torch setting affects, and rounded to FP32."""
    return (a.double() @ b.double()).float()


def product(
    operands: Operands,
    *,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = in_fp64,
    promoted: bool = False,
) -> torch.Tensor:
    """The sum over K of a * a_scale_inv * b * b_scale_inv, FP32 [M, N].

    multiply: a @ b in FP32, of all of K where no scale changes along K and it is not `promoted`,
    else of each 128 of K. Scales multiply in FP32.
    """
    a, b, a_scale_inv, b_scale_inv = operands
    m, k, n = *a.shape, b.shape[1]
    at_the_end, by_chunk = [], []
    for t, rows, is_b in ((a_scale_inv, m, False), (b_scale_inv, n, True)):
        t = _per_row(t, rows, is_b=is_b)
        if t is not None and t.shape[0 if is_b else 1] > 1:
            by_chunk.append((t, 0 if is_b else 1))
        elif t is not None and t.numel() > 0:  # none: K = 0
            at_the_end.append(t)
    if by_chunk or promoted:
        acc = torch.zeros((m, n), dtype=torch.float32, device=a.device)
        for i, start in enumerate(range(0, k, CHUNK)):
            part = slice(start, start + CHUNK)
            sums = multiply(a[:, part], b[part])
            for t, dim in by_chunk:
                sums = sums * t.narrow(dim, i, 1)
            acc = acc + sums
    else:
        acc = multiply(a, b)
    for t in at_the_end:
        acc = acc * t
    return acc
