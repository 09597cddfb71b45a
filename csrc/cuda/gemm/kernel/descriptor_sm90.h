// Describes an operand in shared memory to wgmma (PTX ISA, "Matrix descriptor").
#pragma once

#include "math/hd.h"

namespace mixprec::cuda::sm90 {

// Which dimension of an operand is contiguous in shared memory: K, or the other one (M or N).
enum class Major { k, mn };

// All tiles have the 128-byte swizzle: the 16-byte word w of the 128-byte row r is stored at word
// w ^ (r % 8). Addresses and strides are in bytes.
// K-major: rows of 128 bytes of K; groups of 8 rows are `stride` apart; `leading` is not used.
// MN-major: rows of 128 bytes of M or N, one per k; groups of 8 rows are `stride` apart, and every
// further 128 bytes of M or N `leading` apart.
MIXPREC_HD uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t swizzle_128 = uint64_t{1} << 62;
  return swizzle_128 | (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32;
}

}  // namespace mixprec::cuda::sm90
