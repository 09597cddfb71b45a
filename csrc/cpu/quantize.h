// quantize, for ops that cast what they compute: with a scale per row or block, the amax of a
// block, then its cast while it is in the cache; and from rows that a function computes in fp32, a
// band of them at a time.
#pragma once

#include <atomic>
#include <cmath>
#include <functional>
#include <string>

#include "arguments/casts.h"
#include "cpu/parallel.h"

namespace mixprec::cpu {

constexpr int64_t kBlock = kScaleBlock;

struct Blocks {
  int64_t rows, cols;  // per scale; rows 0: the whole tensor; cols 0: a whole row
};

inline Blocks blocks_of(const std::string& granularity) {
  if (granularity == "tensor") return {0, 0};
  if (granularity == "row") return {1, 0};
  if (granularity == "block1x128") return {1, kBlock};
  if (granularity == "block128x128") return {kBlock, kBlock};
  STD_TORCH_CHECK(false, "quantize: granularity must be tensor, row, block1x128 or block128x128");
}

inline Tensor scales_of(const Blocks& b, int64_t rows, int64_t cols,
                        ScalarType dtype = ScalarType::Float) {
  int64_t down = ceil_div(rows, b.rows), across = b.cols ? ceil_div(cols, b.cols) : 1;
  return empty({down, across}, dtype);
}

// The ops of quantize.cpp and quantize_mx.cpp that others call.
Tensor amax(Tensor x);
Quantized quantize(Tensor x, ScalarType dtype, MaybeTensor scale, bool transpose, Text granularity,
                   bool power_of_two_scale, MaybeTensor record);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_mx(
    Tensor x, Text fmt, Text mode, bool transpose, MaybeTensor seed, bool swizzled, bool with_amax);
Tensor dequantize_mx(Tensor data, Tensor scale_inv, MaybeTensor tensor_scale_inv, Text fmt,
                     int64_t columns, ScalarType type);

// x [rows, cols], row-major, in a block format; returns its amax as bits.
uint32_t mx_by_rows(Dtype dtype, const BlockCastRule& rule, const void* x, int64_t rows,
                    int64_t cols, const Tensor& q, const Tensor& scale_inv);

// Its transpose, at the element `first`, where a block begins, of rows of `ld` elements.
void mx_by_columns(Dtype dtype, const BlockCastRule& rule, const void* x, int64_t rows,
                   int64_t cols, uint8_t* q, uint8_t* scale_inv, int64_t ld, int64_t first);

struct CastMatrix {
  Tensor data;  // of x's shape
  MaybeTensor data_t, scale_inv, scale_inv_t;
  float amax;
};

// What quantize returns, of checked arguments. given: the scale, or 0.
CastMatrix cast_matrix(Tensor x, ScalarType type, float given, bool transpose, const Blocks& blocks,
                       bool power_of_two_scale);

struct BlockCast {
  Dtype from, to;
  const void* x;  // [rows, cols], row-major
  int64_t rows, cols;
  bool transpose, power_of_two;
  float given = 0.0f;   // the scale of the whole tensor; 0: that of its amax
  int64_t ld_t = rows;  // elements from a row of the transpose to the next
};

inline void raise_to(std::atomic<uint32_t>& largest, uint32_t value) {
  uint32_t seen = largest.load(std::memory_order_relaxed);
  while (value > seen && !largest.compare_exchange_weak(seen, value)) {
  }
}

// *record = max(*record, amax), where NaN stays: it keeps the step out of the history. Returns amax
// as a result, [0] where it is recorded.
inline Tensor recorded(const MaybeTensor& record, float amax) {
  if (!record.has_value()) return empty_scalar(amax);
  float& seen = *fp32_of(*record);
  seen = std::isnan(seen) || std::isnan(amax) ? seen + amax : std::max(seen, amax);
  return empty({0}, ScalarType::Float);
}

// q [rows, cols] with scale_inv, and, if cast.transpose, x^T quantized with scales of its own rows
// or blocks: q_t [cols, rows] with scale_inv_t; with the one scale of the whole, that is null.
// Returns the amax of x as bits.
uint32_t quantize_by_blocks(const BlockCast& cast, const Blocks& blocks, void* q, float* scale_inv,
                            void* q_t, float* scale_inv_t);

// out[i] = the values of rows [first, first + rows) of the i-th tensor. `again`: they have been
// computed before.
using Produce = std::function<void(int64_t first, int64_t rows, float* const* out, bool again)>;

// The casts of `count` tensors of x's shape, one or two; the second has a scale of its own amax,
// which is not recorded.
std::vector<Quantized> cast_rows(const char* op, const Tensor& x, const Cast& cast, int64_t count,
                                 const Produce& produce);

}  // namespace mixprec::cpu
