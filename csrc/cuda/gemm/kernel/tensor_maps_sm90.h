// The tensors that one launch of the Hopper GEMM moves by TMA.
#pragma once

#include "cuda/gemm/kernel/ptx_sm90.cuh"

namespace mixprec::cuda::sm90 {

struct TensorMaps {
  TensorMap a, b;
  TensorMap out;      // if GemmArgs::tma_store
  TensorMap b_scale;  // [K / 128, N], if GemmArgs::b_scale_by_column
};

}  // namespace mixprec::cuda::sm90
