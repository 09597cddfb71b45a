// The kernels of gemm_instances.h, instantiated from the table in tile_configs.h, so that the
// planner and the kernels cannot disagree.
#pragma once

#include <utility>

#include "cuda/gemm/instances/gemm_instances.h"
#include "cuda/gemm/kernel/gemm_sm90.cuh"

namespace mixprec::cuda::sm90 {

template <class A, class B, Major a_major, Major b_major, int tile_config>
constexpr Instance instance_of() {
  constexpr TileConfig t = kTileConfigs[tile_config];
  using T =
      Tile<A, B, a_major, b_major, t.block_m, t.block_n, t.consumers, t.cluster, t.accumulate>;
  static_assert(T::kBlockK == chunk_elements(t));
  static_assert(T::shared_bytes(2) == shared_bytes(t, 2));
  static_assert(T::shared_bytes(3) == shared_bytes(t, 3));
  return {run<T>, {T::kABox[0], T::kABox[1]}, {T::kBBox[0], T::kBBox[1]}, T::kBlockN};
}

template <class A, class B, Major a_major, Major b_major, Accumulate accumulate>
Instance instance(int tile_config) {
  Instance found = {};
  auto look = [&]<int i>(std::integral_constant<int, i>) {
    constexpr TileConfig t = kTileConfigs[i];
    if constexpr (t.fp8 == (sizeof(A) == 1) && t.accumulate == accumulate) {
      if (i == tile_config) found = instance_of<A, B, a_major, b_major, i>();
    }
  };
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (look(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, kTileConfigCount>{});
  return found;
}

}  // namespace mixprec::cuda::sm90
