// Tiles of a matrix in shared memory and in registers, so that all accesses to global memory are 16
// bytes wide, also those of a transpose.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/vec.cuh"
#include "cuda/quantize/amax.cuh"
#include "math/scale.h"

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

// store; early: the L2 cache is to lose these bytes before others, which the launch still reads.
template <int n, class T>
__device__ __forceinline__ void store(T* p, const T (&x)[n], bool early) {
  if constexpr (n * sizeof(T) == 16) {
    constexpr int half = n / 2;
    if (early) return ptx::store_early(p, pack<half>(x), pack<half>(x + half));
  }
  store(p, x);
}

// The same for a run of kVector<Q> elements as four words, the first element lowest.
template <class Q>
__device__ __forceinline__ void store_words(Q* out, const uint32_t (&words)[4], int n, bool vectors,
                                            bool early) {
  constexpr int per_word = 4 / sizeof(Q);
  if (vectors && n >= kVector<Q>) {
    store(reinterpret_cast<uint32_t*>(out), words, early);
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

// A matrix [rows, cols] that is cast with scales of parts of it, each of which follows from an
// amax.
struct CastByParts {
  int64_t rows, cols;
  float fmt_max;  // 0: a scale of 1
  bool power_of_two;

  __device__ __forceinline__ float scale(uint32_t amax) const {
    return scale_from_amax(bits_float(amax), fmt_max, 1.0f, power_of_two, 1.0f);
  }
};

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
  __device__ __forceinline__ void store_rows(const QuantizeTile<Q>& tile, Q* q,
                                             bool early = false) const {
    constexpr int side = QuantizeTile<Q>::kSide, run = QuantizeTile<Q>::kRun;
    bool vectors = is_aligned(q) && cols % run == 0;
    int c = threadIdx.x % 8 * run;
#pragma unroll 1
    for (int first = 0; first < side; first += kThreads / 8) {
      int r = first + threadIdx.x / 8;
      if (r >= height() || c >= width()) continue;
      uint32_t line[4];
      cuda::load(reinterpret_cast<const uint32_t*>(&tile.at[tile.offset(r, c)]), line);
      store_words(q + (row0 + r) * cols + col0 + c, line, width() - c, vectors, early);
    }
  }

  // q_t [cols, rows]. A thread has a word of each row of a run, so of 4 / sizeof(Q) columns. Those
  // of a warp are of eight runs and of four words, in 32 different banks, and store 128 bytes of
  // each column together.
  template <class Q>
  __device__ __forceinline__ void store_columns(const QuantizeTile<Q>& tile, Q* q_t,
                                                bool early = false) const {
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
      Q* line = q_t + (col0 + c + j) * rows + row0 + r;
      store_words(line, columns[j], height() - r, vectors, early);
    }
  }
};

// A thread's part of a tile: n columns from `col` on, of the rows row, row + kStep, ... In words,
// because nvcc would keep each element of 16 bits in a register of its own.
template <class Source>
struct HeldTile {
  using Element = typename Source::Element;
  static constexpr int n = Source::kRun, kLanes = kTile / n;  // threads per row
  static constexpr int kStep = kThreads / kLanes, kRounds = kTile / kStep;
  static constexpr int kWords = n * sizeof(Element) / 4;

  uint32_t words[kRounds][kWords];
  int row = threadIdx.x / kLanes, col = threadIdx.x % kLanes * n;

  struct Run {
    Element at[n];
  };
  __device__ __forceinline__ Run run(int i) const {
    Run of_round;
    __builtin_memcpy(&of_round, words[i], sizeof of_round);
    return of_round;
  }
  __device__ __forceinline__ void set(int i, const Element (&x)[n]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[i][w] = static_cast<uint32_t>(pack<4 / sizeof(Element)>(x + w * (n / kWords)));
    }
  }

  // source: of one output
  template <class One>
  __device__ __forceinline__ void load(const TileAt& tile, const One& source, bool vectors) {
    auto load_rows = [&]<bool whole>(std::bool_constant<whole>) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        Element x[n];
        tile.load<n, whole>(source, row + i * kStep, col, x, vectors);
        set(i, x);
      }
    };
    if (!Source::kFused && vectors && tile.height() >= kTile && tile.width() >= kTile) {
      load_rows(std::true_type{});
    } else if constexpr (!Source::kFused && sizeof(Element) == 4) {
      load_rows(std::false_type{});
    } else {  // the code of a load is long: once, and the rows move up
#pragma unroll 1
      for (int i = 0; i < kRounds; ++i) {
#pragma unroll
        for (int k = 0; k < (kRounds - 1) * kWords; ++k) {
          words[k / kWords][k % kWords] = words[k / kWords + 1][k % kWords];
        }
        Element x[n];
        tile.load<n, false>(source, row + i * kStep, col, x, vectors);
        set(kRounds - 1, x);
      }
    }
  }

  // The value of row + i * kStep, the same for all threads that hold a part of it.
  __device__ __forceinline__ uint32_t row_max(int i) const {
    return warp_reduce<Max>(largest_of(run(i).at, 0u), kLanes);
  }
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) amax = largest_of(run(i).at, amax);
    return amax;
  }

  // The place of a column among the column maxima: those that the threads of a warp raise at once
  // are in different banks.
  static __device__ __forceinline__ unsigned place(unsigned column) {
    return column % n * kLanes + column / n;
  }
  // maxima [kTile] in shared memory, initially zero
  __device__ __forceinline__ void raise_column_maxima(uint32_t* maxima) const {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      Element column[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) column[i] = run(i).at[j];
      atomicMax(&maxima[place(col + j)], largest_of(column, 0u));
    }
  }

  // tile <- cast(x * scale(i, j)) for element j of round i. largest: of all elements, or more.
  template <class Q, class Scale>
  __device__ __forceinline__ void encode(QuantizeTile<Q>& tile, uint32_t largest,
                                         const Scale& scale) {
    // What nvcc has made of the elements, and their places, it would keep from one use to the next,
    // in more registers than there are.
#pragma unroll
    for (int k = 0; k < kRounds * kWords; ++k) ptx::forget(words[k / kWords][k % kWords]);
    uint32_t first = row;
    ptx::forget(first);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      Q rounded[n];
      ptx::forget(largest);  // nor does it then cast all rounds at once
      encode_run(run(i).at, rounded, [&](int j) { return scale(i, j); }, largest);
      store(&tile.at[tile.offset(first + i * kStep, col)], rounded);
    }
  }
};

}  // namespace mixprec::cuda
