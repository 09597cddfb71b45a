// The checks of pack and unpack, on every device.
#pragma once

#include <vector>

#include "arguments/check.h"
#include "math/pack.h"

namespace mixprec {

inline void check_bits(int64_t bits, const char* op) {
  STD_TORCH_CHECK(bits == 8 || bits == 4 || bits == 2, op, ": bits must be 8, 4 or 2");
}

// What is added to the counter of pack: int64 [1] on x's device, or nothing. Null for nothing.
inline const int64_t* check_offset(const MaybeTensor& offset, const Tensor& x) {
  if (!offset.has_value()) return nullptr;
  STD_TORCH_CHECK(offset->dim() == 1 && offset->numel() == 1 &&
                      offset->scalar_type() == ScalarType::Long && same_device(*offset, x),
                  "pack: offset must be int64 [1] on x's device");
  return static_cast<const int64_t*>(offset->const_data_ptr());
}

// Returns the number of elements of `shape`.
inline int64_t check_packed(const Tensor& codes, const Tensor& ranges, int64_t bits,
                            const std::vector<int64_t>& shape) {
  check_bits(bits, "unpack");
  int64_t n = 1;
  for (int64_t size : shape) {
    STD_TORCH_CHECK(size >= 0, "unpack: shape must have no negative size");
    n *= size;
  }
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.dim() == 1 &&
                      codes.numel() == packed_bytes(n, bits) && same_device(codes, ranges),
                  "unpack: codes must be uint8, of the size of the packed shape, beside ranges");
  STD_TORCH_CHECK(ranges.scalar_type() == ScalarType::BFloat16 && ranges.dim() == 2 &&
                      ranges.size(0) == packed_groups(n) && ranges.size(1) == 2,
                  "unpack: ranges must be bf16 [groups, 2], of the packed shape");
  return n;
}

}  // namespace mixprec
