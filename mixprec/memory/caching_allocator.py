"""torch's allocator of CPU memory, with a cache of large blocks (csrc/allocator)."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from ..ops._dispatch import library

_OP = "use_caching_allocator"
_installed: ModuleType | None = None


def use_caching_allocator(max_cached: int | None = None) -> None:
    """Let torch allocate CPU memory from a cache from now on, in the whole process.

    Tensors of 64 KiB and more, of mixprec and of any other library that asks torch for CPU memory,
    get pages that freed tensors leave: no page is faulted in again in every step, and no hole
    between tensors is lost, because pages of several freed blocks are moved together where none is
    large enough. The cache and the tensors then never hold more pages than were in use at one
    moment, where malloc's heap keeps holes as well. Values do not change.

    max_cached: the most bytes that freed blocks keep, at least 0; None: a quarter of the memory
    that the process may use. Another call changes it. Tensors that exist remain where they are.
    Call it at the start of a program, before other threads allocate. It cannot be undone.

    ValueError for another max_cached. RuntimeError where it is not available: elsewhere than on
    Linux, with another version of torch than mixprec was built with (which has no stable interface
    for allocators), or where another library has replaced torch's allocator.
    """
    if max_cached is not None and (type(max_cached) is not int or max_cached < 0):
        raise ValueError(f"{_OP}: max_cached must be a number of bytes >= 0, got {max_cached!r}")
    global _installed
    allocator = _installed or _load()
    limit = _memory_limit() // 4 if max_cached is None else max_cached
    allocator.set_limit(min(limit, sys.maxsize))
    if not allocator.install():
        raise RuntimeError(f"{_OP}: another library has replaced torch's allocator of CPU memory")
    _installed = allocator


def memory_allocated() -> int:
    """The bytes of blocks in use, in whole pages; 0 without `use_caching_allocator`."""
    return _installed.usage()[0] if _installed is not None else 0


def memory_reserved() -> int:
    """`memory_allocated`, and the bytes of the cache; 0 without `use_caching_allocator`."""
    return _installed.usage()[1] if _installed is not None else 0


def empty_cache() -> None:
    """Return the memory of the cache to the system."""
    if _installed is not None:
        _installed.empty_cache()


def _load() -> ModuleType:
    if library.C is None:
        raise RuntimeError(library.LOAD_ERROR)
    built = library.C.build_info()["torch"]
    if built != torch.__version__:
        raise RuntimeError(
            f"{_OP}: mixprec was built with torch {built} and this is {torch.__version__}; to "
            f"rebuild it, in the source folder run: {library.INSTALL}"
        )
    try:
        return importlib.import_module("mixprec._C_allocator")
    except ImportError as error:
        raise RuntimeError(
            f"{_OP}: mixprec._C_allocator, which is built on Linux and is no part of wheels, does "
            f"not load ({error}); to build it, in the source folder run: {library.INSTALL}"
        ) from error


def _memory_limit() -> int:
    """The memory of the machine, or of the process's control group."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(pages, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control groups, or "max"
        return pages
