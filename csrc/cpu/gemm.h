// Products of checked operands, for gemm and for the passes of a layer.
#pragma once

#include "cpu/gemm_operands.h"
#include "cpu/products.h"

namespace mixprec::cpu {

struct Side {  // an operand of a @ b^T: its rows are those of the result, or its columns
  Matrix matrix;
  Scales scales;
};

// a @ b^T + bias [N], over k elements, of this contiguous shape [..., N] and type: fp32, bf16 or
// fp16.
Tensor product(const Side& a, const Side& b, int64_t k, Sizes shape, ScalarType out_type,
               const MaybeTensor& bias, const char* op);

// a [M, K] @ b [K, N] + bias by torch; none where this product is ours.
MaybeTensor torchs_product(const Tensor& a, const Tensor& b, const MaybeTensor& bias,
                           ScalarType out_type);

// acc [M, N], fp32 and checked, += a @ b^T
void add_product(const Tensor& acc, const Side& a, const Side& b, int64_t k);

}  // namespace mixprec::cpu
