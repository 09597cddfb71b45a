// The kernels of gemm_instances.h, made from the rows of gemm_rows.h: the planner's table and the
// kernels cannot disagree.
#pragma once

#include <utility>

#include "cuda/gemm/instances/gemm_instances.h"
#include "cuda/gemm/kernel/gemm_sm90.cuh"

namespace mixprec::cuda::sm90 {

template <class A, class B, Major a_major, Major b_major, int row>
constexpr Instance instance_of() {
  constexpr GemmRow r = kGemmRows[row];
  using T =
      Tile<A, B, a_major, b_major, r.block_m, r.block_n, r.consumers, r.cluster, r.accumulate>;
  static_assert(T::kBlockK == chunk_elements(r));
  static_assert(T::shared_bytes(2) == shared_bytes(r, 2));
  static_assert(T::shared_bytes(3) == shared_bytes(r, 3));
  return {run<T>, {T::kABox[0], T::kABox[1]}, {T::kBBox[0], T::kBBox[1]}};
}

template <class A, class B, Major a_major, Major b_major, Accumulate accumulate>
Instance instance(int row) {
  Instance found = {};
  auto look = [&]<int i>(std::integral_constant<int, i>) {
    constexpr GemmRow r = kGemmRows[i];
    if constexpr (r.fp8 == (sizeof(A) == 1) && r.accumulate == accumulate) {
      if (i == row) found = instance_of<A, B, a_major, b_major, i>();
    }
  };
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (look(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, kGemmRowCount>{});
  return found;
}

}  // namespace mixprec::cuda::sm90
