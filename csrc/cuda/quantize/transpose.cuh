// A tile of q in shared memory, written along the rows of x and read along the rows of q and of
// q^T, so that all accesses to global memory are 16 bytes wide.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/vec.cuh"

namespace mixprec::cuda {

// rows x cols of at most kSide x kSide elements. A side is 128 bytes: a cache line of global
// memory, eight vectors, and all 32 banks. Vector v of row r is stored at v ^ (r / kRun % 8), so
// that threads that read eight groups of rows in one column access eight different groups of banks.
// Indices are unsigned: divisions of signed ones by a power of two take three instructions.
template <class Q>
struct QuantizeTile {
  static constexpr int kRun = kVector<Q>;  // elements per vector
  static constexpr int kSide = 8 * kRun;

  alignas(16) Q at[kSide * kSide];

  __device__ __forceinline__ unsigned offset(unsigned row, unsigned col) const {
    return row * kSide + ((col / kRun) ^ (row / kRun % 8)) * kRun + col % kRun;
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

// The same for a run of kVector<Q> elements as four words, the first element lowest.
template <class Q>
__device__ __forceinline__ void store_words(Q* out, const uint32_t (&words)[4], int n,
                                            bool vectors) {
  constexpr int per_word = 4 / sizeof(Q);
  if (vectors && n >= kVector<Q>) {
    store(reinterpret_cast<uint32_t*>(out), words);
  } else {
#pragma unroll
    for (int i = 0; i < kVector<Q>; ++i) {
      auto bits = words[i / per_word] >> (i % per_word * 8 * sizeof(Q));
      if (i < n) out[i].bits = static_cast<decltype(out->bits)>(bits);
    }
  }
}

// to[j], j < n: element j of each of the n words of `from`, n elements a word.
__device__ __forceinline__ void transpose_words(const uint32_t (&from)[4], uint32_t (&to)[4]) {
  uint32_t low[2] = {__byte_perm(from[0], from[1], 0x5140), __byte_perm(from[2], from[3], 0x5140)};
  uint32_t high[2] = {__byte_perm(from[0], from[1], 0x7362), __byte_perm(from[2], from[3], 0x7362)};
  to[0] = __byte_perm(low[0], low[1], 0x5410);
  to[1] = __byte_perm(low[0], low[1], 0x7632);
  to[2] = __byte_perm(high[0], high[1], 0x5410);
  to[3] = __byte_perm(high[0], high[1], 0x7632);
}
__device__ __forceinline__ void transpose_words(const uint32_t (&from)[2], uint32_t (&to)[2]) {
  to[0] = __byte_perm(from[0], from[1], 0x5410);
  to[1] = __byte_perm(from[0], from[1], 0x7632);
}

constexpr int kTile = 128;  // rows and columns of the largest blocks with a scale of their own

// The position of a tile in a matrix [rows, cols].
struct TileAt {
  int64_t rows, cols, row0, col0;

  // The number of elements from `first` on, none or less beyond the end; 32 bits hold it as far as
  // a tile reaches.
  static __device__ __forceinline__ int left(int64_t size, int64_t first) {
    int64_t count = size - first;
    return count < 1 << 20 ? static_cast<int>(count) : 1 << 20;
  }
  __device__ __forceinline__ int height() const { return left(rows, row0); }
  __device__ __forceinline__ int width() const { return left(cols, col0); }

  // The n values of [row0 + r, col0 + c...], zeros outside the matrix. in: as Source::load takes
  // them. `vectors`: all are aligned; whole: and inside the matrix.
  template <int n, bool whole, class Source, class In>
  __device__ __forceinline__ void load(const Source& source, int r, int c, In& in,
                                       bool vectors) const {
    int64_t row = row0 + r, col = col0 + c;
    int count = n;
    if constexpr (!whole) {
      int left = r < height() ? width() - c : 0;
      count = left >= n ? n : left > 0 ? left : 0;
    }
    if constexpr (requires { source.load_of(row, col, in, count, vectors); }) {
      source.load_of(row, col, in, count, whole || vectors);
    } else {
      source.load(row * cols + col, in, count, whole || vectors);
    }
  }

  template <class Q>
  __device__ __forceinline__ void store_rows(const QuantizeTile<Q>& tile, Q* q) const {
    constexpr int side = QuantizeTile<Q>::kSide, run = QuantizeTile<Q>::kRun;
    bool vectors = is_aligned(q) && cols % run == 0;
    int c = threadIdx.x % 8 * run;
#pragma unroll 1
    for (int first = 0; first < side; first += kThreads / 8) {
      int r = first + threadIdx.x / 8;
      if (r >= height() || c >= width()) continue;
      uint32_t line[4];
      cuda::load(reinterpret_cast<const uint32_t*>(&tile.at[tile.offset(r, c)]), line);
      store_words(q + (row0 + r) * cols + col0 + c, line, width() - c, vectors);
    }
  }

  // q_t [cols, rows]. A thread has a word of each row of a run, so of 4 / sizeof(Q) columns. Those
  // of a warp are of eight runs and of four words, in 32 different banks, and store 128 bytes of
  // each column together.
  template <class Q>
  __device__ __forceinline__ void store_columns(const QuantizeTile<Q>& tile, Q* q_t) const {
    constexpr int side = QuantizeTile<Q>::kSide, run = QuantizeTile<Q>::kRun, n = 4 / sizeof(Q);
    static_assert(kThreads == 8 * side / n);
    bool vectors = is_aligned(q_t) && rows % run == 0;
    int r = threadIdx.x % 8 * run, c = threadIdx.x / 8 * n;
    if (r >= height() || c >= width()) return;
    uint32_t columns[n][4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t words[n], turned[n];
#pragma unroll
      for (int i = 0; i < n; ++i) {
        unsigned at = tile.offset(r, c) + (w * n + i) * side;
        words[i] = *reinterpret_cast<const uint32_t*>(&tile.at[at]);
      }
      transpose_words(words, turned);
#pragma unroll
      for (int j = 0; j < n; ++j) columns[j][w] = turned[j];
    }
#pragma unroll
    for (int j = 0; j < n; ++j) {
      if (c + j >= width()) return;
      store_words(q_t + (col0 + c + j) * rows + row0 + r, columns[j], height() - r, vectors);
    }
  }
};

}  // namespace mixprec::cuda
