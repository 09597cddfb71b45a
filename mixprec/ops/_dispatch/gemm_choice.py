"""Which variants of gemm are tried on a GPU, in order: by the user's rows, then by ours."""

from __future__ import annotations

import json
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from . import gemm_rows

logger = logging.getLogger("mixprec")

DEFAULT = ("vendor", "cuda", "triton", "reference")
_FIRST = {first: (first, *(b for b in DEFAULT if b != first)) for first in gemm_rows.BACKENDS}


def user_file() -> Path:
    """The user's own rows: $MIXPREC_TUNED, else mixprec/gemm_rows.json in the cache folder."""
    named = os.environ.get("MIXPREC_TUNED")
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "mixprec" / "gemm_rows.json"


@cache
def rows() -> dict[tuple[str, str, str], gemm_rows.Row]:
    """Our rows with the user's over them, read once. A damaged file is named once, and ignored."""
    known = dict(gemm_rows.ROWS)
    try:
        path = user_file()
        if path.exists():
            known.update(gemm_rows.parse(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, RuntimeError) as error:
        logger.warning(
            "the tuned rows in %s are ignored (%s); python -m mixprec.bench tune writes them anew",
            os.environ.get("MIXPREC_TUNED") or "the cache folder",
            error,
        )
    return known


def fastest(arch: str, family: str, size: str) -> str:
    """The backend of the row for these; "" where there is none."""
    row = rows().get((arch, family, size))
    return "" if row is None else row.backend


@cache
def _measured() -> frozenset[str]:
    return frozenset(row.arch for row in rows().values())


def is_measured(arch: str) -> bool:
    """Whether there is any row for GPUs of this compute capability."""
    return arch in _measured()


# torch.compile takes their results as they are and follows no file while it traces: the mark that
# torch.compiler.assume_constant_result sets, which would import torch._dynamo (1.3 s).
fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_measured._dynamo_marked_constant = True  # type: ignore[attr-defined]


def order(args: tuple[Any, ...] | None, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The variants to try for a call of gemm, best first."""
    if args is None or capability is None:
        return DEFAULT
    arch = f"{capability[0]}.{capability[1]}"
    if not is_measured(arch):
        return DEFAULT
    a, b = args[0], args[1]
    m, k = a.shape
    size = gemm_rows.size_class(m, b.shape[1], k, a.dtype.itemsize)
    first = fastest(arch, gemm_rows.family(a.dtype), size)
    return _FIRST[first] if first else DEFAULT


def forget() -> None:
    """Read the rows again at the next use: the file was written."""
    rows.cache_clear()
    _measured.cache_clear()


def accumulate_order(
    args: tuple[Any, ...] | None, capability: tuple[int, int] | None
) -> tuple[str, ...]:
    """The same for a call of gemm_accumulate_."""
    return order(None if args is None else args[1:], capability)


def cuda_why_not(args: tuple[Any, ...], capability: tuple[int, int] | None) -> str | None:
    """The kernel is made of instructions that one generation of GPUs has, and scales along K are
    for its FP8 instances alone. args: of gemm or, with acc before them, of gemm_accumulate_."""
    major, minor = capability or (9, 0)  # torch.compile of torch 2.11 does not trace != of tuples
    if major != 9 or minor != 0:
        gpu = f"{major}.{minor}"
        return f"the CUDA kernel is for compute capability 9.0 (Hopper), this GPU is {gpu}"
    if len(args) == 5:
        args = args[1:]
    if args:
        a, _, *scales = args[:4]
        along_k = zip(scales, (1, 0), strict=True)
        by_chunk = any(s is not None and s.numel() > 1 and s.shape[dim] > 1 for s, dim in along_k)
        if by_chunk and a.dtype.itemsize == 2:
            return "the CUDA kernel takes scales of blocks along K with FP8 operands only"
    return None
