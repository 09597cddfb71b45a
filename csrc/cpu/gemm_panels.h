// Operands of a matrix product as panels: pieces of `width` rows, with the elements of one k side
// by side, in the words that a kernel multiplies; and where its result goes.
#pragma once

#include "cpu/parallel.h"
#include "cpu/scratch.h"
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

}  // namespace mixprec::cpu
