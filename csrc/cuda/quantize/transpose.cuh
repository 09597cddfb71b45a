// A tile of q in shared memory, written along the rows of x and read along the rows of q and of
// q^T, so that all accesses to global memory are 16 bytes wide.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/vec.cuh"

namespace mixprec::cuda {

// rows x cols of at most kSide x kSide elements. A side is 128 bytes: a cache line of global
// memory, eight vectors, and all 32 banks. Vector v of row r is stored at v ^ (r / kRun % 8), so
// that threads that read eight groups of rows in one column access eight different groups of banks.
template <class Q>
struct QuantizeTile {
  static constexpr int kRun = kVector<Q>;  // elements per vector
  static constexpr int kSide = 8 * kRun;

  alignas(16) Q at[kSide * kSide];

  __device__ __forceinline__ int offset(int row, int col) const {
    return row * kSide + ((col / kRun) ^ (row / kRun % 8)) * kRun + col % kRun;
  }

  // Column col, rows [row, row + kRun).
  __device__ __forceinline__ void gather(int row, int col, Q (&run)[kRun]) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) run[i] = at[offset(row + i, col)];
  }
};

// out[0, n) <- run, by one vector store if n is the whole run and out is aligned (`vectors`).
template <int kRun, class Q>
__device__ __forceinline__ void store_run(Q* out, const Q (&run)[kRun], int64_t n, bool vectors) {
  if (vectors && n >= kRun) {
    store(out, run);
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i < n) out[i] = run[i];
    }
  }
}

// The position of a tile in a matrix [rows, cols].
struct TileAt {
  int64_t rows, cols, row0, col0;

  // The n values of [row0 + r, col0 + c...], zeros outside the matrix. in: as Source::load takes
  // them. `vectors`: all are aligned.
  template <int n, class Source, class In>
  __device__ __forceinline__ void load(const Source& source, int r, int c, In& in,
                                       bool vectors) const {
    int64_t row = row0 + r, col = col0 + c, left = row < rows ? cols - col : 0;
    int count = left >= n ? n : left > 0 ? static_cast<int>(left) : 0;
    if constexpr (requires { source.load_of(row, col, in, count, vectors); }) {
      source.load_of(row, col, in, count, vectors);
    } else {
      source.load(row * cols + col, in, count, vectors);
    }
  }

  template <class Q>
  __device__ __forceinline__ void store_rows(const QuantizeTile<Q>& tile, Q* q) const {
    constexpr int side = QuantizeTile<Q>::kSide, run = QuantizeTile<Q>::kRun;
    bool vectors = is_aligned(q) && cols % run == 0;
    for (int i = threadIdx.x; i < side * 8; i += kThreads) {
      int r = i / 8, c = i % 8 * run;
      if (row0 + r >= rows || col0 + c >= cols) continue;
      Q line[run];
      cuda::load(&tile.at[tile.offset(r, c)], line);
      store_run(q + (row0 + r) * cols + col0 + c, line, cols - col0 - c, vectors);
    }
  }

  // q_t [cols, rows]
  template <class Q>
  __device__ __forceinline__ void store_columns(const QuantizeTile<Q>& tile, Q* q_t) const {
    constexpr int side = QuantizeTile<Q>::kSide, run = QuantizeTile<Q>::kRun;
    bool vectors = is_aligned(q_t) && rows % run == 0;
    for (int i = threadIdx.x; i < side * 8; i += kThreads) {
      int c = i / 8, r = i % 8 * run;
      if (row0 + r >= rows || col0 + c >= cols) continue;
      Q line[run];
      tile.gather(r, c, line);
      store_run(q_t + (col0 + c) * rows + row0 + r, line, rows - row0 - r, vectors);
    }
  }
};

}  // namespace mixprec::cuda
