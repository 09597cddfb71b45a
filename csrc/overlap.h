// Whether tensors of a list, which threads write at the same time, share memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"

namespace mixprec {

// A dimension of memory: lowest <= i <= highest steps of `stride` bytes.
struct Steps {
  int64_t stride, lowest, highest;
};

// Whether some steps add up to `distance` bytes. The dimensions come with the largest stride first,
// so that those after one leave it few steps to try.
inline bool reaches(const Steps* dim, const Steps* end, int64_t distance) {
  if (dim == end) return distance == 0;
  int64_t low = 0, high = 0;
  for (const Steps* rest = dim + 1; rest != end; ++rest) {
    low += rest->stride * rest->lowest;
    high += rest->stride * rest->highest;
  }
  int64_t last = std::min(dim->highest, (distance - low) / dim->stride);
  for (int64_t i = last; i >= dim->lowest && distance - i * dim->stride <= high; --i) {
    if (distance - i * dim->stride >= low && reaches(dim + 1, end, distance - i * dim->stride))
      return true;
  }
  return false;
}

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

inline bool share_memory(const Extent& a, const Extent& b) {
  if (a.tensor->is_contiguous() && b.tensor->is_contiguous()) return true;  // as the extents do
  std::vector<Steps> dims{{1, 0, 0}};
  auto add = [&](int64_t stride, int64_t steps, bool negative) {
    if (steps == 0) return;
    Steps dim = negative ? Steps{stride, -steps, 0} : Steps{stride, 0, steps};
    auto same = std::find_if(dims.begin(), dims.end(),
                             [&](const Steps& other) { return other.stride == stride; });
    if (same == dims.end()) {
      dims.push_back(dim);
    } else {
      same->lowest += dim.lowest;
      same->highest += dim.highest;
    }
  };
  for (const Extent* extent : {&a, &b}) {
    const Tensor& t = *extent->tensor;
    auto sizes = t.sizes(), strides = t.strides();
    int64_t size = t.element_size();
    add(1, size - 1, extent == &b);
    for (size_t i = 0; i < sizes.size(); ++i) add(strides[i] * size, sizes[i] - 1, extent == &b);
  }
  std::sort(dims.begin(), dims.end(),
            [](const Steps& x, const Steps& y) { return x.stride > y.stride; });
  return reaches(dims.data(), dims.data() + dims.size(), static_cast<int64_t>(b.begin - a.begin));
}

// Each of them by itself has passed is_writable.
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
      STD_TORCH_CHECK(!share_memory(other, next), op, ": two tensors of ", name, " share memory");
    }
    open.push_back(next);
  }
}

}  // namespace mixprec
