// Operands of a matrix product as panels: pieces of `width` rows, with the elements of one k side
// by side, in the words that a kernel multiplies.
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

constexpr int64_t kPackedTogether = 64;  // of K, where neighbouring panels are packed together

// Packs rows [first, first + count) of x into panels of `width`. Returns whether an element was
// lost.
template <class Kernel>
bool pack_rows(const Kernel& kernel, decltype(GemmKernel::pack_a) pack, int64_t width,
               const Matrix& x, int64_t first, int64_t count, int64_t k, uint32_t* out) {
  // Where panels are narrow pieces of the same rows of memory, they are packed while these are in
  // the cache.
  int64_t together = x.stride_i == 1 ? kPackedTogether : std::max<int64_t>(1, k);
  bool lost = false;
  for (int64_t done = 0; done < k; done += together) {
    for (int64_t row = 0; row < count; row += width) {
      int64_t element = (first + row) * x.stride_i + done * x.stride_k;
      lost |= pack(x.dtype, at(x.data, x.dtype, element), x.stride_i, x.stride_k,
                   std::min(width, count - row), std::min(together, k - done),
                   out + row * kernel.words(k) + kernel.words(done) * width);
    }
  }
  return lost;
}

inline uint32_t* panels(Scratch& scratch, int64_t rows, int64_t width, int64_t words) {
  int64_t bytes = ceil_div(rows, width) * width * words * 4;
  return static_cast<uint32_t*>(scratch.get(std::max<int64_t>(bytes, 64)));
}

// From element `first` of K on.
inline Matrix along_k(const Matrix& x, int64_t first) {
  return {x.dtype, at(x.data, x.dtype, first * x.stride_k), x.rows, x.stride_i, x.stride_k};
}

}  // namespace mixprec::cpu
