// The operands of a GEMM on the CPU, checked: matrices, packed into panels (pieces of `width` rows,
// with the elements of one k side by side, in the words that a kernel multiplies), and their
// scales: one per tensor, per row, or per block of 128, also along K.
#pragma once

#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

struct Matrix {  // element (i, k) is data[i * stride_i + k * stride_k]
  Dtype dtype;
  const void* data;
  int64_t rows, stride_i, stride_k;
};

using Pack = decltype(GemmKernel::pack_a);

// Packs rows [first, first + count) of x into panels of `width`. Returns whether an element was
// lost.
template <class Kernel>
bool pack_rows(const Kernel& kernel, Pack pack, int64_t width, const Matrix& x, int64_t first,
               int64_t count, int64_t k, uint32_t* out) {
  return pack(x.dtype, at(x.data, x.dtype, first * x.stride_i), x.stride_i, x.stride_k, count, k,
              out, kernel.words(k), width);
}

inline uint32_t* panels(Scratch& scratch, int64_t rows, int64_t width, int64_t words) {
  int64_t bytes = ceil_div(rows, width) * width * words * 4;
  return static_cast<uint32_t*>(scratch.get(std::max<int64_t>(bytes, 64)));
}

// From element `first` of K on.
inline Matrix along_k(const Matrix& x, int64_t first) {
  return {x.dtype, at(x.data, x.dtype, first * x.stride_k), x.rows, x.stride_i, x.stride_k};
}

// Element (i, j) is data[i * stride_i + j * stride_j]. Either stored, with stride_j = 1, or, in
// fp32, added to.
struct Result {
  Dtype dtype;
  char* data;
  int64_t stride_i, stride_j;
  bool adds;
  const float* bias;  // [n], or null

  void* element(int64_t row, int64_t col) const {
    return at(data, dtype, row * stride_i + col * stride_j);
  }
};

constexpr int64_t kChunk = 128;  // elements of K, and rows of a square block

// The scale of element (row, k) is data[row / rows_per * row_stride + k / 128 * chunk_stride];
// "row" is a row of a or a column of b. A stride is 0 if the scale does not vary in that direction.
struct Scales {
  const float* data = nullptr;  // null: 1
  int64_t rows_per = 1, row_stride = 0, chunk_stride = 0;
  bool by_chunk = false;  // it varies along K

  float at(int64_t row, int64_t chunk) const {
    return data == nullptr ? 1.0f : data[row / rows_per * row_stride + chunk * chunk_stride];
  }
};

// Of the scales t, with these dimensions of it along the operand's `rows` and along K.
inline Scales read_scales(const Tensor& t, int64_t rows_dim, int64_t k_dim, int64_t rows) {
  Scales s;
  s.by_chunk = t.size(k_dim) > 1;
  if (t.numel() == 0) return s;  // M, N or K is 0
  s.data = read_fp32(t);
  s.rows_per = t.size(rows_dim) == rows ? 1 : kChunk;
  if (t.size(rows_dim) > 1) s.row_stride = t.stride(rows_dim);
  if (s.by_chunk) s.chunk_stride = t.stride(k_dim);
  return s;
}

// The scales of an operand of `rows` x k. `row_dim` is the dimension of t along the rows: 0 for a
// [M, K], 1 for b [K, N].
inline Scales scales_of(const MaybeTensor& t, int64_t rows, int64_t k, int row_dim, const char* op,
                        const char* name) {
  if (!t.has_value()) return {};
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && on_cpu(*t), op, ": ", name,
                  " must be fp32 on the CPU");
  if (t->numel() == 1) return {read_fp32(*t)};
  STD_TORCH_CHECK(t->dim() == 2, op, ": ", name, " must hold one element or be 2-D");
  int64_t r = t->size(row_dim), c = t->size(1 - row_dim);
  STD_TORCH_CHECK(
      (r == rows || r == ceil_div(rows, kChunk)) && (c == 1 || c == ceil_div(k, kChunk)), op, ": ",
      name, " has a shape that fits no granularity");
  return read_scales(*t, row_dim, 1 - row_dim, rows);
}

inline void check_devices_and_dtypes(const Tensor& a, const Tensor& b, const char* op) {
  STD_TORCH_CHECK(on_cpu(a) && on_cpu(b), op, ": a and b must be on the CPU");
  Dtype x = dtype_of(a, op), y = dtype_of(b, op);
  STD_TORCH_CHECK((is_fp8(x) && is_fp8(y)) || (x == y && is_float(x)), op,
                  ": a and b must both be fp32, both fp16, both bf16, or fp8");
}

// acc, to which a product of the others is added, is [.., M, N] of this shape.
inline void check_accumulator(const Tensor& acc, Sizes shape, const Tensor& a, const Tensor& b,
                              const MaybeTensor& a_scale_inv, const MaybeTensor& b_scale_inv,
                              const char* op) {
  STD_TORCH_CHECK(has_shape(acc, shape) && acc.scalar_type() == ScalarType::Float && on_cpu(acc) &&
                      is_writable(acc),
                  op, ": acc must be ", shape.size() == 2 ? "[M, N]" : "[E, M, N]",
                  ", fp32, on the CPU, writable");
  Extent written = extent_of(acc);
  auto overlaps = [&](const Tensor& t) {
    Extent read = extent_of(t);
    return acc.numel() > 0 && t.numel() > 0 && written.begin < read.end && read.begin < written.end;
  };
  STD_TORCH_CHECK(!overlaps(a) && !overlaps(b) && !(a_scale_inv && overlaps(*a_scale_inv)) &&
                      !(b_scale_inv && overlaps(*b_scale_inv)),
                  op, ": acc must not overlap in memory with what it is made from");
}

// With these dimensions of t as rows and as K.
inline Matrix matrix_of(const Tensor& t, int64_t rows_dim, int64_t k_dim) {
  return {dtype_of(t, "gemm"), t.const_data_ptr(), t.size(rows_dim), t.stride(rows_dim),
          t.stride(k_dim)};
}

inline const GemmKernel& kernel_for(Dtype dtype) {
  return dtype == Dtype::f16 || dtype == Dtype::f32 ? loops().gemm_f32 : loops().gemm_bf16;
}

}  // namespace mixprec::cpu
