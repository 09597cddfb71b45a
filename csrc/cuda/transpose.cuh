// A tile of q in shared memory, written along the rows of x and read along those of q and q^T, with
// 16-byte accesses to global memory on all sides.
#pragma once

#include "cuda/vec.cuh"

namespace mixprec::cuda {

// rows x cols of at most kSide x kSide elements. A side is 128 bytes: a cache line of global
// memory, eight vectors, and all 32 banks. Vector v of row r lies at v ^ (r / kRun % 8), so that
// threads that go down eight groups of rows in one column meet eight groups of banks.
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

// out[0, n) <- run, by one vector where n is all of it and `vectors` says that out is aligned.
template <int kRun, class Q>
__device__ __forceinline__ void store_run(Q* out, const Q (&run)[kRun], int n, bool vectors) {
  if (vectors && n == kRun) {
    store(out, run);
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i < n) out[i] = run[i];
    }
  }
}

}  // namespace mixprec::cuda
