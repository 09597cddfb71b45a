"""Ways to break csrc/cuda/gemm/kernel/gemm_sm90.cuh and gemm_store_sm90.cuh, one line each."""

from __future__ import annotations

from typing import NamedTuple

KERNEL, STORE = "gemm_sm90.cuh", "gemm_store_sm90.cuh"


class Mutation(NamedTuple):
    what: str
    instance: str  # where it is looked for: "direct", "cluster" or "promoted"
    old: str
    new: str
    occurrence: int = 0  # of `old`, the only one that changes
    file: str = KERNEL


FULL_WAIT = "barrier_wait<remote>(shared.full(ring.stage), ring.parity);"
EMPTY_WAIT = "barrier_wait<(T::kCluster > 1)>(shared.empty(ring.stage), ring.parity ^ 1);"
RELEASE = "release(shared, previous);"
ARRIVE = "if (lane == 0) barrier_arrive(shared.empty(stage));"
ARRIVE_FOR_ALL = (
    "if (threadIdx.x % 128 == 0) for (int i = 0; i < 4; ++i) barrier_arrive(shared.empty(stage));"
)
STEP = "(b_at + step * b_step, "
BOX_BARRIER = "named_barrier(1 + consumer, 128);"
BOX_WAIT = "if (leader) tma_store_wait_read<1>();"
WORDS = "((2 * pair + word) ^ (row % 8))"

# fmt: off
IN_KERNEL = (
    Mutation("no wait for TMA", "direct", FULL_WAIT, ";"),
    Mutation("no wait for TMA", "promoted", FULL_WAIT, ";", 1),
    Mutation("no wait for a free stage", "direct", EMPTY_WAIT, ";"),
    Mutation("no wait for a free stage", "cluster", EMPTY_WAIT, ";"),
    Mutation("wrong phase bit", "direct", "ring.parity ^ 1", "ring.parity"),
    Mutation("wrong phase bit", "direct", "(ring.stage), ring.parity);", "(ring.stage), 0);"),
    Mutation("phase bit kept", "direct", "parity ^= 1;", ";"),
    Mutation("early release", "direct", RELEASE, "release(shared, ring.stage);"),
    Mutation("early release", "direct", "wgmma_wait<1>();", "wgmma_wait<2>();"),
    Mutation("one warp releases for four", "direct", ARRIVE, ARRIVE_FOR_ALL),
    Mutation("release at one block", "cluster", "(stage), lane)", "(stage), cluster_rank())"),
    Mutation("no last release", "direct", RELEASE, ";", 1),
    Mutation("no wgmma fence", "direct", "wgmma_fence();", ";"),
    Mutation("no wgmma fence", "promoted", "wgmma_fence();", ";", 1),
    Mutation("no wgmma commit", "direct", "wgmma_commit();", ";"),
    Mutation("no wgmma wait", "direct", "wgmma_wait_for(acc[part]);", ";"),
    Mutation("no wgmma wait", "promoted", "wgmma_wait_for(partial);", ";"),
    Mutation("wrong stride", "direct", "chunk_bytes, 1024), accum", "chunk_bytes, 2048), accum"),
    Mutation("wrong leading", "direct", STEP + "chunk_bytes", STEP + "1024"),
    Mutation("old sums kept", "direct", "accumulate || step > 0", "true"),
    Mutation("fewer bytes expected", "direct", "(full, T::kStageBytes)", "(full, T::kABytes)"),
    Mutation("multicast to itself", "cluster", "(1 << T::kCluster) - 1", "1 << rank"),
    Mutation("scope of the block", "cluster", "wait<(T::kCluster > 1)>", "wait<false>"),
    Mutation("no fence of the init", "direct", "barrier_init_fence();", ";"),
    Mutation("no barrier after init", "direct", "__syncthreads();", ";"),
    Mutation("no cluster barrier after init", "cluster", "cluster_sync();", ";"),
    Mutation("block exits early", "cluster", "cluster_sync();", ";", 1),
    Mutation("too many registers", "direct", "more_registers<232>", "more_registers<240>"),
    Mutation("too few arrivals", "direct", "4 * T::kConsumers", "2 * T::kConsumers"),
    Mutation("exit with unread stores", "direct", "tma_store_wait_read<0>();", ";"),
)
IN_STORE = (
    Mutation("no proxy fence", "direct", "fence_async_proxy();", ";"),
    Mutation("box used too early", "direct", BOX_WAIT, ";"),
    Mutation("box used too early", "direct", "wait_read<1>", "wait_read<2>"),
    Mutation("no barrier before the box", "direct", BOX_BARRIER, ";"),
    Mutation("no barrier before TMA", "direct", BOX_BARRIER, ";", 1),
    Mutation("both consumers at one barrier", "direct", "1 + consumer, 128", "1, 128"),
    Mutation("no commit of stores", "direct", "tma_store_commit();", ";"),
    Mutation("no swizzle of fp32", "direct", "(word ^ (row % 8)) * 16 + at", "word * 16 + at"),
    Mutation("no swizzle of stmatrix", "direct", WORDS, "(2 * pair + word)"),
)
# fmt: on

MUTATIONS = (*IN_KERNEL, *(m._replace(file=STORE) for m in IN_STORE))
