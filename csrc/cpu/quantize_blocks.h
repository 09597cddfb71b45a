// quantize with a scale per row or block: computes the amax of a block, then casts it while it is
// in the cache.
#pragma once

#include <atomic>

#include "cpu/parallel.h"

namespace mixprec::cpu {

constexpr int64_t kBlock = 128;

struct Blocks {
  int64_t rows, cols;  // per scale; rows 0: the whole tensor; cols 0: a whole row
};

struct BlockCast {
  Dtype from, to;
  const void* x;  // [rows, cols], row-major
  int64_t rows, cols;
  bool transpose, power_of_two;
};

inline void raise_to(std::atomic<uint32_t>& largest, uint32_t value) {
  uint32_t seen = largest.load(std::memory_order_relaxed);
  while (value > seen && !largest.compare_exchange_weak(seen, value)) {
  }
}

// q [rows, cols] with scale_inv, and, if cast.transpose, x^T quantized with scales of its own rows
// or blocks: q_t [cols, rows] with scale_inv_t. Returns the amax of x as bits.
uint32_t quantize_by_blocks(const BlockCast& cast, const Blocks& blocks, void* q, float* scale_inv,
                            void* q_t, float* scale_inv_t);

}  // namespace mixprec::cpu
