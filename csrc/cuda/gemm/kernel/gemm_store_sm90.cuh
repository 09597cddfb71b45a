// From the accumulators of a warpgroup to C: scales, bias, one rounding; then through shared memory
// and TMA, or directly if C is not aligned.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/gemm/config/gemm_args.h"
#include "cuda/gemm/kernel/ptx_sm90.cuh"

namespace mixprec::cuda::sm90 {

constexpr int kStagingBytes = 2 * 64 * 128;  // of a warpgroup: two boxes of 64 rows, 128 bytes each

// The accumulators of thread t of wgmma: rows row and row + 8, columns col, col + 1 and every
// eighth after them.
struct Fragment {
  int row = static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
  int col = static_cast<int>(threadIdx.x % 4 * 2);
};

// What the sums of a thread are multiplied with: the scales of its two rows, and that of all
// columns or, if they differ, one for each, which is loaded when it is needed.
struct OutputScales {
  bool none, by_column;
  float upper, lower, column;

  // m: the first row of the warpgroup.
  __device__ __forceinline__ OutputScales(const GemmArgs& args, int m) {
    const ScaleView &a = args.epilogue.a_scale, &b = args.epilogue.b_scale;
    int row = m + Fragment().row;
    auto of_row = [&](int r) { return a.at(r < args.m ? r : args.m - 1, 0); };
    none = a.data == nullptr && b.data == nullptr;
    by_column = b.row_stride != 0;
    upper = of_row(row), lower = of_row(row + 8);
    column = by_column ? 1.0f : b.at(0, 0);
  }
};

// d: the sums of two neighbouring columns in the thread's two rows.
__device__ __forceinline__ void scale_pair(float* d, const OutputScales& s, float left,
                                           float right) {
  d[0] = scaled(d[0], s.upper, left);
  d[1] = scaled(d[1], s.upper, right);
  d[2] = scaled(d[2], s.lower, left);
  d[3] = scaled(d[3], s.lower, right);
}

// acc <- (acc * a_scale) * b_scale + bias in columns [first, first + count) of the warpgroup's
// rows; n: the column of C that the tile begins at. Only some columns at a time: the compiler loads
// all scales and biases of a call at once, and those of 256 columns would not fit into registers.
// Without scales, as for all 16-bit operands, nothing is multiplied: a 20th of the time of a
// product with K = 8192 was spent here.
template <int count, int block_n>
__device__ __forceinline__ void apply(float (&acc)[block_n / 2], int first, const OutputScales& s,
                                      const GemmArgs& args, int n) {
  const Epilogue& e = args.epilogue;
  int col = n + Fragment().col;
  if (s.by_column) {
    auto scale_of = [&](int c) { return e.b_scale.at(c < args.n ? c : args.n - 1, 0); };
#pragma unroll
    for (int j = first / 8; j < (first + count) / 8; ++j) {
      scale_pair(acc + 4 * j, s, scale_of(col + 8 * j), scale_of(col + 8 * j + 1));
    }
  } else if (!s.none) {
#pragma unroll
    for (int j = first / 8; j < (first + count) / 8; ++j) {
      scale_pair(acc + 4 * j, s, s.column, s.column);
    }
  }
  if (e.bias == nullptr) return;
  auto bias_of = [&](int c) { return c < args.n ? load_float(e.bias, e.bias_dtype, c) : 0.0f; };
#pragma unroll
  for (int j = first / 8; j < (first + count) / 8; ++j) {
    float left = bias_of(col + 8 * j), right = bias_of(col + 8 * j + 1);
    acc[4 * j] += left;
    acc[4 * j + 1] += right;
    acc[4 * j + 2] += left;
    acc[4 * j + 3] += right;
  }
}

// True in one thread of the warpgroup, the same in every call. All its threads call it.
__device__ __forceinline__ bool is_leader() {
  int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
  return warp % 4 == 0 && elect_one();
}

// Columns [first, first + 64) of the warpgroup's 64 rows, rounded to T -> box, with TMA's swizzle.
template <class T, int block_n>
__device__ __forceinline__ void stage_rounded(const float (&acc)[block_n / 2], uint8_t* box,
                                              int first) {
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x % 128 / 32);
  int row = warp * 16 + lane % 16, word = lane / 16;
  __syncwarp();  // stmatrix is .aligned, and not all columns have a bias
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {  // 16 columns: two words of a row
    int j = first / 8 + 2 * pair;
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = rounded_pair<T>(acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
    }
    stmatrix(box + row * 128 + ((2 * pair + word) ^ (row % 8)) * 16, r);
  }
}

// Columns [first, first + 128 bytes), likewise; bytes: of an element, as it is stored.
template <int bytes, int block_n>
__device__ __forceinline__ void stage(const float (&acc)[block_n / 2], uint8_t* box, int first,
                                      Dtype dtype) {
  if constexpr (bytes == 2) {
    if (dtype == Dtype::bf16) return stage_rounded<Bf16, block_n>(acc, box, first);
    stage_rounded<Fp16, block_n>(acc, box, first);
  } else {
    Fragment at;
#pragma unroll
    for (int group = 0; group < 4; ++group) {  // 8 columns: two words of a row
      int word = 2 * group + at.col / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = at.row + 8 * half, i = 4 * (first / 8 + group) + 2 * half;
        uint8_t* to = box + row * 128 + (word ^ (row % 8)) * 16 + at.col % 4 * 4;
        store_shared(reinterpret_cast<float*>(to), acc[i], acc[i + 1]);
      }
    }
  }
}

// Through shared memory with two boxes: while TMA stores one, the other is filled.
template <int bytes, int block_n>
__device__ __forceinline__ void store_by_tma(float (&acc)[block_n / 2], uint8_t* staging,
                                             const TensorMap* out_map, const GemmArgs& args, int m,
                                             int n, int consumer) {
  constexpr int cols = 128 / bytes, boxes = block_n / cols;
  OutputScales scales(args, m);
#pragma unroll
  for (int first = 0; first < block_n; first += cols) {
    uint8_t* box = staging + first / cols % 2 * (64 * 128);
    // Two boxes in turn: the store before the last one was from this box; with an odd number of
    // boxes the last one of the tile before.
    bool latest = boxes % 2 == 1 && first == 0;
    if (is_leader()) latest ? tma_store_wait_read<0>() : tma_store_wait_read<1>();
    named_barrier(1 + consumer, 128);
    apply<cols, block_n>(acc, first, scales, args, n);
    stage<bytes, block_n>(acc, box, first, args.epilogue.out_dtype);
    fence_async_proxy();
    named_barrier(1 + consumer, 128);
    if (is_leader()) {
      if (args.epilogue.accumulate) {
        tma_add(out_map, box, n + first, m);
      } else {
        tma_store(out_map, box, n + first, m);
      }
      tma_store_commit();
    }
  }
}

// out[m.., n..] <- acc, or += acc, element by element within C; or stores the sums of a split.
template <int block_n>
__device__ __forceinline__ void store_plainly(float (&acc)[block_n / 2], const GemmArgs& args,
                                              int m, int n, int split) {
  constexpr int count = 32;
  const Epilogue& e = args.epilogue;
  bool is_partial = args.partial != nullptr, add = e.accumulate && !is_partial;
  void* out = is_partial ? args.partial + int64_t{split} * args.m * args.n : e.out;
  int64_t pitch = is_partial ? args.n : e.pitch;
  Dtype dtype = is_partial ? Dtype::f32 : e.out_dtype;
  OutputScales scales(args, m);
  Fragment at;
#pragma unroll
  for (int first = 0; first < block_n; first += count) {
    if (!is_partial) apply<count, block_n>(acc, first, scales, args, n);
#pragma unroll
    for (int i = first / 2; i < (first + count) / 2; ++i) {
      int row = m + at.row + i / 2 % 2 * 8, col = n + at.col + i / 4 * 8 + i % 2;
      if (row >= args.m || col >= args.n) continue;
      int64_t place = row * pitch + col;
      store_float(out, dtype, place, add ? load_float(out, dtype, place) + acc[i] : acc[i]);
    }
  }
}

// The warpgroup's 64 rows from m and block_n columns from n on.
template <int block_n>
__device__ __forceinline__ void store_tile(float (&acc)[block_n / 2], uint8_t* staging,
                                           const TensorMap* out_map, const GemmArgs& args, int m,
                                           int n, int split, int consumer) {
  if (!args.tma_store) {
    store_plainly<block_n>(acc, args, m, n, split);
  } else if (args.epilogue.out_dtype == Dtype::f32) {
    store_by_tma<4, block_n>(acc, staging, out_map, args, m, n, consumer);
  } else {
    store_by_tma<2, block_n>(acc, staging, out_map, args, m, n, consumer);
  }
  __syncwarp();  // some lanes have done more than others, and wgmma.fence is .aligned
}

}  // namespace mixprec::cuda::sm90
