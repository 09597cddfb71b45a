// Host side of TMA: the description of a 2-D tensor and of its boxes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "dispatch.h"

namespace mixprec::cuda::sm90 {

struct MapArgs {
  Dtype dtype;
  const void* data;      // 16-byte aligned
  int64_t inner, outer;  // elements; `inner` is the contiguous dimension
  int64_t pitch;         // bytes from one `inner` line to the next, a multiple of 16
  int box_inner, box_outer;
  bool swizzle;  // 128-byte swizzle in shared memory; then box_inner fills 128 bytes
};

// The driver's encoder, found through the runtime, so that libcuda need not be linked.
inline auto tensor_map_encoder() -> decltype(&cuTensorMapEncodeTiled) {
  static void* const entry = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                         cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
}

// Returns false if the driver refuses the sizes, strides or alignment.
inline bool encode_map(const MapArgs& a, CUtensorMap* map) {
  auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  CUtensorMapDataType type = a.dtype == Dtype::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                             : a.dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                             : a.dtype == Dtype::f16  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  cuuint64_t sizes[2] = {static_cast<cuuint64_t>(a.inner), static_cast<cuuint64_t>(a.outer)};
  cuuint64_t pitch[1] = {static_cast<cuuint64_t>(a.pitch)};
  cuuint32_t box[2] = {static_cast<cuuint32_t>(a.box_inner), static_cast<cuuint32_t>(a.box_outer)};
  cuuint32_t steps[2] = {1, 1};
  return encode(map, type, 2, const_cast<void*>(a.data), sizes, pitch, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                a.swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace mixprec::cuda::sm90
