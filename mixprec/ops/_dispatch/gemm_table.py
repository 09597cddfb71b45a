"""Which GEMM is fastest: the table of measured choices, and the resulting order of backends.

An entry says which backend was the fastest for a kind of operands and a class of sizes on one GPU
architecture and, for Triton, with which tile. `python -m mixprec.bench tune` measures entries for
the current GPU and writes them to `user_file()`; they override those of `ENTRIES`. Without an entry
the vendor's GEMM is first, wherever a single call of it is exact.
"""

from __future__ import annotations

import json
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .library import Capability

logger = logging.getLogger("mixprec")

DEFAULT = ("vendor", "cuda", "triton", "reference")
BACKENDS = ("cuda", "triton", "vendor")
_FIRST = {first: (first, *(b for b in DEFAULT if b != first)) for first in BACKENDS}
# By the main loop: blocks have scales that change along K; fast keeps FP8's short accumulator.
FAMILIES = ("16-bit", "16-bit blocks", "fp8", "fp8 fast")
SIZES = ("thin", "unaligned", "small", "medium", "large")


class Entry(NamedTuple):
    """The fastest backend for a family and size class on GPUs of one architecture."""

    arch: str  # compute capability: "9.0"
    family: str
    size: str
    backend: str
    tile: dict[str, Any] | None  # the fields of triton_kernels.configs.Config, for "triton"
    gpu: str
    date: str
    speedup: float  # over the next best, geometric mean over the shapes measured

    @property
    def key(self) -> tuple[str, str, str]:
        return self.arch, self.family, self.size


def family(itemsize: int, *, blocks: bool, fast: bool) -> str:
    if itemsize == 2:
        return "16-bit blocks" if blocks else "16-bit"
    return "fp8 fast" if fast and not blocks else "fp8"


def size_class(m: int, n: int, k: int, itemsize: int) -> str:
    """The class of a [M, K] x [K, N] product of operands of `itemsize` bytes.

    thin: 64 rows or columns at most. unaligned: rows that do not start on 16 bytes. small: up to
    1448 cubed; medium: up to 4096 cubed; large: above.
    """
    if m <= 64 or n <= 64:
        return "thin"
    if (n * itemsize) % 16 or (k * itemsize) % 16:
        return "unaligned"
    products = m * n * k
    return "small" if products <= 1448**3 else "medium" if products <= 4096**3 else "large"


def parse(entries: Any) -> dict[tuple[str, str, str], Entry]:
    """Entries from plain values, as in JSON; ValueError for an invalid one."""
    if not isinstance(entries, list):
        raise ValueError("the table must be a list of entries")
    table = {}
    for given in entries:
        if not isinstance(given, dict) or set(given) != set(Entry._fields):
            raise ValueError(f"an entry must have {', '.join(Entry._fields)}, got {given!r}")
        entry = Entry(**given)
        for value, known in (
            (entry.family, FAMILIES),
            (entry.size, SIZES),
            (entry.backend, BACKENDS),
        ):
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        if not isinstance(entry.arch, str):
            raise ValueError(f"arch must be a text such as '9.0', got {entry.arch!r}")
        table[entry.key] = entry
    return table


ENTRIES: dict[tuple[str, str, str], Entry] = parse([])  # nothing is measured yet


def user_file() -> Path:
    """The user's own entries: $MIXPREC_TUNED, else mixprec/gemm_table.json in the cache folder."""
    named = os.environ.get("MIXPREC_TUNED")
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "mixprec" / "gemm_table.json"


@cache
def table() -> dict[tuple[str, str, str], Entry]:
    """`ENTRIES` overridden by the user's entries, read once. A damaged file is reported once."""
    known = dict(ENTRIES)
    try:
        path = user_file()
        if path.exists():
            known.update(parse(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        logger.warning(
            "the tuned entries in %s are ignored (%s); python -m mixprec.bench tune writes them "
            "anew",
            os.environ.get("MIXPREC_TUNED") or "the cache folder",
            error,
        )
    return known


@cache
def _measured() -> frozenset[str]:
    return frozenset(entry.arch for entry in table().values())


def is_measured(arch: str) -> bool:
    """Whether there is any entry for GPUs of this compute capability."""
    return arch in _measured()


def fastest(arch: str, family: str, size: str) -> str:
    """The backend of the entry for these arguments; "" if there is none."""
    entry = table().get((arch, family, size))
    return "" if entry is None else entry.backend


def tile(
    capability: int, family: str, m: int, n: int, k: int, itemsize: int
) -> dict[str, Any] | None:
    """The tile of the entry for a product on a GPU of capability 10 * major + minor; None if there
    is no entry for Triton."""
    arch = f"{capability // 10}.{capability % 10}"
    entry = table().get((arch, family, size_class(m, n, k, itemsize)))
    return None if entry is None else entry.tile


# torch.compile treats their results as constants and does not trace into the file access: the mark
# that torch.compiler.assume_constant_result sets, which would import torch._dynamo (1.3 s).
is_measured._dynamo_marked_constant = True  # type: ignore[attr-defined]
fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget() -> None:
    """Read the table again at the next use, after the file was written."""
    table.cache_clear()
    _measured.cache_clear()


def order(args: Any, capability: Capability | None) -> tuple[str, ...]:
    """The variants to try for a call of gemm or gemm_accumulate_, best first."""
    if args is None or capability is None:
        return DEFAULT
    arch = f"{capability[0]}.{capability[1]}"
    if not is_measured(arch):
        return DEFAULT
    [m, k], n, itemsize = args.a.shape, args.b.shape[1], args.a.dtype.itemsize
    kind = family(itemsize, blocks=scales_along_k(args), fast=getattr(args, "fast_accum", False))
    first = fastest(arch, kind, size_class(m, n, k, itemsize))
    return _FIRST[first] if first else DEFAULT


def scales_along_k(args: Any) -> bool:
    """Whether a scale of a call of gemm or gemm_accumulate_ changes along K."""
    scales = ((args.a_scale_inv, 1), (args.b_scale_inv, 0))
    return any(s is not None and s.numel() > 1 and s.shape[dim] > 1 for s, dim in scales)


def cuda_why_not(args: Any, capability: Capability | None) -> str | None:
    """The kernel needs instructions of one GPU generation; scales along K are for FP8 only."""
    major, minor = capability or (9, 0)  # torch.compile of torch 2.11 does not trace != of tuples
    if major != 9 or minor != 0:
        gpu = f"{major}.{minor}"
        return f"the CUDA kernel is for compute capability 9.0 (Hopper), this GPU is {gpu}"
    if args.a.dtype.itemsize == 2 and scales_along_k(args):
        return "the CUDA kernel takes scales of blocks along K with FP8 operands only"
    return None
