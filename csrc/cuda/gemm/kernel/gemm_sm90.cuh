// C = A @ B on Hopper: TMA fills a ring of tiles in shared memory, wgmma multiplies them with FP32
// accumulators. Warpgroup 0 of a block loads, the others compute; blocks stay and walk over tiles.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/gemm/config/gemm_args.h"
#include "cuda/gemm/config/tile_configs.h"
#include "cuda/gemm/kernel/gemm_store_sm90.cuh"
#include "cuda/gemm/kernel/wgmma_sm90.cuh"

namespace mixprec::cuda::sm90 {

// One instance of the kernel. `cluster` blocks, below each other in C, each load a part of the
// same tile of b and send it to all.
template <class A_, class B_, Major a_major, Major b_major, int block_m, int block_n, int consumers,
          int cluster, Accumulate accumulate>
struct Tile {
  using A = A_;
  using B = B_;
  static constexpr Major kAMajor = a_major, kBMajor = b_major;
  static constexpr int kBlockM = block_m, kBlockN = block_n, kConsumers = consumers;
  static constexpr int kCluster = cluster;
  static constexpr Accumulate kAccumulate = accumulate;

  static constexpr int kThreads = 128 * (1 + consumers);
  static constexpr int kBlockK = 128 / static_cast<int>(sizeof(A));  // one swizzled row
  static constexpr int kStepK = kBlockK / 4;                         // of one wgmma
  static constexpr int kRows = block_m / consumers;                  // of a consumer
  static constexpr int kParts = kRows / 64;                          // wgmmas above each other
  static constexpr int kABytes = block_m * 128, kBBytes = block_n * 128;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static_assert(sizeof(A) == sizeof(B) && kRows % 64 == 0);
  static_assert(accumulate == Accumulate::direct || sizeof(A) == 1);

  // What one TMA load brings, in elements: inner (contiguous) and outer dimension.
  static constexpr int kABox[2] = {a_major == Major::k ? kBlockK : 64,
                                   a_major == Major::k ? block_m : kBlockK};
  static constexpr int kBBox[2] = {b_major == Major::k ? kBlockK : 64,
                                   b_major == Major::k ? block_n / cluster : kBlockK};

  static constexpr int64_t shared_bytes(int stages) {
    return int64_t{stages} * (kStageBytes + 2 * static_cast<int>(sizeof(Barrier))) +
           consumers * kStagingBytes;
  }
};

// The block's shared memory: tiles, staging of the output, barriers.
template <class T>
struct Shared {
  uint8_t* base;
  int stages;

  __device__ uint8_t* a(int stage) const { return base + stage * T::kStageBytes; }
  __device__ uint8_t* b(int stage) const { return a(stage) + T::kABytes; }
  __device__ uint8_t* staging(int consumer) const {
    return base + stages * T::kStageBytes + consumer * kStagingBytes;
  }
  __device__ Barrier* full(int stage) const {
    return reinterpret_cast<Barrier*>(staging(T::kConsumers)) + stage;
  }
  __device__ Barrier* empty(int stage) const { return full(stages) + stage; }
};

// Where a walk over the ring stands: the parity changes with every round.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One tile of C, and the chunks of K that are summed into it.
struct Work {
  int m, n, split, first, last;
};

template <class T>
__device__ __forceinline__ Work work_at(const GemmArgs& args, int64_t index, int rank) {
  GemmTile at = tile_at(args.tiles, index);
  int chunks = (args.k + T::kBlockK - 1) / T::kBlockK;
  int first = at.split * args.chunks_per_split, last = first + args.chunks_per_split;
  return {(at.m * T::kCluster + rank) * T::kBlockM, at.n * T::kBlockN, at.split, first,
          last < chunks ? last : chunks};
}

// f(work) for all tiles of this block. Blocks of one cluster take the same turns.
template <class T, class F>
__device__ __forceinline__ void for_each_tile(const GemmArgs& args, int rank, const F& f) {
  int64_t tiles = tile_count(args.tiles);
  for (int64_t i = blockIdx.x / T::kCluster; i < tiles; i += gridDim.x / T::kCluster) {
    f(work_at<T>(args, i, rank));
  }
}

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

// One thread: keeps the ring full.
template <class T>
__device__ __forceinline__ void produce(const Shared<T>& shared, const TensorMap* a_map,
                                        const TensorMap* b_map, const GemmArgs& args, int rank) {
  RingPosition ring;
  for_each_tile<T>(args, rank, [&](const Work& work) {
    for (int chunk = work.first; chunk < work.last; ++chunk) {
      Barrier* full = shared.full(ring.stage);
      barrier_wait<(T::kCluster > 1)>(shared.empty(ring.stage), ring.parity ^ 1);
      barrier_arrive_expect(full, T::kStageBytes);
      int k = chunk * T::kBlockK;
      load_boxes<T::kBlockM, T::kAMajor, T::kBlockK>(
          shared.a(ring.stage), work.m, k,
          [&](void* to, int x, int y) { tma_load(to, a_map, full, x, y); });
      constexpr int share =
          T::kBlockN / T::kCluster;  // rows of 128 bytes if K-major, as wide if not
      load_boxes<share, T::kBMajor, T::kBlockK>(
          shared.b(ring.stage) + rank * (T::kBBytes / T::kCluster), work.n + rank * share, k,
          [&](void* to, int x, int y) {
            if constexpr (T::kCluster > 1) {
              tma_load_multicast(to, b_map, full, x, y, (1 << T::kCluster) - 1);
            } else {
              tma_load(to, b_map, full, x, y);
            }
          });
      ring.advance(args.stages);
    }
  });
}

// acc (+)= rows [row, row + 64) of a tile of a, times the tile of b. Asynchronous.
template <class T>
__device__ __forceinline__ void multiply(float (&acc)[T::kBlockN / 2], const uint8_t* a,
                                         const uint8_t* b, int row, bool accumulate) {
  constexpr int chunk_bytes = T::kBlockK * 128;  // MN-major: 128 bytes of M or N, all k
  constexpr int a_step = T::kAMajor == Major::k ? 32 : T::kStepK * 128;
  constexpr int b_step = T::kBMajor == Major::k ? 32 : T::kStepK * 128;
  uint32_t a_at = shared_address(a) + (T::kAMajor == Major::k ? row * 128 : row / 64 * chunk_bytes);
  uint32_t b_at = shared_address(b);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    Wgmma<typename T::A, typename T::B, T::kBlockN, T::kAMajor, T::kBMajor>::run(
        acc, matrix_descriptor(a_at + step * a_step, chunk_bytes, 1024),
        matrix_descriptor(b_at + step * b_step, chunk_bytes, 1024), accumulate || step > 0);
  }
}

// This warp reads the stage no more. Every warp says so: a warp may wait only for its own wgmmas.
template <class T>
__device__ __forceinline__ void release(const Shared<T>& shared, int stage) {
  uint32_t lane = threadIdx.x % 32;
  if constexpr (T::kCluster > 1) {
    if (lane < T::kCluster) barrier_arrive_at(shared.empty(stage), lane);
  } else {
    if (lane == 0) barrier_arrive(shared.empty(stage));
  }
}

// acc += partial * scale, element by element; the scales of a chunk of K.
template <class T>
__device__ __forceinline__ void promote(float (&acc)[T::kBlockN / 2],
                                        const float (&partial)[T::kBlockN / 2],
                                        const GemmArgs& args, int row, int col, int chunk) {
  if constexpr (T::kAccumulate == Accumulate::promoted) {
#pragma unroll
    for (int i = 0; i < T::kBlockN / 2; ++i) acc[i] += partial[i];
  } else {
    // Rows and columns outside C are zeros: any scale within the tensor will do.
    auto a_scale = [&](int r) { return args.a_chunk.at(r < args.m ? r : args.m - 1, chunk); };
    auto b_scale = [&](int c) { return args.b_chunk.at(c < args.n ? c : args.n - 1, chunk); };
    float upper = a_scale(row), lower = a_scale(row + 8);
    // Columns share a scale where 128 of them do: a tile starts at a multiple of its width.
    // Not known to be the same in every chunk: or the addresses of all scales stay in registers.
    asm volatile("" : "+r"(col));
    bool one = T::kBlockN <= 128 && (args.b_chunk.row_shift == 7 || args.b_chunk.row_stride == 0);
    float all = one ? b_scale(col) : 0.0f;
#pragma unroll
    for (int j = 0; j < T::kBlockN / 8; ++j) {
      float left = one ? all : b_scale(col + 8 * j), right = one ? all : b_scale(col + 8 * j + 1);
      acc[4 * j] += partial[4 * j] * (upper * left);
      acc[4 * j + 1] += partial[4 * j + 1] * (upper * right);
      acc[4 * j + 2] += partial[4 * j + 2] * (lower * left);
      acc[4 * j + 3] += partial[4 * j + 3] * (lower * right);
      // All scales loaded at once, as the compiler would, do not fit into registers.
      if (j % 4 == 3) asm volatile("" ::: "memory");
    }
  }
}

// The sums of one tile, for the rows of consumer `consumer`.
template <class T>
__device__ __forceinline__ void accumulate(float (&acc)[T::kParts][T::kBlockN / 2],
                                           const Shared<T>& shared, RingPosition& ring,
                                           const GemmArgs& args, const Work& work, int consumer) {
  constexpr bool remote = T::kCluster > 1;
  int row = consumer * T::kRows;
  if constexpr (T::kAccumulate == Accumulate::direct) {
    int previous = 0;
    for (int chunk = work.first; chunk < work.last; ++chunk) {
      barrier_wait<remote>(shared.full(ring.stage), ring.parity);
      wgmma_fence();
#pragma unroll
      for (int part = 0; part < T::kParts; ++part) {
        multiply<T>(acc[part], shared.a(ring.stage), shared.b(ring.stage), row + 64 * part,
                    chunk > work.first);
      }
      wgmma_commit();
      if (chunk > work.first) {
        wgmma_wait<1>();  // one chunk computes while the next one is issued
        release(shared, previous);
      }
      previous = ring.stage;
      ring.advance(args.stages);
    }
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) wgmma_wait_for(acc[part]);
    release(shared, previous);
  } else {
    int thread_row = work.m + row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    int thread_col = work.n + threadIdx.x % 4 * 2;
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
#pragma unroll
      for (float& sum : acc[part]) sum = 0.0f;
    }
    for (int chunk = work.first; chunk < work.last; ++chunk) {
      barrier_wait<remote>(shared.full(ring.stage), ring.parity);
#pragma unroll
      for (int part = 0; part < T::kParts; ++part) {
        float partial[T::kBlockN / 2];
        wgmma_fence();
        multiply<T>(partial, shared.a(ring.stage), shared.b(ring.stage), row + 64 * part, false);
        wgmma_commit();
        wgmma_wait_for(partial);
        if (part + 1 == T::kParts) release(shared, ring.stage);
        promote<T>(acc[part], partial, args, thread_row + 64 * part, thread_col, chunk);
      }
      ring.advance(args.stages);
    }
  }
}

template <class T>
__device__ __forceinline__ void consume(const Shared<T>& shared, const TensorMap* out_map,
                                        const GemmArgs& args, int rank, int consumer) {
  RingPosition ring;
  for_each_tile<T>(args, rank, [&](const Work& work) {
    float acc[T::kParts][T::kBlockN / 2];
    accumulate<T>(acc, shared, ring, args, work, consumer);
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      int row = work.m + consumer * T::kRows + 64 * part;
      store_tile<T::kBlockN>(acc[part], shared.staging(consumer), out_map, args, row, work.n,
                             work.split, consumer);
    }
  });
  if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // shared memory goes with the block
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    gemm_kernel(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                const __grid_constant__ TensorMap out_map, const __grid_constant__ GemmArgs args) {
  constexpr bool balance = T::kConsumers == 2;  // registers that loading does not need
  Shared<T> shared = {dynamic_shared(), args.stages};
  int rank = T::kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  if (threadIdx.x == 0) {
    prefetch_map(&a_map);
    prefetch_map(&b_map);
    if (args.tma_store) prefetch_map(&out_map);
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

  int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    if constexpr (balance) fewer_registers<40>();
    if (threadIdx.x == 0) produce<T>(shared, &a_map, &b_map, args, rank);
    __syncwarp();
  } else {
    if constexpr (balance) more_registers<232>();
    consume<T>(shared, &out_map, args, rank, warpgroup - 1);
  }
  // A block must not end while another one still sends to it.
  if constexpr (T::kCluster > 1) cluster_sync();
}

// grid: a multiple of the cluster, at most one block per tile.
template <class T>
cudaError_t run(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& out_map,
                const GemmArgs& args, int64_t grid, cudaStream_t stream) {
  return launch_cluster(gemm_kernel<T>, grid, T::kThreads, T::shared_bytes(args.stages),
                        T::kCluster, stream, a_map, b_map, out_map, args);
}

}  // namespace mixprec::cuda::sm90
