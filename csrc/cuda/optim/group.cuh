// Eight neighbouring elements of an array whose format is known at run time: read and written in
// 16-byte accesses where the array's alignment allows it, else one by one. The groups of all arrays
// of a tensor start at the same multiples of eight, as do the random bits for rounding. States in 8
// bits: a warp holds one block of 256 elements, 8 in each lane.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/convert.cuh"
#include "cuda/common/vec.cuh"
#include "dispatch.h"
#include "math/philox.h"
#include "math/rounding.h"
#include "math/state8.h"

namespace mixprec::cuda {

constexpr int kGroup = 8;

struct Array {
  void* data;
  Dtype dtype;
};

// The elements as stored in memory; 16-bit elements use the first words only. Real: the type of the
// arithmetic, float or double; an array of f64 needs a group of doubles. Loading and decoding are
// separate so that the loads of all arrays are issued before the first one is waited for.
template <class Real>
struct Group {
  static constexpr bool kDouble = sizeof(Real) == 8;
  uint32_t word[kGroup * sizeof(Real) / 4] = {};

  static __device__ __forceinline__ int element_bytes(Dtype d) {
    return kDouble ? 8 : d == Dtype::f32 ? 4 : d == Dtype::u8 || d == Dtype::i8 ? 1 : 2;
  }

  // Elements [i, i + count) of a, 0 < count <= 8, i a multiple of 8.
  __device__ __forceinline__ void load(const Array& a, int64_t i, int count) {
    const int bytes = element_bytes(a.dtype);
    const char* from = static_cast<const char*>(a.data) + i * bytes;
    if (bytes == 1) {
      if (count == kGroup && reinterpret_cast<uint64_t>(from) % kGroup == 0) {
        uint2 x = *reinterpret_cast<const uint2*>(from);
        word[0] = x.x, word[1] = x.y;
        return;
      }
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        set_byte(j, static_cast<uint8_t>(from[j < count ? j : count - 1]));
      }
      return;
    }
    if (count == kGroup && is_aligned(from)) {
#pragma unroll
      for (int v = 0; v < kGroup * static_cast<int>(sizeof(Real)) / 16; ++v) {
        if (v * 2 >= bytes) break;
        uint4 x = reinterpret_cast<const uint4*>(from)[v];
        word[4 * v] = x.x, word[4 * v + 1] = x.y, word[4 * v + 2] = x.z, word[4 * v + 3] = x.w;
      }
      return;
    }
    // Elements beyond `count` repeat the last one, so that no load depends on a branch.
    auto at = [&](int j) { return j < count ? j : count - 1; };
#pragma unroll
    for (int j = 0; kDouble && j < kGroup; ++j) {
      uint2 x = reinterpret_cast<const uint2*>(from)[at(j)];
      word[2 * j] = x.x, word[2 * j + 1] = x.y;
    }
    if (bytes == 4) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) word[j] = reinterpret_cast<const uint32_t*>(from)[at(j)];
    } else if (bytes == 2) {
      uint16_t x[kGroup];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) x[j] = reinterpret_cast<const uint16_t*>(from)[at(j)];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) set_half(j, x[j]);
    }
  }

  __device__ __forceinline__ void store(const Array& a, int64_t i, int count) const {
    const int bytes = element_bytes(a.dtype);
    char* to = static_cast<char*>(a.data) + i * bytes;
    if (bytes == 1 && count == kGroup && reinterpret_cast<uint64_t>(to) % kGroup == 0) {
      *reinterpret_cast<uint2*>(to) = {word[0], word[1]};
      return;
    }
    if (bytes > 1 && count == kGroup && is_aligned(to)) {
#pragma unroll
      for (int v = 0; v < kGroup * static_cast<int>(sizeof(Real)) / 16; ++v) {
        if (v * 2 >= bytes) break;
        reinterpret_cast<uint4*>(to)[v] = {word[4 * v], word[4 * v + 1], word[4 * v + 2],
                                           word[4 * v + 3]};
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      if (j >= count) break;
      if constexpr (kDouble) {
        reinterpret_cast<uint2*>(to)[j] = {word[2 * j], word[2 * j + 1]};
      } else if (bytes == 4) {
        reinterpret_cast<uint32_t*>(to)[j] = word[j];
      } else if (bytes == 1) {
        to[j] = static_cast<char>(byte(j));
      } else {
        reinterpret_cast<uint16_t*>(to)[j] = half(j);
      }
    }
  }

  __device__ __forceinline__ uint16_t half(int j) const {
    return static_cast<uint16_t>(word[j / 2] >> (16 * (j % 2)));
  }
  __device__ __forceinline__ void set_half(int j, uint16_t bits) {
    uint32_t other = word[j / 2] & (j % 2 == 0 ? 0xFFFF0000u : 0xFFFFu);
    word[j / 2] = other | static_cast<uint32_t>(bits) << (16 * (j % 2));
  }

  __device__ __forceinline__ uint8_t byte(int j) const {
    return static_cast<uint8_t>(word[j / 4] >> (8 * (j % 4)));
  }
  __device__ __forceinline__ void set_byte(int j, uint8_t bits) {
    uint32_t other = word[j / 4] & ~(0xFFu << (8 * (j % 4)));
    word[j / 4] = other | static_cast<uint32_t>(bits) << (8 * (j % 4));
  }

  __device__ __forceinline__ void decode(Dtype dtype, Real (&x)[kGroup]) const {
    if constexpr (kDouble) {
      __builtin_memcpy(x, word, sizeof x);
    } else if (dtype == Dtype::f32) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) x[j] = bits_float(word[j]);
    } else if (dtype == Dtype::bf16) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) x[j] = Convert<Bf16>::decode({half(j)});
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) x[j] = ptx::widen({half(j)});
    }
  }

  // Rounds to nearest even.
  __device__ __forceinline__ void encode(Dtype dtype, const Real (&x)[kGroup]) {
    if constexpr (kDouble) {
      __builtin_memcpy(word, x, sizeof x);
    } else if (dtype == Dtype::f32) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) word[j] = float_bits(x[j]);
    } else if (dtype == Dtype::bf16) {
#pragma unroll
      for (int j = 0; j < kGroup; j += 2) word[j / 2] = ptx::bf16x2(x[j], x[j + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; j += 2) word[j / 2] = ptx::fp16x2(x[j], x[j + 1]);
    }
  }

  // To bf16 by stochastic rounding.
  __device__ __forceinline__ void encode(const Real (&x)[kGroup], const PhiloxWords& random) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      set_half(j, stochastic_bf16(x[j], random16(random, j)).bits);
    }
  }
};

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
