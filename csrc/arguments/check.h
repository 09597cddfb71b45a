// Argument checks of the C++ ops, and the tensor properties they use. They run before any memory is
// touched; each message names the argument (the full rules are in mixprec/ops/*.py).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch.h"

namespace mixprec {

// A str argument of an op. Of a std::string, torch 2.11 to 2.13 leak a copy in each call (issue
// 191340 of pytorch): 48 bytes, which also keep malloc from joining what is freed around them.
struct Text : std::string {
  using std::string::string;
  Text(const std::string& text) : std::string(text) {}
};

}  // namespace mixprec

HIDDEN_NAMESPACE_BEGIN(torch, stable, detail)

template <>
struct ToImpl<mixprec::Text> {
  static mixprec::Text call(StableIValue value, uint64_t, bool) {
    StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    STD_TORCH_CHECK(!torch_string_length(handle, &length) && !torch_string_c_str(handle, &data),
                    "a str argument that cannot be read");
    mixprec::Text text(data, length);
    STD_TORCH_CHECK(!torch_delete_string(handle), "a str argument that cannot be freed");
    return text;
  }
};

HIDDEN_NAMESPACE_END(torch, stable, detail)

namespace mixprec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

inline Dtype dtype_of(ScalarType type, const char* what) {
  switch (type) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Half:
      return Dtype::f16;
    case ScalarType::Float8_e4m3fn:
      return Dtype::e4m3;
    case ScalarType::Float8_e5m2:
      return Dtype::e5m2;
    case ScalarType::Double:
      return Dtype::f64;
    default:
      STD_TORCH_CHECK(false, what, " has a dtype that this op does not take");
  }
}

inline Dtype dtype_of(const Tensor& t, const char* what) { return dtype_of(t.scalar_type(), what); }

inline bool is_float(Dtype d) { return d == Dtype::f32 || d == Dtype::bf16 || d == Dtype::f16; }
inline bool is_fp8(Dtype d) { return d == Dtype::e4m3 || d == Dtype::e5m2; }

// Tensor or ScalarType: fp32, bf16 or fp16.
template <class T>
Dtype float_dtype(const T& t, const std::string& what) {
  Dtype dtype = dtype_of(t, what.c_str());
  STD_TORCH_CHECK(is_float(dtype), what, " must be fp32, bf16 or fp16");
  return dtype;
}

// The value of an enum whose values, from 0 on, have these names.
template <class E>
E enum_of(std::initializer_list<const char*> names, const std::string& name, const char* op,
          const char* what) {
  auto at = std::find(names.begin(), names.end(), name);
  STD_TORCH_CHECK(at != names.end(), op, what, ", got ", name);
  return static_cast<E>(at - names.begin());
}

inline bool on_cpu(const Tensor& t) {
  return t.device().type() == torch::headeronly::DeviceType::CPU;
}

// On one device. The dispatcher calls a CPU kernel only if all tensors are on the CPU.
inline bool same_device(const Tensor& a, const Tensor& b) { return a.device() == b.device(); }

inline float* fp32_of(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }
inline const float* read_fp32(const Tensor& t) {
  return static_cast<const float*>(t.const_data_ptr());
}

// One element of `type` on the device of `beside`.
inline void check_scalar(const Tensor& t, ScalarType type, const Tensor& beside, const char* op,
                         const char* name) {
  STD_TORCH_CHECK(t.numel() == 1 && t.scalar_type() == type && same_device(t, beside), op, ": ",
                  name, " must hold one element of the right dtype on the device of the others");
}

// int64 [1] on the device of `beside`.
inline bool is_int64(const Tensor& t, const Tensor& beside) {
  return t.dim() == 1 && t.numel() == 1 && t.scalar_type() == ScalarType::Long &&
         same_device(t, beside);
}

inline float read_scalar(const MaybeTensor& t, float otherwise, const char* op, const char* name) {
  if (!t.has_value()) return otherwise;
  check_scalar(*t, ScalarType::Float, *t, op, name);
  return *read_fp32(*t);
}

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

inline bool has_shape(const Tensor& t, Sizes sizes) {
  auto actual = t.sizes();
  return std::equal(actual.begin(), actual.end(), sizes.begin(), sizes.end());
}

// A contiguous tensor that is overwritten, with one row per tensor of a list.
inline void check_table(const Tensor& t, ScalarType type, std::initializer_list<int64_t> shape,
                        const Tensor& beside, const char* op, const char* name) {
  STD_TORCH_CHECK(
      has_shape(t, Sizes(shape.begin(), shape.size())) && t.scalar_type() == type &&
          same_device(t, beside) && t.is_contiguous(),
      op, ": ", name,
      " must be a contiguous table of the right dtype on the device of the others, with "
      "one row per tensor");
}

// (M, K): leading dimensions flattened.
inline std::pair<int64_t, int64_t> as_matrix(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, x.dim() == 0 ? 1 : x.size(x.dim() - 1)};
}

inline bool same_shape(const Tensor& a, const Tensor& b) { return has_shape(a, b.sizes()); }

// No two elements share memory: sorted by stride, each dimension steps beyond all smaller ones.
// (This also refuses interleaved layouts without overlap; torch's own views produce none.)
inline bool is_writable(const Tensor& t) {
  if (t.is_contiguous()) return true;
  auto sizes = t.sizes(), strides = t.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 0;
  for (auto [stride, size] : dims) {
    if (stride <= extent) return t.numel() == 0;
    extent += (size - 1) * stride;
  }
  return true;
}

// The elements fill a range of memory without gaps, in any order of dimensions.
inline bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  auto sizes = t.sizes(), strides = t.strides();
  int64_t expected = 1;
  for (size_t done = 0; done < sizes.size(); ++done) {
    size_t i = 0;
    while (i < sizes.size() && (sizes[i] == 1 || strides[i] != expected)) ++i;
    if (i == sizes.size()) break;
    expected *= sizes[i];
  }
  return expected == t.numel();
}

inline bool same_strides(const Tensor& a, const Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  auto sizes = a.sizes(), x = a.strides(), y = b.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && x[i] != y[i]) return false;
  }
  return true;
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

// The result of an allocation. torch's functions for other libraries lose the reason of a failure:
// why() names it, in the words that programs look for which try again with less.
template <class F, class Why>
Tensor allocated(const F& make, const Why& why) {
  try {
    return make();
  } catch (const std::exception&) {
    STD_TORCH_CHECK(false, why(), " for a result of mixprec, or a contiguous copy of an argument");
    throw;
  }
}

inline const char* no_cpu_memory() { return "DefaultCPUAllocator: can't allocate memory"; }

// Asks for huge pages in memory that is about to be written: of fresh pages of 4 KiB, the system
// takes longer to provide one than a kernel to fill it. Of whole huge pages of the result alone, so
// that no more memory is in use. Where the system has none, nothing happens.
inline void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2 << 20;
  uintptr_t start = reinterpret_cast<uintptr_t>(data);
  uintptr_t first = (start + kHuge - 1) / kHuge * kHuge;
  uintptr_t end = (start + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

// torch::stable::empty finds its op by name at every call.
inline Tensor empty(Sizes sizes, ScalarType type) {
  auto make = [&] {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i > 1; --i) {
      strides[i - 2] = strides[i - 1] * std::max<int64_t>(1, sizes[i - 1]);
    }
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
        torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
        aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
  };
  Tensor t = allocated(make, no_cpu_memory);
  prefer_huge_pages(t.mutable_data_ptr(), t.numel() * static_cast<int64_t>(t.element_size()));
  return t;
}

// A copy, unless t is contiguous.
inline Tensor to_contiguous(const Tensor& t) {
  return allocated([&] { return torch::stable::contiguous(t); }, no_cpu_memory);
}

inline Tensor row_major(const Tensor& t) { return t.is_contiguous() ? t : to_contiguous(t); }

// A copy, unless the elements of the last dimension are adjacent.
inline Tensor dense_rows(const Tensor& t) {
  int64_t last = t.dim() - 1;
  return t.size(last) < 2 || t.stride(last) == 1 ? t : to_contiguous(t);
}

inline Tensor empty_scalar(float value) {
  Tensor t = empty({}, ScalarType::Float);
  *static_cast<float*>(t.mutable_data_ptr()) = value;
  return t;
}

}  // namespace mixprec
