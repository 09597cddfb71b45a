// The sums of a tile, by one consumer: wgmma, and where a chunk of K has its own sum or scales, the
// additions in FP32 registers.
#pragma once

#include "cuda/gemm/kernel/gemm_tile_sm90.cuh"
#include "cuda/gemm/kernel/wgmma_sm90.cuh"

namespace mixprec::cuda::sm90 {

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

// This warp has finished reading the stage. Every warp arrives, because a warp can only wait for
// its own wgmmas.
template <class T>
__device__ __forceinline__ void release(const Shared<T>& shared, int stage) {
  uint32_t lane = threadIdx.x % 32;
  if constexpr (T::kCluster > 1) {
    if (lane < T::kCluster) barrier_arrive_at(shared.empty(stage), lane);
  } else {
    if (lane == 0) barrier_arrive(shared.empty(stage));
  }
}

// The scales that a thread needs of a chunk of K. They are loaded one chunk ahead, so that their
// latency is hidden by the wgmmas of the chunk before.
template <class T, bool by_column>
struct ChunkScales {
  float upper[T::kParts], lower[T::kParts];  // of a: of the thread's rows in each part
  float b;                                   // of the tile; by_column: not used

  // Rows outside C are zeros, so any scale within the tensor can be used.
  __device__ void load(const GemmArgs& args, int row, int col, int chunk) {
    auto at = [&](int r) { return args.a_chunk.at(r < args.m ? r : args.m - 1, chunk); };
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      upper[part] = at(row + 64 * part);
      lower[part] = at(row + 64 * part + 8);
    }
    if constexpr (!by_column) b = args.b_chunk.at(col, chunk);
  }
};

// acc += partial * scale. upper, lower: for the thread's two rows.
template <int count>
__device__ __forceinline__ void promote(float (&acc)[count], const float (&partial)[count],
                                        float upper, float lower) {
#pragma unroll
  for (int i = 0; i < count; ++i) acc[i] += partial[i] * (i / 2 % 2 == 0 ? upper : lower);
}

// The same with a factor for each column: `scales`, in shared memory, from the thread's first on.
template <int count>
__device__ __forceinline__ void promote(float (&acc)[count], const float (&partial)[count],
                                        float upper, float lower, const float* scales) {
#pragma unroll
  for (int j = 0; j < count / 4; ++j) {
    float2 b = load_shared(scales + 8 * j);
    acc[4 * j] += partial[4 * j] * (upper * b.x);
    acc[4 * j + 1] += partial[4 * j + 1] * (upper * b.y);
    acc[4 * j + 2] += partial[4 * j + 2] * (lower * b.x);
    acc[4 * j + 3] += partial[4 * j + 3] * (lower * b.y);
    // The compiler would load all scales at once, and they do not fit into registers.
    if (j % 4 == 3) asm volatile("" ::: "memory");
  }
}

// acc = the sum over all chunks, inside the tensor core.
template <class T>
__device__ __forceinline__ void accumulate_directly(float (&acc)[T::kParts][T::kBlockN / 2],
                                                    const Shared<T>& shared, RingPosition& ring,
                                                    const GemmArgs& args, const Work& work,
                                                    int row) {
  int previous = 0;
  for (int chunk = work.first; chunk < work.last; ++chunk) {
    barrier_wait(shared.full(ring.stage), ring.parity);
    __syncwarp();  // the lanes have waited each on its own
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
}

// acc = the sum of the chunks' sums, each of them scaled. by_column: each column of b has its own
// scales.
template <class T, bool by_column>
__device__ __forceinline__ void accumulate_by_chunk(float (&acc)[T::kParts][T::kBlockN / 2],
                                                    const Shared<T>& shared, RingPosition& ring,
                                                    const GemmArgs& args, const Work& work,
                                                    int row) {
  constexpr bool scaled = T::kAccumulate == Accumulate::scaled;
  Fragment at;
  ChunkScales<T, by_column> scale, next;
  if constexpr (scaled) next.load(args, work.m + row + at.row, work.n, work.first);
#pragma unroll
  for (int part = 0; part < T::kParts; ++part) {
#pragma unroll
    for (float& sum : acc[part]) sum = 0.0f;
  }
  for (int chunk = work.first; chunk < work.last; ++chunk) {
    if constexpr (scaled) {
      scale = next;
      if (chunk + 1 < work.last) next.load(args, work.m + row + at.row, work.n, chunk + 1);
    }
    barrier_wait(shared.full(ring.stage), ring.parity);
    __syncwarp();  // the lanes have waited each on its own
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      float partial[T::kBlockN / 2];
      wgmma_fence();
      multiply<T>(partial, shared.a(ring.stage), shared.b(ring.stage), row + 64 * part, false);
      wgmma_commit();
      wgmma_wait_for(partial);
      bool last = part + 1 == T::kParts;
      if constexpr (!scaled) {
        if (last) release(shared, ring.stage);
#pragma unroll
        for (int i = 0; i < T::kBlockN / 2; ++i) acc[part][i] += partial[i];
      } else if constexpr (by_column) {
        promote(acc[part], partial, scale.upper[part], scale.lower[part],
                shared.b_scale(ring.stage) + at.col);
        __syncwarp();  // one lane arrives for all of them, which have read the scales
        if (last) release(shared, ring.stage);
      } else {
        if (last) release(shared, ring.stage);
        promote(acc[part], partial, scale.upper[part] * scale.b, scale.lower[part] * scale.b);
      }
    }
    ring.advance(args.stages);
  }
}

}  // namespace mixprec::cuda::sm90
