// The Hopper instructions that the GEMM uses, as one function each; no other file of csrc/cuda has
// inline assembly for them. tests/emulated/hopper has a file of the same name that models
// them on a CPU as the PTX manual specifies them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace mixprec::cuda::sm90 {

using TensorMap = CUtensorMap;  // a __grid_constant__ parameter of the kernel
using Barrier = uint64_t;       // an mbarrier, in shared memory

// The dynamic shared memory of the block. TMA's 128-byte swizzle repeats every 1024 bytes.
__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return memory;
}

// The address in the shared window, as used in descriptors and instructions.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier: a phase ends when `arrivals` threads have arrived and all expected bytes came ----

__device__ __forceinline__ void barrier_init(Barrier* b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals)
               : "memory");
}

// Makes the barrier initialisations of this thread visible to the cluster and to TMA; a barrier of
// the block or cluster must follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival, and `bytes` more that TMA must transfer in this phase.
__device__ __forceinline__ void barrier_arrive_expect(Barrier* b, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
      "r"(bytes)
      : "memory");
}

// One arrival at the barrier at the same address in block `rank` of the cluster. Without
// qualifiers it is .release.cta: it counts in the other block, but orders memory only within this
// one. .release.cluster would wait for all memory accesses of the thread, global ones too
// (MEMBAR.ALL.GPU), in every chunk of K. The ring needs no more than the count: the arriving warp
// has waited for its wgmmas, so its reads are over, and the other block writes nothing here but
// operands, which only TMA writes and only wgmma reads.
__device__ __forceinline__ void barrier_arrive_at(Barrier* b, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(b)),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(b))
               : "memory");
}

// Returns when the phase of parity `parity` (0 for the first) has ended. What TMA wrote in it, for
// whichever block, is then visible: complete_tx orders it before the end of the phase. Of generic
// accesses it orders those of this block alone; .acquire.cluster would drop the L1 cache every time
// (CCTL.IVALL).
__device__ __forceinline__ void barrier_wait(Barrier* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}

// ---- TMA: boxes of a 2-D tensor (x: inner dimension), zeros where the box leaves the tensor ----

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at (x, y) -> `to`, 128-byte aligned; its bytes count at `b`. One thread.
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, Barrier* b, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(b)), "r"(x), "r"(y)
      : "memory");
}

// The same to the same address in every block of the cluster in the mask `blocks`, with the barrier
// of each.
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap* map, Barrier* b,
                                                   int x, int y, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(b)), "h"(blocks), "r"(x), "r"(y)
      : "memory");
}

// `from` -> box at (x, y), without elements outside the tensor. One thread; part of its open group.
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(x), "r"(y)
      : "memory");
}

// The same for fp32, added to the tensor.
__device__ __forceinline__ void tma_add(const TensorMap* map, const void* from, int x, int y) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::
          "l"(map),
      "r"(shared_address(from)), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most n of this thread's groups have yet to read their shared memory.
template <int n>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory");
}

// Makes this thread's writes to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- wgmma: all 128 threads of a warpgroup, asynchronous ----

// Needed before the first wgmma, and after other instructions accessed the accumulators.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most n of this warp's committed groups are pending.
template <int n>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
// Waits until none is pending. `acc` is what they write, so that the compiler does not read it
// earlier.
template <int count>
__device__ __forceinline__ void wgmma_wait_for(float (&acc)[count]) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// ---- the rest ----

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8, and
// in r[m] elements 2 * (l % 4) and the next of row l / 4 of matrix m.
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// A plain store to shared memory. A function of its own because TMA reads the data later, after
// fence_async_proxy.
__device__ __forceinline__ void store_shared(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

// A plain load of two floats that TMA wrote, behind barrier_wait. A function of its own because the
// thread must have read them before its warp arrives at the barrier that lets TMA overwrite them.
__device__ __forceinline__ float2 load_shared(const float* from) {
  return *reinterpret_cast<const float2*>(from);
}

// True in one lane of the warp, the same in every call. All lanes call it. Unlike a test of
// threadIdx it tells the compiler that the branch is taken by one thread, so that the addresses of
// TMA need no loop over the lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, one;\n}"
               : "=r"(elected));
  return elected != 0;
}

// Barrier `id` (1..15) among `threads` threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; orders their memory.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

template <int n>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

}  // namespace mixprec::cuda::sm90
