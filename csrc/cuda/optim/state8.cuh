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

// The random bits of a warp's blocks (block_random): those of the places of this lane, the same in
// all blocks of an array, and those of a block, in the lower half for the first state and the
// param.
__device__ __forceinline__ PhiloxWords random_in_block(const RandomStream& of_array) {
  return random_words(of_array, threadIdx.x % 32);
}
__device__ __forceinline__ uint32_t random_of_block(RandomStream of_param, int64_t block) {
  of_param.index_and_stream += static_cast<uint32_t>(kBlockStream) << 30;
  return random_words(of_param, block / 4).word[block % 4];
}

// Encodes `count` elements of state k (0 or 1) and returns the scale of their block. `lanes`: those
// that call this.
template <bool is_signed>
__device__ __forceinline__ float encode_group(const float (&x)[kGroup], int count, unsigned lanes,
                                              int k, const PhiloxWords& in_block, uint32_t of_block,
                                              Group<float>& codes) {
  uint32_t largest = 0;  // as an integer: NaN is larger than Inf
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    uint32_t magnitude = j < count ? float_bits(x[j]) & 0x7FFFFFFFu : 0u;
    largest = largest > magnitude ? largest : magnitude;
  }
  float scale = state8_scale(__reduce_max_sync(lanes, largest));
  float inverse = state8_inverse(scale);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    uint16_t bits = block_random(static_cast<uint16_t>(random16(in_block, j)),
                                 static_cast<uint16_t>(of_block >> (16 * k)));
    codes.set_byte(j, encode_state8<is_signed>(x[j], inverse, bits));
  }
  return scale;
}

}  // namespace mixprec::cuda
