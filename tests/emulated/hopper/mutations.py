"""Ways to break the Hopper GEMM of csrc/cuda/gemm/kernel, one line each, and a
copy of the sources that has all of them, of which one at a time is in force."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from emulated.shim import runner

FILES = tuple(f"gemm_{part}sm90.cuh" for part in ("", "tile_", "accumulate_", "store_"))


class Mutation(NamedTuple):
    what: str
    instance: str  # where it is looked for: a key of MUTATED, test_hopper_gemm.py
    old: str  # in one of FILES
    new: str
    occurrence: int = 0  # of `old`, the only one that changes


FULL_WAIT = "barrier_wait(shared.full(ring.stage), ring.parity);"
EMPTY_WAIT = "barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);"
FULL_INIT = "barrier_init(shared.full(stage), 1);"
RELEASE = "release(shared, previous);"
ARRIVE = "if (lane == 0) barrier_arrive(shared.empty(stage));"
ARRIVE_FOR_ALL = (
    "if (threadIdx.x % 128 == 0) for (int i = 0; i < 4; ++i) barrier_arrive(shared.empty(stage));"
)
STEP, STRIDE = "b_at + ", "chunk_bytes, 1024), accum"
COLUMNS = "shared.b_scale(ring.stage) + at.col);"
PROMOTE = "promote(acc[part], partial, scale.upper[part], scale.lower[part],"
MEETING = "__syncwarp();  // one lane arrives for all of them, which have read the scales"
RELEASE_FIRST = f"if (last) {{ release(shared, ring.stage); {PROMOTE} {COLUMNS} continue; }}"
COMMIT, WAIT = "wgmma_commit();", "wgmma_wait_for(acc[part]);"
LAST_READ = "tma_store_wait_read<0>();  // shared memory is freed"
BOX_BARRIER = "named_barrier(1 + consumer, 128);"
BOX_WAIT = "if (is_leader()) latest ? tma_store_wait_read<0>() : tma_store_wait_read<1>();"
THREAD_0_WAITS = BOX_WAIT.replace("is_leader()", "threadIdx.x % 128 == 0")
WORDS = "((2 * pair + word) ^ (row % 8)) * 16"

# fmt: off
# Misuse that the model reports in every order of execution: `what` is a part of what it says.
REPORTED = (
    Mutation("parity 2", "direct", "ring.parity ^ 1", "ring.parity + 2"),
    Mutation("a count of 0", "direct", "4 * T::kConsumers", "0 * T::kConsumers"),
    Mutation("no mbarrier was initialised", "direct", FULL_INIT, ";"),
    Mutation("is one already", "direct", FULL_INIT, FULL_INIT * 2),
    Mutation("is not 8-byte aligned", "direct", "(b_scale(stages))", "(b_scale(stages) + 1)"),
    Mutation("without fence.mbarrier_init", "direct", "barrier_init_fence();", ";"),
    Mutation("without fence.mbarrier_init", "cluster", "barrier_init_fence();", ";"),
    Mutation("no block 2", "cluster", "lane < T::kCluster", "lane <= T::kCluster"),
    Mutation("block mask 0x7", "cluster", "(1 << T::kCluster) - 1", "7"),
    Mutation("128-byte", "direct", "tma_load(to, &maps.a", "tma_load((char*)to + 64, &maps.a"),
    Mutation("TMA store may read", "direct", LAST_READ, ";  //"),
    Mutation("without fence.proxy.async", "direct", "fence_async_proxy();", ";"),
    Mutation("TMA or wgmma may read", "direct", "tma_store_commit();", ";"),
    Mutation("no wgmma.fence", "direct", "wgmma_fence();", ";"),
    Mutation("written while a wgmma runs", "direct", COMMIT, COMMIT + "acc[0][3] = 1.0f;"),
    Mutation("issue different", "direct", "accumulate || step > 0", "threadIdx.x != 200"),
    Mutation("reserved bits", "direct", STRIDE, "chunk_bytes, 1024) | 1ull << 46, accum"),
    Mutation("outside of the block", "direct", STEP, STEP + "(1 << 17) + "),
    Mutation("start with the swizzle", "direct", STEP, STEP + "256 + "),
    Mutation("lanes of the warp", "direct", WAIT, "if (threadIdx.x % 32 != 8) " + WAIT),
    Mutation("deadlock", "direct", "ring.parity ^ 1", "ring.parity"),
    Mutation("deadlock", "direct", "more_registers<232>", "more_registers<240>"),
    Mutation("inc 40: the warp has 168", "direct", "fewer_registers<40>", "more_registers<40>"),
    Mutation("barrier 16", "direct", "1 + consumer, 128", "16 - consumer, 128"),
    Mutation("100 threads", "direct", "consumer, 128", "consumer, 100"),
)
IN_KERNEL = (
    Mutation("no wait for TMA", "direct", FULL_WAIT, ";"),
    Mutation("no wait for TMA", "promoted", FULL_WAIT, ";", 1),
    Mutation("no wait for a free stage", "direct", EMPTY_WAIT, ";"),
    Mutation("all lanes load", "direct", "elect_one()) produce", "true) produce"),
    Mutation("wrong phase bit", "direct", "(ring.stage), ring.parity);", "(ring.stage), 0);"),
    Mutation("phase bit kept", "direct", "parity ^= 1;", ";"),
    Mutation("early release", "direct", RELEASE, "release(shared, ring.stage);"),
    Mutation("one warp releases for four", "direct", ARRIVE, ARRIVE_FOR_ALL),
    Mutation("release at one block", "cluster", "(stage), lane)", "(stage), cluster_rank())"),
    Mutation("no last release", "direct", RELEASE, ";", 1),
    Mutation("too few arrivals", "direct", "4 * T::kConsumers", "2 * T::kConsumers"),
    Mutation("fewer bytes expected", "direct", "(full, bytes)", "(full, T::kABytes)"),
    Mutation("no bytes of scales expected", "scaled", "(full, bytes)", "(full, T::kStageBytes)"),
    Mutation("multicast to itself", "cluster", "(1 << T::kCluster) - 1", "1 << rank"),
    Mutation("no barrier after init", "direct", "__syncthreads();", ";"),
    Mutation("no cluster barrier after init", "cluster", "cluster_sync();", ";"),
    Mutation("block exits early", "cluster", "cluster_sync();", ";", 1),
    Mutation("no wgmma commit", "direct", COMMIT, ";"),
    Mutation("no wgmma wait", "direct", WAIT, ";"),
    Mutation("no wgmma wait", "promoted", "wgmma_wait_for(partial);", ";"),
    Mutation("wrong stride", "direct", STRIDE, "chunk_bytes, 2048), accum"),
    Mutation("scales read after release", "scaled", PROMOTE, RELEASE_FIRST + PROMOTE),
    Mutation("lanes read after release", "scaled", MEETING, ";"),
)
IN_STORE = (
    Mutation("box used too early", "direct", BOX_WAIT, ";"),
    Mutation("box used too early", "direct", BOX_WAIT, THREAD_0_WAITS),
    Mutation("no barrier before the box", "direct", BOX_BARRIER, ";"),
    Mutation("no barrier before TMA", "direct", BOX_BARRIER, ";", 1),
    Mutation("both consumers at one barrier", "direct", "1 + consumer, 128", "1, 128"),
    Mutation("no swizzle of stmatrix", "direct", WORDS, "(2 * pair + word) * 16"),
)
# fmt: on

MUTATIONS = (*REPORTED, *IN_KERNEL, *IN_STORE)


def statement(text: str, first: int, last: int) -> slice:
    """The statement around text[first:last]."""
    depth = 0
    while first > 0 and not (depth <= 0 and text[first - 1] in ";{}"):
        first -= 1
        depth += (text[first] == ")") - (text[first] == "(")
    return slice(first, text.index(";", last - 1) + 1)


def with_mutations(text: str) -> str:
    """`mutation` (ptx_sm90.cuh) is the number of the one in force, from 1 on."""
    choices: dict[tuple[int, int], str] = {}
    for number, it in enumerate(MUTATIONS, start=1):
        if it.old not in text:
            continue
        at = -1
        for _ in range(it.occurrence + 1):
            at = text.find(it.old, at + 1)
            assert at >= 0, f"{it.what}: {it.old!r} is not there"
        end = at + len(it.old)
        whole = statement(text, at, end)
        place = (whole.start, whole.stop)
        changed = text[whole.start : at] + it.new + text[end : whole.stop]
        choices[place] = choices.get(place, "") + f"if (mutation == {number}) {{{changed}\n}} else "
    for (first, last), choice in sorted(choices.items(), reverse=True):
        text = f"{text[:first]}\n{choice}{{{text[first:last]}\n}}{text[last:]}"
    return text


def mutated(folder: Path) -> Path:
    """A copy of csrc with every mutation in it."""
    copy = folder / "csrc"
    shutil.copytree(runner.CSRC, copy, ignore=shutil.ignore_patterns("*.cpp", "*.cu"))
    sources = [copy / "cuda" / "gemm" / "kernel" / name for name in FILES]
    for it in MUTATIONS:
        assert sum(it.old in source.read_text() for source in sources) == 1, it
    for source in sources:
        source.write_text(with_mutations(source.read_text()))
    return copy
