// A tile of 128 x 128 in the registers of a block of threads.
#pragma once

#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/transpose.cuh"

namespace mixprec::cuda {

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
    auto load_rows = [&](auto whole) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        Element x[n];
        tile.load<n, decltype(whole)::value>(source, row + i * kStep, col, x, vectors);
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
