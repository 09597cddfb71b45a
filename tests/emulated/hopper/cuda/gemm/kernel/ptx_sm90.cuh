// Replaces csrc/cuda/gemm/kernel/ptx_sm90.cuh: the same functions, on the units of model.h.
#pragma once

#include <cuda_runtime.h>

#include "model.h"

namespace mixprec::cuda::sm90 {

namespace model = cuda_on_cpu::sm90;
using namespace model;  // as it is, but for what has template arguments

using TensorMap = CUtensorMap;
using Barrier = uint64_t;

inline uint8_t* dynamic_shared() { return static_cast<uint8_t*>(cuda_on_cpu::dynamic_shared()); }

template <int n>
void tma_store_wait_read() {
  model::tma_store_wait_read(n);
}

template <int n>
void wgmma_wait() {
  model::wgmma_wait(n);
}
template <int count>
void wgmma_wait_for(float (&)[count]) {
  model::wgmma_wait(0);
}

template <int n>
void more_registers() {
  model::set_registers(n, true);
}
template <int n>
void fewer_registers() {
  model::set_registers(n, false);
}

}  // namespace mixprec::cuda::sm90
