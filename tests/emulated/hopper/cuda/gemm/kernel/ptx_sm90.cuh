// Replaces csrc/cuda/gemm/kernel/ptx_sm90.cuh: the same functions, on the units of model.h.
#pragma once

#include <cuda_runtime.h>

#include "model.h"

namespace mixprec::cuda::sm90 {

namespace model = cuda_on_cpu::sm90;

using TensorMap = CUtensorMap;
using Barrier = uint64_t;

inline uint8_t* dynamic_shared() { return static_cast<uint8_t*>(cuda_on_cpu::dynamic_shared()); }
inline uint32_t shared_address(const void* p) { return model::shared_address(p); }

inline void barrier_init(Barrier* b, uint32_t arrivals) { model::barrier_init(b, arrivals); }
inline void barrier_init_fence() { model::barrier_init_fence(); }
inline void barrier_arrive_expect(Barrier* b, uint32_t bytes) {
  model::barrier_arrive_expect(b, bytes);
}
inline void barrier_arrive_at(Barrier* b, uint32_t rank) { model::barrier_arrive_at(b, rank); }
inline void barrier_arrive(Barrier* b) { model::barrier_arrive(b); }
template <bool cluster>
void barrier_wait(Barrier* b, uint32_t parity) {
  model::barrier_wait(b, parity, cluster);
}

inline void prefetch_map(const TensorMap* map) { model::prefetch_map(map); }
inline void tma_load(void* to, const TensorMap* map, Barrier* b, int x, int y) {
  model::tma_load(to, map, b, x, y, 0, false);
}
inline void tma_load_multicast(void* to, const TensorMap* map, Barrier* b, int x, int y,
                               uint16_t blocks) {
  model::tma_load(to, map, b, x, y, blocks, true);
}
inline void tma_store(const TensorMap* map, const void* from, int x, int y) {
  model::tma_store(map, from, x, y, false);
}
inline void tma_add(const TensorMap* map, const void* from, int x, int y) {
  model::tma_store(map, from, x, y, true);
}
inline void tma_store_commit() { model::tma_store_commit(); }
template <int n>
void tma_store_wait_read() {
  model::tma_store_wait(n, true);
}
template <int n>
void tma_store_wait() {
  model::tma_store_wait(n, false);
}
inline void fence_async_proxy() { model::fence_async_proxy(); }

inline void wgmma_fence() { model::wgmma_fence(); }
inline void wgmma_commit() { model::wgmma_commit(); }
template <int n>
void wgmma_wait() {
  model::wgmma_wait(n);
}
template <int count>
void wgmma_wait_for(float (&)[count]) {
  model::wgmma_wait(0);
}

inline void stmatrix(void* row, const uint32_t (&r)[4]) { model::stmatrix(row, r); }
inline void store_shared(float* to, float x, float y) {
  float both[2] = {x, y};
  model::store_shared(to, both, sizeof both);
}
inline void named_barrier(int id, int threads) { model::named_barrier(id, threads); }
inline uint32_t cluster_rank() { return model::cluster_rank(); }
inline void cluster_sync() { model::cluster_sync(); }
template <int n>
void more_registers() {
  model::set_registers(n, true);
}
template <int n>
void fewer_registers() {
  model::set_registers(n, false);
}

}  // namespace mixprec::cuda::sm90
