// Replaces csrc/cuda/gemm/kernel/ptx_sm90.cuh: the same functions, on the units of model.h.
#pragma once

#include <cuda_runtime.h>

#include "model.h"

namespace mixprec::cuda::sm90 {

namespace model = cuda_on_cpu::sm90;

using TensorMap = CUtensorMap;
using Barrier = uint64_t;

// Which mutation of the kernel is in force (mutations.py), 0: none.
inline int mutation = 0;

inline uint8_t* dynamic_shared() { return static_cast<uint8_t*>(cuda_on_cpu::dynamic_shared()); }
using model::shared_address;

using model::barrier_arrive;
using model::barrier_arrive_at;
using model::barrier_arrive_expect;
using model::barrier_init;
using model::barrier_init_fence;
template <bool cluster>
void barrier_wait(Barrier* b, uint32_t parity) {
  model::barrier_wait(b, parity, cluster);
}

using model::fence_async_proxy;
using model::prefetch_map;
using model::tma_add;
using model::tma_load;
using model::tma_load_multicast;
using model::tma_store;
using model::tma_store_commit;
template <int n>
void tma_store_wait_read() {
  model::tma_store_wait_read(n);
}

using model::wgmma_commit;
using model::wgmma_fence;
template <int n>
void wgmma_wait() {
  model::wgmma_wait(n);
}
template <int count>
void wgmma_wait_for(float (&)[count]) {
  model::wgmma_wait(0);
}

using model::cluster_rank;
using model::cluster_sync;
using model::named_barrier;
using model::stmatrix;
using model::store_shared;
template <int n>
void more_registers() {
  model::set_registers(n, true);
}
template <int n>
void fewer_registers() {
  model::set_registers(n, false);
}

}  // namespace mixprec::cuda::sm90
