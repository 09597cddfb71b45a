// How the launcher finds the kernel of a tile config, and what it is given; the kernels are
// compiled in files of their own (gemm_sm90_*.cu).
#pragma once

#include "cuda/gemm/config/gemm_args.h"
#include "cuda/gemm/config/tile_configs.h"
#include "cuda/gemm/kernel/ptx_sm90.cuh"

namespace mixprec::cuda::sm90 {

struct TensorMaps {
  TensorMap a, b;
  TensorMap out;      // if GemmArgs::tma_store
  TensorMap b_scale;  // [K / 128, N], if GemmArgs::b_scale_by_column
};

struct Instance {
  // Null: there is no such kernel, because the tile config is not for these operands.
  cudaError_t (*run)(const TensorMaps& maps, const GemmArgs& args, int64_t grid,
                     cudaStream_t stream);
  int a_box[2], b_box[2];  // of the maps: inner and outer dimension, in elements
  int b_scale_box;         // inner; the outer one is 1
};

// ways: those in which tile configs accumulate.
template <class A, class B, Major a_major, Major b_major, Accumulate... ways>
Instance instance(int tile_config);

}  // namespace mixprec::cuda::sm90
