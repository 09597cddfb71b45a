// quantize, and quantize_mx to FP8, with another source: rows that a function computes in fp32, a
// band of them at a time, cast while they are in the cache.
#pragma once

#include <functional>

#include "cpu/quantize_blocks.h"

namespace mixprec::cpu {

// out[i] = the values of rows [first, first + rows) of the i-th tensor. `again`: they have been
// computed before.
using Produce = std::function<void(int64_t first, int64_t rows, float* const* out, bool again)>;

// The casts of `count` tensors of x's shape, one or two; the second has a scale of its own amax.
std::vector<Quantized> cast_rows(const char* op, const Tensor& x, const Cast& cast, int64_t count,
                                 const Produce& produce);

// f(first row, rows) for bands of at most `height` rows on all threads.
template <class F>
void for_rows(int64_t rows, int64_t height, const F& f) {
  torch::stable::parallel_for(0, (rows + height - 1) / height, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) f(i * height, std::min(height, rows - i * height));
  });
}

}  // namespace mixprec::cpu
