// C = A @ B on Hopper: TMA fills a ring of tiles in shared memory, wgmma multiplies them with FP32
// accumulators. Warpgroup 0 of a block loads, the others compute; blocks are persistent and iterate
// over tiles.
#pragma once

#include <utility>

#include "cuda/common/launch.h"
#include "cuda/gemm/instances/gemm_instances.h"
#include "cuda/gemm/kernel/gemm_accumulate_sm90.cuh"

namespace mixprec::cuda::sm90 {

// Rows [row, row + rows) of an operand (columns, of b) and the chunk of K at k -> `to`.
template <int rows, Major major, int block_k, class Load>
__device__ __forceinline__ void load_boxes(uint8_t* to, int row, int k, const Load& load) {
  if constexpr (major == Major::k) {
    load(to, k, row);
  } else {
#pragma unroll
    for (int r = 0; r < rows; r += 64) load(to + r / 64 * (block_k * 128), row + r, k);
  }
}

// Called by one thread: keeps the ring full.
template <class T>
__device__ __forceinline__ void produce(const Shared<T>& shared, const TensorMaps& maps,
                                        const GemmArgs& args, int rank) {
  RingPosition ring;
  bool scales = T::kAccumulate == Accumulate::scaled && args.b_scale_by_column;
  uint32_t bytes = T::kStageBytes + (scales ? T::kBScaleBytes : 0);
  for_each_tile<T>(args, rank, [&](const Work& work) {
    for (int chunk = work.first; chunk < work.last; ++chunk) {
      Barrier* full = shared.full(ring.stage);
      barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
      barrier_arrive_expect(full, bytes);
      int k = chunk * T::kBlockK;
      load_boxes<T::kBlockM, T::kAMajor, T::kBlockK>(
          shared.a(ring.stage), work.m, k,
          [&](void* to, int x, int y) { tma_load(to, &maps.a, full, x, y); });
      // The blocks of a cluster each load a part of b: of its columns if b is K-major, else of K,
      // because a box has 64 columns.
      auto load_b = [&](void* to, int x, int y) {
        if constexpr (T::kCluster > 1) {
          tma_load_multicast(to, &maps.b, full, x, y, (1 << T::kCluster) - 1);
        } else {
          tma_load(to, &maps.b, full, x, y);
        }
      };
      if constexpr (T::kBMajor == Major::k) {
        constexpr int share = T::kBlockN / T::kCluster;
        load_boxes<share, T::kBMajor, T::kBlockK>(shared.b(ring.stage) + rank * share * 128,
                                                  work.n + rank * share, k, load_b);
      } else {
        constexpr int share = T::kBlockK / T::kCluster;
        load_boxes<T::kBlockN, T::kBMajor, T::kBlockK>(shared.b(ring.stage) + rank * share * 128,
                                                       work.n, k + rank * share, load_b);
      }
      // Each block loads its own: threads read them, and only within a block does an arrival order
      // that before the next load.
      if (scales) tma_load(shared.b_scale(ring.stage), &maps.b_scale, full, work.n, chunk);
      ring.advance(args.stages);
    }
  });
}

template <class T>
__device__ __forceinline__ void consume(const Shared<T>& shared, const TensorMap* out_map,
                                        const GemmArgs& args, int rank, int consumer) {
  RingPosition ring;
  for_each_tile<T>(args, rank, [&](const Work& work) {
    float acc[T::kParts][T::kBlockN / 2];
    if constexpr (T::kAccumulate == Accumulate::direct) {
      accumulate_directly<T>(acc, shared, ring, args, work, consumer * T::kRows);
    } else {
      if (T::kAccumulate == Accumulate::scaled && args.b_scale_by_column) {
        accumulate_by_chunk<T, true>(acc, shared, ring, args, work, consumer * T::kRows);
      } else {
        accumulate_by_chunk<T, false>(acc, shared, ring, args, work, consumer * T::kRows);
      }
    }
    __syncwarp();  // one lane has released the last stage
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      int row = work.m + consumer * T::kRows + 64 * part;
      store_tile<T::kBlockN>(acc[part], shared.staging(consumer), out_map, args, row, work.n,
                             work.split, consumer);
    }
  });
  if (is_leader()) tma_store_wait_read<0>();  // shared memory is freed with the block
  __syncwarp();
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    gemm_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ GemmArgs args) {
  constexpr bool balance = T::kConsumers == 2;  // moves registers from the loader to the consumers
  Shared<T> shared = {dynamic_shared(), args.stages};
  int rank = T::kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  if (threadIdx.x == 0) {
    prefetch_map(&maps.a);
    prefetch_map(&maps.b);
    if (args.tma_store) prefetch_map(&maps.out);
    if (args.b_scale_by_column) prefetch_map(&maps.b_scale);
    for (int stage = 0; stage < args.stages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), 4 * T::kConsumers * T::kCluster);
    }
    barrier_init_fence();
  }
  if constexpr (T::kCluster > 1) {
    __syncwarp();
    cluster_sync();
  } else {
    __syncthreads();
  }

  int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
  if (warp < 4) {
    if constexpr (balance) fewer_registers<40>();
    if (warp == 0 && elect_one()) produce<T>(shared, maps, args, rank);
    __syncwarp();
  } else {
    if constexpr (balance) more_registers<232>();
    consume<T>(shared, &maps.out, args, rank, warp / 4 - 1);
  }
  // A block must not exit while another one still writes to its shared memory.
  if constexpr (T::kCluster > 1) cluster_sync();
}

// grid: a multiple of the cluster, at most one block per tile.
template <class T>
cudaError_t run(const TensorMaps& maps, const GemmArgs& args, int64_t grid, cudaStream_t stream) {
  return launch(gemm_kernel<T>, {grid, T::kThreads, T::shared_bytes(args.stages), T::kCluster},
                stream, maps, args);
}

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

// Of the table in tile_configs.h, so that the planner and the kernels cannot disagree.
template <class A, class B, Major a_major, Major b_major, Accumulate... ways>
Instance instance(int tile_config) {
  Instance found = {};
  auto look = [&]<int i>(std::integral_constant<int, i>) {
    constexpr TileConfig t = kTileConfigs[i];
    if constexpr (t.fp8 == (sizeof(A) == 1) && ((t.accumulate == ways) || ...)) {
      if (i == tile_config) found = instance_of<A, B, a_major, b_major, i>();
    }
  };
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (look(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, kTileConfigCount>{});
  return found;
}

}  // namespace mixprec::cuda::sm90
