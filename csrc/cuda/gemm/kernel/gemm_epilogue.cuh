// The epilogue of an element of C, shared by the GEMM kernels and the kernel that reduces split-K.
#pragma once

#include "cuda/gemm/config/gemm_args.h"

namespace mixprec::cuda {

// Takes the factors as arguments, for callers that have loaded them for a whole row or column.
MIXPREC_HD float scaled(float sum, float a_scale, float b_scale) {
  return (sum * a_scale) * b_scale;
}

MIXPREC_HD float scaled(const Epilogue& e, float sum, int64_t row, int64_t col) {
  return scaled(sum, e.a_scale.at(row, 0), e.b_scale.at(col, 0));
}

MIXPREC_HD float with_bias(const Epilogue& e, float value, int64_t col) {
  if (e.bias == nullptr) return value;
  return with_float(e.bias_dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return value + decode(static_cast<const T*>(e.bias)[col]);
  });
}

// The value of C[row, col], or with `accumulate` the value that is added to it.
MIXPREC_HD float finished(const Epilogue& e, float sum, int64_t row, int64_t col) {
  return with_bias(e, scaled(e, sum, row, col), col);
}

}  // namespace mixprec::cuda
