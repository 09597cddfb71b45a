// Replaces csrc/cuda/gemm/kernel/tensor_map_sm90.h: the same description, and what the driver
// refuses (CUDA driver API, cuTensorMapEncodeTiled: alignment of globalAddress and globalStrides,
// boxDim, the limit of the inner dimension with a swizzle).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "dispatch.h"

namespace mixprec::cuda::sm90 {

struct MapArgs {
  Dtype dtype;
  const void* data;
  int64_t inner, outer;
  int64_t pitch;
  int box_inner, box_outer;
  bool swizzle;
};

inline bool encode_map(const MapArgs& a, CUtensorMap* map) {
  constexpr int64_t most = int64_t{1} << 32;
  int size = static_cast<int>(element_size(a.dtype));
  int64_t box_bytes = int64_t{a.box_inner} * size;
  if (reinterpret_cast<uintptr_t>(a.data) % 16 != 0 || reinterpret_cast<uintptr_t>(map) % 64 != 0 ||
      a.pitch % 16 != 0 || a.pitch < 0 || a.pitch >= int64_t{1} << 40 || a.inner < 1 ||
      a.inner > most || a.outer < 1 || a.outer > most || a.box_inner < 1 || a.box_inner > 256 ||
      a.box_outer < 1 || a.box_outer > 256 || box_bytes % 16 != 0 ||
      (a.swizzle && box_bytes > 128)) {
    return false;
  }
  *map = CUtensorMap(const_cast<uint8_t*>(static_cast<const uint8_t*>(a.data)), a.inner, a.outer,
                     a.pitch, size, a.box_inner, a.box_outer, a.dtype == Dtype::f32, a.swizzle,
                     CUtensorMap::kEncoded);
  return true;
}

}  // namespace mixprec::cuda::sm90
