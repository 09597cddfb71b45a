// The memory layout of gemm's operands and their scales, in the terms of the Hopper kernel. Host
// only, no CUDA, no torch.
#pragma once

#include <optional>

#include "cuda/gemm/config/gemm_args.h"
#include "cuda/gemm/config/gemm_plan.h"

namespace mixprec::cuda::sm90 {

// A matrix as torch describes it. `row` is the dimension of M in a [M, K], of N in b [K, N].
struct Strided {
  uint64_t address;
  int64_t size[2], stride[2];  // elements
  int row;

  constexpr int along_k() const { return 1 - row; }
};

// Lines of contiguous elements along `major`, `pitch` elements apart. copy: the operand has to be
// copied to have this layout.
struct Arrangement {
  Major major;
  int64_t pitch;
  bool copy;
};

constexpr int64_t round_up(int64_t x, int64_t multiple) { return ceil_div(x, multiple) * multiple; }

// The pitch of the lines along dimension `inner`; 0 if TMA does not support it.
constexpr int64_t pitch_along(const Strided& x, int inner, int64_t element_bytes) {
  int64_t lines = x.size[1 - inner], pitch = x.stride[1 - inner];
  if (x.address % 16 != 0 || (x.size[inner] > 1 && x.stride[inner] != 1)) return 0;
  if (lines <= 1) return round_up(x.size[inner], 16 / element_bytes);  // there is no second line
  return pitch >= x.size[inner] && pitch * element_bytes % 16 == 0 ? pitch : 0;
}

// Without a copy where possible. FP8 operands must be contiguous along K; 16-bit operands keep
// their order if they are copied.
constexpr Arrangement arrangement_of(const Strided& x, int64_t element_bytes) {
  bool any_major = element_bytes > 1;
  int64_t k_pitch = pitch_along(x, x.along_k(), element_bytes);
  if (k_pitch != 0) return {Major::k, k_pitch, false};
  int64_t row_pitch = any_major ? pitch_along(x, x.row, element_bytes) : 0;
  if (row_pitch != 0) return {Major::mn, row_pitch, false};
  bool along_rows = any_major && x.stride[x.row] == 1 && x.stride[x.along_k()] != 1;
  int64_t inner = x.size[along_rows ? x.row : x.along_k()];
  return {along_rows ? Major::mn : Major::k, round_up(inner, 16 / element_bytes), true};
}

struct Scales {
  ScaleView view;
  Granularity granularity;
};

// scale_inv of an operand x: one element, or of shape (r, c) for a and (c, r) for b, where r is
// rows or ceil(rows / 128) (rows takes precedence if they are equal), and c is 1 or ceil(K / 128).
// Returns nothing for other shapes.
constexpr std::optional<Scales> scales_of(const float* data, const Strided& s, const Strided& x) {
  int64_t rows = x.size[x.row], chunks = ceil_div(x.size[x.along_k()], 128);
  int64_t r = s.size[x.row], c = s.size[x.along_k()];
  if (r == 1 && c == 1) return Scales{{data, 0, 0, 0}, Granularity::tensor};
  bool by_row = r == rows;
  if ((!by_row && r != ceil_div(rows, 128)) || (c != 1 && c != chunks)) return std::nullopt;
  int64_t chunk_stride = c > 1 ? s.stride[x.along_k()] : 0;
  Granularity granularity = c <= 1   ? Granularity::row
                            : by_row ? Granularity::block1x128
                                     : Granularity::block128x128;
  return Scales{{data, s.stride[x.row], chunk_stride, by_row ? 0 : 7}, granularity};
}

// Scales of 1 x 128 as the kernel reads them fast, those of b by TMA: the scales of a chunk of K
// side by side, chunks at multiples of 16 bytes.
inline bool is_outer_major(const ScaleView& s, int64_t rows) {
  return s.row_shift == 0 && s.row_stride == 1 && s.chunk_stride >= rows &&
         s.chunk_stride % 4 == 0 && reinterpret_cast<uint64_t>(s.data) % 16 == 0;
}

// a is also read from where it is. With so few rows that costs less than another launch.
constexpr int64_t kRowsReadInPlace = 512;

}  // namespace mixprec::cuda::sm90
