// dequantize_mx on the GPU: a run of 16 elements a thread, which are in one block. The format is
// known at run time.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/quantize/source.cuh"
#include "cuda/quantize/tile.cuh"
#include "cuda/quantize_mx/quantize_mx.cuh"
#include "dispatch.h"
#include "math/mx.h"

namespace mixprec::cuda {

struct DequantizeMx {
  BlockFormat format;
  const uint8_t *data, *scale_inv;
  const float* tensor_scale_inv;  // null: 1
  int64_t rows, cols;
};

// The exponent and the fraction of a code as those of an FP32 number, times a power of two: exact,
// for subnormal numbers too, which cost a GPU nothing and a CPU (decode_element) much.
template <class E>
__device__ __forceinline__ float decode_narrow(E q) {
  using F = Element<E>;
  constexpr uint32_t sign_bit = 1u << (F::bits - 1);
  uint32_t magnitude = (q.bits & (sign_bit - 1)) << (23 - F::mantissa);
  uint32_t sign = (q.bits & sign_bit) << (32 - F::bits);
  return bits_float(magnitude | sign) * bits_float((254u - F::bias) << 23);
}

// code: one a byte, above which the first of two FP4 codes has the second one.
template <class E, int n>
__device__ __forceinline__ void decode_codes(const uint8_t (&code)[n], float (&x)[n]) {
  if constexpr (ptx::kConvertsFp4 && Element<E>::bits == 4) {
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      uint32_t pair = ptx::fp16x2_of_e2m1x2(code[j]);
      x[j] = ptx::widen({static_cast<uint16_t>(pair)});
      x[j + 1] = ptx::widen({static_cast<uint16_t>(pair >> 16)});
    }
  } else if constexpr (Element<E>::bits == 8) {
    E q[n];
#pragma unroll
    for (int j = 0; j < n; ++j) q[j].bits = code[j];
    decode_all(q, x);
  } else {
#pragma unroll
    for (int j = 0; j < n; ++j) x[j] = decode_narrow(E{code[j]});
  }
}

template <class O>
__global__ void __launch_bounds__(kThreads)
    dequantize_mx_kernel(const DequantizeMx a, O* __restrict__ out) {
  constexpr int n = 16;
  bool fp4 = is_fp4(a.format), nvfp4 = a.format == BlockFormat::nvfp4;
  int64_t bytes = block_bytes(a.format, a.cols), across = blocks_of(a.format, a.cols);
  bool loads = is_aligned(a.data) && bytes % (fp4 ? n / 2 : n) == 0;
  bool stores = is_aligned(out) && a.cols % kVector<O> == 0;
  int64_t runs = (a.cols + n - 1) / n, count = a.rows * runs;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    // 32 bits are enough for most tensors
    int64_t row =
        count >> 32 == 0 ? static_cast<uint32_t>(i) / static_cast<uint32_t>(runs) : i / runs;
    int64_t start = (i - row * runs) * n, left = a.cols - start;
    int kept = left >= n ? n : static_cast<int>(left);
    uint8_t code[n];
    if (fp4) {
      uint8_t pairs[n / 2];
      load_run(a.data + row * bytes + start / 2, pairs, (kept + 1) / 2, loads);
#pragma unroll
      for (int j = 0; j < n; ++j) code[j] = static_cast<uint8_t>(pairs[j / 2] >> (j % 2 * 4));
    } else {
      load_run(a.data + row * bytes + start, code, kept, loads);
    }
    uint8_t stored = a.scale_inv[row * across + (start >> log_block(a.format))];
    float scale = nvfp4 ? decode(E4m3{stored}) : e8m0_value(stored);
    if (a.tensor_scale_inv != nullptr) scale *= *a.tensor_scale_inv;
    float x[n];
    with_element(a.format, [&]<class E>(E) { decode_codes<E>(code, x); });
#pragma unroll
    for (float& value : x) value = value * scale;
    O values[n];
    round_all(x, values);
    store_run(out + row * a.cols + start, values, left, stores);
  }
}

inline cudaError_t dequantize_mx(Dtype out_dtype, const DequantizeMx& a, void* out,
                                 const Gpu& gpu) {
  if (a.rows * a.cols == 0) return cudaSuccess;
  return with_float(out_dtype, [&]<class O>(Type<O>) {
    auto* kernel = dequantize_mx_kernel<O>;
    int64_t blocks = grid_for(kernel, a.rows * ((a.cols + 15) / 16) / kThreads, gpu);
    return launch(kernel, {blocks}, gpu.stream, a, static_cast<O*>(out));
  });
}

}  // namespace mixprec::cuda
