// One instance of the Hopper GEMM: its tile, its shared memory, and the tiles of C that a block
// computes.
#pragma once

#include "cuda/gemm/config/gemm_args.h"
#include "cuda/gemm/config/tile_configs.h"
#include "cuda/gemm/kernel/gemm_store_sm90.cuh"

namespace mixprec::cuda::sm90 {

// One instance of the kernel. `cluster` blocks, adjacent along M, each load a part of the same tile
// of b and multicast it to all of them.
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
  static constexpr int kParts = kRows / 64;                          // wgmmas per consumer, along M
  static constexpr int kABytes = block_m * 128, kBBytes = block_n * 128;
  static constexpr int kStageBytes = kABytes + kBBytes;
  // Scales of b's columns for one chunk, if each has its own.
  static constexpr int kBScaleBytes = accumulate == Accumulate::scaled ? block_n * 4 : 0;
  static_assert(sizeof(A) == sizeof(B) && kRows % 64 == 0);
  static_assert(accumulate == Accumulate::direct || sizeof(A) == 1);
  // Columns that share a scale then begin and end with tiles.
  static_assert(accumulate != Accumulate::scaled || block_n == 128);

  // The box of one TMA load, in elements: inner (contiguous) and outer dimension.
  static constexpr int kABox[2] = {a_major == Major::k ? kBlockK : 64,
                                   a_major == Major::k ? block_m : kBlockK};
  static constexpr int kBBox[2] = {b_major == Major::k ? kBlockK : 64,
                                   (b_major == Major::k ? block_n : kBlockK) / cluster};

  static constexpr int64_t shared_bytes(int stages) {
    return int64_t{stages} * (kStageBytes + kBScaleBytes + 2 * static_cast<int>(sizeof(Barrier))) +
           consumers * kStagingBytes;
  }
};

// The block's shared memory: tiles, staging of the output, scales, barriers.
template <class T>
struct Shared {
  uint8_t* base;
  int stages;

  __device__ uint8_t* a(int stage) const { return base + stage * T::kStageBytes; }
  __device__ uint8_t* b(int stage) const { return a(stage) + T::kABytes; }
  __device__ uint8_t* staging(int consumer) const {
    return base + stages * T::kStageBytes + consumer * kStagingBytes;
  }
  __device__ float* b_scale(int stage) const {
    return reinterpret_cast<float*>(staging(T::kConsumers) + stage * T::kBScaleBytes);
  }
  __device__ Barrier* full(int stage) const {
    return reinterpret_cast<Barrier*>(b_scale(stages)) + stage;
  }
  __device__ Barrier* empty(int stage) const { return full(stages) + stage; }
};

// A position in the ring; the parity changes with every round.
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

// One tile of C, and the chunks of K that are accumulated into it.
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

// Calls f(work) for all tiles of this block. The blocks of a cluster compute adjacent tiles at the
// same time.
template <class T, class F>
__device__ __forceinline__ void for_each_tile(const GemmArgs& args, int rank, const F& f) {
  int64_t tiles = tile_count(args.tiles);
  for (int64_t i = blockIdx.x / T::kCluster; i < tiles; i += gridDim.x / T::kCluster) {
    f(work_at<T>(args, i, rank));
  }
}

}  // namespace mixprec::cuda::sm90
