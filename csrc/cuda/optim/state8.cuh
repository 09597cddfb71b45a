// States in 8 bits: a warp holds one block of 256 elements, 8 in each lane.
#pragma once

#include "cuda/common/group.cuh"
#include "math/state8.h"

namespace mixprec::cuda {

static_assert(kState8Block == 32 * kGroup);

template <bool is_signed>
__device__ __forceinline__ void decode_group(const Group<float>& codes, float scale,
                                             float (&x)[kGroup]) {
#pragma unroll
  for (int j = 0; j < kGroup; ++j) x[j] = decode_state8<is_signed>(codes.byte(j), scale);
}

// The lanes of this warp that hold elements of its block, of which `left` are in the tensor.
__device__ __forceinline__ unsigned lanes_of_block(int left) {
  int lanes = left >= kState8Block ? 32 : (left + kGroup - 1) / kGroup;
  return 0xFFFFFFFFu >> (32 - lanes);
}

// Encodes elements [i, i + count) of state k (0 or 1) and returns the scale of their block.
// `random` is the stream of the param (math/philox.h), `lanes` those that call this.
template <bool is_signed>
__device__ __forceinline__ float encode_group(const float (&x)[kGroup], int64_t i, int count,
                                              unsigned lanes, RandomStream random, int k,
                                              Group<float>& codes) {
  uint32_t largest = 0;  // as an integer: NaN is larger than Inf
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    uint32_t magnitude = j < count ? float_bits(x[j]) & 0x7FFFFFFFu : 0u;
    largest = largest > magnitude ? largest : magnitude;
  }
  float scale = state8_scale(__reduce_max_sync(lanes, largest));
  float inverse = state8_inverse(scale);

  int64_t block = i / kState8Block, eighth = i % kState8Block / kGroup;
  uint32_t index = random.index_and_stream;
  random.index_and_stream = index + ((kFirstStateStream + k) << 30);
  PhiloxWords in_block = random_words(random, eighth);
  random.index_and_stream = index + (static_cast<uint32_t>(kBlockStream) << 30);
  uint32_t of_block = random16(random_words(random, block / 4), 2 * (block % 4) + k);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    uint16_t bits = state8_random(static_cast<uint16_t>(random16(in_block, j)),
                                  static_cast<uint16_t>(of_block));
    codes.set_byte(j, encode_state8<is_signed>(x[j], inverse, bits));
  }
  return scale;
}

}  // namespace mixprec::cuda
