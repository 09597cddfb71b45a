"""Which source files a GPU kernel is made of, and their hash: a figure belongs to that source."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from mixprec.ops._dispatch import library

CHOSEN = "as chosen"  # every call on the backend that a user gets


@cache
def root() -> Path | None:
    """The source tree that this package was built from; None where it is not at hand."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "csrc" / "cuda").is_dir() and (folder / "triton_kernels").is_dir():
            return folder
    return None


def files(op: str, backend: str) -> list[Path]:
    """The files that the kernel of `op` is made of, with all that they include or import; empty
    for a backend without sources of its own."""
    top = root()
    if top is None:
        return []
    if backend == CHOSEN:
        return [*files(op, "cuda"), *files(op, "triton")]
    if backend == "cuda":
        made_in = re.compile(rf'\.impl\("{op}"')
        files_ = [p for p in sorted(top.glob("csrc/cuda/**/*.cu")) if made_in.search(p.read_text())]
        # gemm_sm90.cu only launches what is compiled in gemm_sm90_bf16_k_k.cu and the like.
        kernels = [p for file in files_ for p in sorted(top.glob(f"csrc/cuda/**/{file.stem}_*.cu"))]
        return _with_headers([*files_, *kernels], top)
    if backend == "triton" and op in library.TRITON:
        folder = top / "triton_kernels"
        return _closure([folder / f"{library.TRITON[op]}.py"], _imports, folder)
    return []


def _with_headers(first: list[Path], top: Path) -> list[Path]:
    return _closure(first, lambda text: re.findall(r'#include "([^"]+)"', text), top / "csrc")


def _imports(text: str) -> list[str]:
    """The neighbours that a module imports: from .tiles import x; from . import tiles, configs."""
    names = re.findall(r"^from \.(\w+) import", text, re.MULTILINE)
    for group in re.findall(r"^from \. import \(?([\w\s,]+)", text, re.MULTILINE):
        names += re.findall(r"\w+", group)
    return [f"{name}.py" for name in names]


def _closure(first: list[Path], mentioned: Callable[[str], list[str]], folder: Path) -> list[Path]:
    found: set[Path] = set()
    waiting = list(first)
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        waiting += [folder / name for name in mentioned(path.read_text())]
    return sorted(found)


def digest(ops: tuple[str, ...], backend: str) -> str | None:
    """The hash of all sources of the kernels of `ops`; None where there are none."""
    return _hash({path for op in ops for path in files(op, backend)})


def digest_of(source: str) -> str | None:
    """The same for one file of csrc/cuda and all that it includes."""
    top = root()
    return (
        None
        if top is None
        else _hash(set(_with_headers([*top.glob(f"csrc/cuda/**/{source}")], top)))
    )


def _hash(paths: set[Path]) -> str | None:
    """16 hex digits over names and contents."""
    top = root()
    if top is None or not paths:
        return None
    state = hashlib.sha256()
    for path in sorted(paths):
        state.update(f"{path.relative_to(top)}\0".encode() + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]
