// Products of checked groups, for gemm_grouped and for the passes of a layer.
#pragma once

#include "cpu/gemm_operands.h"

namespace mixprec::cpu {

struct Group {
  int64_t index, begin, size;  // size: along S
};

// Those whose ends are offs [E], along S elements.
std::vector<Group> groups_of(const Tensor& offs, int64_t s, const char* op);

// An operand of the products a @ b^T of all groups: a matrix [rows, K], or of b one for each group,
// [E, rows, K]; or transposed, [.., K, rows]. Groups are along the rows of a beside such a b, else
// along K. Scales: those of gemm_grouped, or [E, 1, 1], one for each group.
struct GroupedSide {
  const Tensor& data;
  const MaybeTensor& scale_inv;
  bool transposed;

  int64_t rows_dim() const { return data.dim() - (transposed ? 1 : 2); }
  int64_t k_dim() const { return data.dim() - (transposed ? 2 : 1); }
};

// [S, N], 0 beyond the last group, or [E, M, N].
Tensor grouped_product(const GroupedSide& a, const GroupedSide& b, const std::vector<Group>& groups,
                       ScalarType out_type, const char* op);

// acc [E, M, N], fp32, += the products along K.
void add_grouped_product(const Tensor& acc, const GroupedSide& a, const GroupedSide& b,
                         const std::vector<Group>& groups, const char* op);

}  // namespace mixprec::cpu
