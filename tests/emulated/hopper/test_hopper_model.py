"""The CPU model of the Hopper instructions: what each does alone, and that it reports misuse.

The kernels are in primitives.cpp. A misuse has to be reported under every seed where the model can
know it for certain, and under some of them where it is a race.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from cases import FP8, name, small_integers
from emulated.hopper import runner
from emulated.shim.runner import DTYPES

SEEDS = range(12)


@cache
def library() -> ctypes.CDLL:
    return runner.load(runner.compile_(runner.HERE / "primitives.cpp", "-O1"))


def at(t: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())


def run(seed: int, function: str, *args: object) -> int:
    library().seed(ctypes.c_uint64(seed))
    error = getattr(library(), function)(*args)
    assert error in (0, runner.FAILED), f"{function}: {error}"
    return int(error)


def assert_caught(attempt: Callable[[int], bool], message: str, always: bool = True) -> None:
    """attempt(seed): whether the values are right, if the launch has not failed."""
    caught = []
    for seed in SEEDS:
        right = attempt(seed)
        error = library().last_error().decode()
        assert not error or message in error, f"seed {seed}: {error!r}, expected {message!r}"
        caught.append(bool(error) or not right)
    assert all(caught) if always else any(caught), f"not caught: {message!r} {caught}"


# ---- mbarrier ----


def barriers(seed: int, fault: int) -> bool:
    rounds = torch.full((2,), -1, dtype=torch.int32)
    return run(seed, "barriers", fault, at(rounds)) == 0 and rounds.tolist() == [3, 3]


# ---- TMA ----


def in_box(x: torch.Tensor, column: int, line: int, width: int) -> torch.Tensor:
    """64 lines of `width` elements of x from (line, column), zeros outside of x."""
    box = torch.zeros(64, width, dtype=x.dtype)
    for i in range(64):
        for j in range(width):
            if 0 <= line + i < x.shape[0] and 0 <= column + j < x.shape[1]:
                box[i, j] = x[line + i, column + j]
    return box


def swizzled(box: torch.Tensor) -> torch.Tensor:
    """The lines of 128 bytes as they lie in shared memory: word w of line r at w ^ (r % 8)."""
    words = box.contiguous().view(torch.uint8).view(box.shape[0], 8, 16)
    out = torch.empty_like(words)
    for r in range(box.shape[0]):
        for w in range(8):
            out[r, w ^ (r % 8)] = words[r, w]
    return out.view(box.shape[0], 128)


def load(
    seed: int, fault: int, blocks: int, x: torch.Tensor, column: int, line: int, swizzle: bool
) -> bool:
    out = torch.full((blocks, 64, 32), -1, dtype=torch.int32)
    pitch = ctypes.c_int64(x.stride(0) * x.element_size())
    sizes = (ctypes.c_int64(x.shape[1]), ctypes.c_int64(x.shape[0]), pitch)
    args = (blocks, DTYPES.index(x.dtype), at(x), *sizes, swizzle, column, line, at(out))
    if run(seed, "load", fault, *args) != 0:
        return False
    box = in_box(x, column, line, 128 // x.element_size())
    want = swizzled(box) if swizzle else box.contiguous().view(torch.uint8).view(64, 128)
    return all(torch.equal(o.view(torch.uint8).view(64, 128), want) for o in out)


@pytest.mark.parametrize("swizzle", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_tma_loads(dtype: torch.dtype, blocks: int, swizzle: bool) -> None:
    x = torch.arange(1, 101 * 136 + 1, dtype=torch.float32).reshape(101, 136).to(dtype)[:, :131]
    for seed, (column, line) in enumerate([(0, 0), (64, 32), (104, 72), (-5, -3), (200, 0)]):
        assert load(seed, 0, blocks, x, column, line, swizzle), library().last_error()


def test_what_the_driver_refuses() -> None:
    good = (DTYPES.index(torch.bfloat16), 1 << 20, 100, 100, 208, 64, 64, 1)
    rows = {1: (1 << 20) + 8, 2: 0, 3: 0, 4: 200, 5: 128, 6: 257}  # argument -> value

    def refused(args: tuple[int, ...]) -> bool:
        dtype, address, inner, outer, pitch, *box = args
        longs = (ctypes.c_uint64(address), *map(ctypes.c_int64, (inner, outer, pitch)))
        return bool(library().refuses(dtype, *longs, *box))

    assert not refused(good)
    for index, value in rows.items():
        assert refused((*good[:index], value, *good[index + 1 :])), (index, value)


def store(seed: int, fault: int, add: bool, x: int = 0, y: int = 0) -> bool:
    out = torch.full((75, 44), 0.5)
    want = out.clone()
    filled = torch.arange(64.0 * 32).reshape(64, 32)
    top, left = max(0, -y), max(0, -x)
    part = filled[top : 75 - y, left : max(left, 44 - x)]
    area = want[y + top : y + top + part.shape[0], x + left : x + left + part.shape[1]]
    area.copy_(3 * part if add else 2 * part)
    sizes = (ctypes.c_int64(44), ctypes.c_int64(75))
    return run(seed, "store", fault, at(out), *sizes, x, y, add) == 0 and torch.equal(out, want)


@pytest.mark.parametrize("add", [False, True])
def test_tma_stores(add: bool) -> None:
    for seed, (x, y) in enumerate([(0, 0), (8, 11), (12, 40), (-4, -7), (60, 0)]):
        assert store(seed, 0, add, x, y), library().last_error()


def matrix(seed: int, fault: int) -> bool:
    out = torch.full((64, 64), -1, dtype=torch.int16)
    want = torch.arange(64 * 64, dtype=torch.int16).reshape(64, 64)
    return run(seed, "matrix", fault, at(out)) == 0 and torch.equal(out, want)


# ---- wgmma ----


class Product(NamedTuple):
    """out [64, n] = 2 * a [64, k] @ b [n, k]^T, k being 128 bytes."""

    a: torch.dtype
    b: torch.dtype
    n: int = 64
    a_mn_major: bool = False
    b_mn_major: bool = False

    def __str__(self) -> str:
        layouts = ("T" if self.a_mn_major else "N") + ("N" if self.b_mn_major else "T")
        return f"{name(self.a)}-{name(self.b)}-{self.n}-{layouts}"


BF16, FP16 = torch.bfloat16, torch.float16
# primitives.cpp: run_product
LAYOUTS = [Product(BF16, BF16, 128, a, b) for a in (False, True) for b in (False, True)]
PAIRS = [Product(a, b) for a in FP8 for b in FP8]
PRODUCTS = [*LAYOUTS, Product(FP16, FP16, 256, False, True), *PAIRS]


def multiply(
    seed: int, fault: int, it: Product, a: torch.Tensor, b: torch.Tensor, swizzle: bool = True
) -> torch.Tensor | None:
    a, b = (x.t().contiguous() if mn else x for x, mn in ((a, it.a_mn_major), (b, it.b_mn_major)))
    out = torch.full((64, it.n), -1.0)
    how = (PRODUCTS.index(it), fault, swizzle)
    return out if run(seed, "run_product", *how, at(a), at(b), at(out)) == 0 else None


def product(seed: int, fault: int, it: Product, swizzle: bool = True) -> bool:
    k = 128 // it.a.itemsize
    a, b = (small_integers((rows, k), dtype, 3, seed + rows)
            for rows, dtype in ((64, it.a), (it.n, it.b)))  # fmt: skip
    out = multiply(seed, fault, it, a, b, swizzle)
    return out is not None and torch.equal(out, 2 * (a.float() @ b.float().t()))


@pytest.mark.parametrize("it", PRODUCTS, ids=str)
def test_wgmma(it: Product) -> None:
    for seed in SEEDS:
        assert product(seed, 0, it), library().last_error()


def test_short_accumulators_of_fp8() -> None:
    """With 13 bits below the leading one, a sum of ones stops where one is below the last bit."""
    a, b = torch.ones(64, 128), torch.ones(64, 128)
    a[:, 0] = 128.0  # 2^7 * 2^7 = 2^14 in the first step: all that follows is a half of the unit
    b[:, 0] = 128.0
    exact = 2 * (2.0**14 + 127)
    for truncating, want in ((0, exact), (1, 2.0**15)):
        library().truncate_fp8_sums(truncating)
        out = multiply(0, 0, PAIRS[0], a.to(FP8[0]), b.to(FP8[0]))
        library().truncate_fp8_sums(0)
        assert out is not None
        assert (out == want).all(), (truncating, out[0, 0].item())


@pytest.mark.parametrize("it", LAYOUTS, ids=str)
def test_operands_without_the_swizzle_are_wrong(it: Product) -> None:
    assert_caught(lambda seed: product(seed, 0, it, swizzle=False), "")


# ---- the rest ----


def warps(seed: int, fault: int) -> bool:
    out = torch.zeros(384, dtype=torch.int32)
    return run(seed, "warps", fault, at(out)) == 0 and bool(out.all())


def test_a_deadlock_says_who_waits_where() -> None:
    warps(0, 3)
    error = library().last_error().decode()
    assert "setmaxnreg.inc 240" in error
    assert "block 0" in error


# ---- misuse: what primitives.cpp does under each number of a fault, and the message ----


def load_one(seed: int, fault: int) -> bool:
    x = torch.arange(1.0, 64 * 32 + 1).reshape(64, 32)
    return load(seed, fault, 2 if fault in (4, 7) else 1, x, 0, 0, True)


def store_one(seed: int, fault: int) -> bool:
    return store(seed, fault, False)


def product_one(seed: int, fault: int) -> bool:
    return product(seed, fault, LAYOUTS[1])


# Empty: any of several messages, or a wrong value.
MISUSES: dict[Callable[[int, int], bool], tuple[str, ...]] = {
    barriers: (
        "is one already", "a count of 0", "is not 8-byte aligned", "no fence.mbarrier_init",
        "an arrival more", "no mbarrier was initialised",
        "",  # arrivals too many, and bytes that never come
        "",  # goes on too early, or never
        ".acquire.cta, but other blocks arrive", "parity 2",
        "",  # a block that others arrive at has exited, or the others wait for it
        "the cluster has no block 2",
    ),
    load_one: (
        "is not 128-byte aligned", "overwrites the mbarrier", "without fence.mbarrier_init", "exit",
        "",  # fewer bytes are expected: more come, or the phase ends too early
        "deadlock", "block mask 0x7",
        "",  # over the first one while it is under way, or more bytes than expected
        "that TMA writes", "exits while", "", "", "was not encoded",
    ),
    store_one: (
        "is not 128-byte aligned", "overwrites shared memory", "without fence.proxy.async",
        "without fence.proxy.async",
        "",  # not fenced yet, or overwritten while it is read
        "exits while a TMA store may read", "",
    ),
    matrix: ("is not 16-byte aligned", "without fence.proxy.async"),
    product_one: (
        "shared memory",  # no wait for TMA: read too early, or written too late
        "no wgmma.fence", "issue different instructions", "outside of the block's shared memory",
        "does not start with the swizzle's pattern", "reserved bits",
        "",  # the wrong stride
        "were written while a wgmma runs", "exits while wgmmas run", "no wgmma.fence",
        "exits while",  # one group may still run
        "deadlock", "exits while wgmmas run", "that TMA or wgmma may read", "that is still read",
        "that is still read",
    ),
    warps: (
        "setmaxnreg.inc 40: the warp has 168", "deadlock", "deadlock", "barrier 16", "100 threads",
        "", "deadlock", "not executed by all warps",
    ),
}  # fmt: skip


# barriers: mbarrier phases and arrivals across a cluster; warps: named barriers and registers.
@pytest.mark.parametrize("attempt", MISUSES, ids=name)
def test_what_is_right_passes(attempt: Callable[[int, int], bool]) -> None:
    for seed in SEEDS:
        assert attempt(seed, 0), library().last_error()


RACES = {(barriers, 8), (store_one, 5), (product_one, 1)}


@pytest.mark.parametrize(
    ("attempt", "fault", "message"),
    [(f, i, text) for f, texts in MISUSES.items() for i, text in enumerate(texts, 1)],
    ids=name,
)
def test_misuse_is_caught(attempt: Callable[[int, int], bool], fault: int, message: str) -> None:
    assert_caught(lambda seed: attempt(seed, fault), message, (attempt, fault) not in RACES)
