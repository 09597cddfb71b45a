"""The scales of a GEMM's operands, grouped ones too: shapes, each element's scale, the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .._dispatch import checks

LOW = (torch.float16, torch.bfloat16)
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


def check_operands(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """They have dtypes that are multiplied with each other, and one device."""
    checks.is_tensor(op, "a", a)
    checks.is_tensor(op, "b", b)
    both_fp8 = a.dtype in checks.FP8 and b.dtype in checks.FP8
    wide = (torch.float32,) if a.is_cpu else ()
    if not both_fp8 and (a.dtype != b.dtype or a.dtype not in (*wide, *LOW)):
        raise ValueError(
            f"{op}: a and b must both be float16, both bfloat16, on a CPU both float32, or FP8 in "
            f"any mix of float8_e4m3fn and float8_e5m2, got a {a.dtype} and b {b.dtype}"
        )
    checks.on_device(op, "b", b, a.device, "a")


def check_acc(
    op: str, acc: torch.Tensor, shape: Sequence[int], meaning: str, on: torch.Tensor, /, **read: Any
) -> None:
    """acc is fp32 of this shape, on a's device, and overlaps with none of the tensors `read`."""
    checks.is_tensor(op, "acc", acc)
    checks.matches(op, "acc", acc, (torch.float32,), on, shape, meaning, "a")
    checks.is_writable(op, "acc", acc)
    for name, t in read.items():
        if t is not None and checks.ranges_overlap(acc, t):
            raise ValueError(
                f"{op}: acc is written while {name} is read, so they must not overlap in memory"
            )


def check(
    op: str, name: str, t: torch.Tensor | None, rows: int, k: int, a: torch.Tensor, *, is_b: bool
) -> None:
    """t is None, or fp32 on a's device and has one element, or the shape of a granularity.

    rows: M for the scales of a, N for those of b, whose shapes are the transposes of a's.
    """
    checks.matches(op, name, t, (torch.float32,), a, owner="a")
    if t is None or t.numel() == 1:
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


def by_rows(operands: Operands) -> bool:
    """Whether rows of a are grouped, and not K."""
    return operands.b.dim() == 3


def groups(operands: Operands, offs: torch.Tensor) -> Iterator[tuple[slice, Operands]]:
    """The range of each group along S, and its product."""
    a, b, a_inv, b_inv = operands
    s = a.shape[0 if by_rows(operands) else 1]
    # Ends that are not valid, which a GPU cannot refuse, make groups empty.
    ends = offs.clamp(0, s).cummax(0).values.tolist()
    for e, (start, end) in enumerate(pairwise([0, *ends])):
        part, of_chunks = slice(start, end), slice(start // CHUNK, chunks(end))
        if by_rows(operands):
            of_a = a_inv if a_inv is None or a_inv.numel() == 1 else a_inv[part]
            of_b = b_inv if b_inv is None or b_inv.numel() == 1 else b_inv[e]
            yield part, Operands(a[part], b[e], of_a, of_b)
        else:
            of_a, of_b = a_inv, b_inv
            if a_inv is not None and a_inv.numel() != 1:
                of_a = a_inv[e] if a_inv.dim() == 3 else a_inv[:, of_chunks]
            if b_inv is not None and b_inv.numel() != 1:
                of_b = b_inv[e] if b_inv.dim() == 3 else b_inv[of_chunks]
            yield part, Operands(a[:, part], b[part], of_a, of_b)


def check_scales(op: str, operands: Operands, offs: torch.Tensor) -> None:
    """They are fp32 with one element, or of a shape that `gemm_grouped` lists."""
    a, b, a_scale_inv, b_scale_inv = operands
    experts, (rows, k), n = offs.shape[0], a.shape, b.shape[-1]
    along = chunks(k)
    shapes_a: dict[str, tuple[int, ...]]
    shapes_b: dict[str, tuple[int, ...]]
    if by_rows(operands):
        shapes_a = {"[S, 1]": (rows, 1), "[S, ceil(K/128)]": (rows, along)}
        shapes_b = {
            "[E, 1, 1]": (experts, 1, 1),
            "[E, 1, N]": (experts, 1, n),
            "[E, ceil(K/128), N]": (experts, along, n),
            "[E, ceil(K/128), ceil(N/128)]": (experts, along, chunks(n)),
        }
    else:
        shapes_a = {
            "[E, 1, 1]": (experts, 1, 1),
            "[E, M, 1]": (experts, rows, 1),
            "[M, ceil(S/128)]": (rows, along),
        }
        shapes_b = {
            "[E, 1, 1]": (experts, 1, 1),
            "[E, 1, N]": (experts, 1, n),
            "[ceil(S/128), N]": (along, n),
        }
    _check_scale(op, "a_scale_inv", a_scale_inv, shapes_a, a)
    _check_scale(op, "b_scale_inv", b_scale_inv, shapes_b, a)


def _check_scale(
    op: str,
    name: str,
    t: torch.Tensor | None,
    shapes: dict[str, tuple[int, ...]],
    a: torch.Tensor,
) -> None:
    checks.matches(op, name, t, (torch.float32,), a, owner="a")
    if t is not None and t.numel() != 1 and tuple(t.shape) not in shapes.values():
        fitting = ", ".join(f"{meaning} = {shape}" for meaning, shape in shapes.items())
        raise ValueError(
            f"{op}: {name} must hold one element or have one of the shapes {fitting}, got shape "
            f"{tuple(t.shape)}"
        )


def check_offs(op: str, operands: Operands, offs: torch.Tensor) -> None:
    """The values, where they can be read without a host sync."""
    if offs.device.type != "cpu" or torch.compiler.is_compiling() or type(offs) is not torch.Tensor:
        return
    s = operands.a.shape[0 if by_rows(operands) else 1]
    ends = [0, *offs.tolist(), s]
    if ends != sorted(ends):
        raise ValueError(
            f"{op}: offs must be the ends of the groups, ascending from 0 to S = {s}, got "
            f"{ends[1:-1]}"
        )
    scales = (operands.a_scale_inv, 1), (operands.b_scale_inv, 0)
    along_s = (t is not None and t.dim() == 2 and t.shape[dim] > 1 for t, dim in scales)
    if by_rows(operands) or not any(along_s):
        return
    starts = [start for start, end in pairwise(ends[:-1]) if start < end]
    if any(start % CHUNK for start in starts):
        raise ValueError(
            f"{op}: offs must begin each group at a multiple of 128 where scales change along S, "
            f"got {ends[1:-1]}"
        )
