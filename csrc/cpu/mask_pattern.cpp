// mask_pattern: what a boolean mask of attention hides, from each of its values.
#include <cstring>
#include <vector>

#include "cpu/parallel.h"

namespace mixprec::cpu {

// mask bool [..., T, S], up to four dimensions -> int64 []: 2 if it hides nothing, 1 if query i
// sees keys 0 to i only, else 0. 0 as well for keys that are not adjacent in memory.
Tensor mask_pattern(Tensor mask) {
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.dim() >= 2 && mask.dim() <= 4,
                  "mask_pattern: mask must be bool [..., T, S] of two to four dimensions");
  int64_t size[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0};
  for (int64_t d = 0, first = 4 - mask.dim(); d < mask.dim(); ++d) {
    size[first + d] = mask.sizes()[d], stride[first + d] = mask.strides()[d];
  }
  Tensor result = empty({}, ScalarType::Long);
  int64_t& pattern = *static_cast<int64_t*>(result.mutable_data_ptr()) = 0;
  int64_t keys = size[3];
  if (mask.numel() == 0 || (keys > 1 && stride[3] != 1)) return result;
  for (int64_t d = 0; d < 2; ++d) {
    if (stride[d] == 0) size[d] = 1;  // one mask for all of them
  }
  const char* data = static_cast<const char*>(mask.const_data_ptr());
  bool hides = data[keys - 1] == 0;
  std::vector<char> edge(2 * keys, 0);  // row i of a causal mask is a part of it
  std::fill_n(edge.begin(), keys, 1);
  for (int64_t b = 0; b < size[0]; ++b) {
    for (int64_t h = 0; h < size[1]; ++h) {
      const char* row = data + b * stride[0] + h * stride[1];
      for (int64_t t = 0; t < size[2]; ++t, row += stride[2]) {
        int64_t seen = hides ? std::min(t + 1, keys) : keys;
        if (std::memcmp(row, edge.data() + keys - seen, keys) != 0) return result;
      }
    }
  }
  pattern = hides ? 1 : 2;
  return result;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("mask_pattern", TORCH_BOX(&mixprec::cpu::mask_pattern));
}
