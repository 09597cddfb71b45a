// Whether tensors of a list, which threads write at the same time, share memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "arguments/check.h"

namespace mixprec {

struct Extent {
  uintptr_t begin, end;
  const Tensor* tensor;
};

inline Extent extent_of(const Tensor& t) {
  int64_t last = t.numel() - 1;
  if (last > 0 && !t.is_contiguous()) {
    auto sizes = t.sizes(), strides = t.strides();
    last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  }
  auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return {begin, begin + static_cast<uintptr_t>((last + 1) * t.element_size()), &t};
}

// Each of them by itself has passed is_writable. As in torch, two views with gaps, such as columns
// of one matrix, may reach into each other's range: whether they share an element is not looked
// for.
inline void check_disjoint(const std::vector<Tensor>& tensors, const char* op, const char* name) {
  std::vector<Extent> extents;
  extents.reserve(tensors.size());
  for (const Tensor& t : tensors) {
    if (t.numel() > 0) extents.push_back(extent_of(t));
  }
  auto order = [](const Extent& a, const Extent& b) { return a.begin < b.begin; };
  if (!std::is_sorted(extents.begin(), extents.end(), order)) {
    std::sort(extents.begin(), extents.end(), order);
  }
  std::vector<Extent> open;  // of the tensors so far, those that may reach the next one
  for (const Extent& next : extents) {
    auto ended = [&](const Extent& e) { return e.end <= next.begin; };
    open.erase(std::remove_if(open.begin(), open.end(), ended), open.end());
    for (const Extent& other : open) {
      bool share = other.begin == next.begin || (is_dense(*other.tensor) && is_dense(*next.tensor));
      STD_TORCH_CHECK(!share, op, ": two tensors of ", name, " share memory");
    }
    open.push_back(next);
  }
}

}  // namespace mixprec
