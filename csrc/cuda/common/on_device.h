// Shared by the launchers: the device and stream of an op, and checks that tensors are on it.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "arguments/check.h"
#include "cuda/common/launch.h"

namespace mixprec::cuda {

using Tensors = std::vector<Tensor>;

// Makes the device of `t` current while this object exists: that GPU, and its current stream.
class OnDevice : public Gpu {
 public:
  explicit OnDevice(const Tensor& t) : guard_(checked(t).get_device_index()) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
    cudaError_t error =
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, t.get_device_index());
    STD_TORCH_CHECK(error == cudaSuccess, "mixprec: CUDA: ", cudaGetErrorString(error));
  }

 private:
  static const Tensor& checked(const Tensor& t) {
    STD_TORCH_CHECK(t.is_cuda(), "mixprec: all tensors must be on one CUDA device");
    return t;
  }

  torch::stable::accelerator::DeviceGuard guard_;
};

// Raises the error of an op's launches, or one that an earlier launch left behind.
inline void check_launch(cudaError_t error, const char* op) {
  cudaError_t last = cudaGetLastError();  // also clears it
  if (error == cudaSuccess) error = last;
  STD_TORCH_CHECK(error == cudaSuccess, op, ": CUDA: ", cudaGetErrorString(error));
}

// Null for an argument that is not given.
inline const float* scalar_on(const MaybeTensor& t, const Tensor& beside, const char* op,
                              const char* name) {
  if (!t.has_value()) return nullptr;
  check_scalar(*t, ScalarType::Float, beside, op, name);
  return read_fp32(*t);
}

// torch's allocator clears the error of an allocation: one that is left is of an earlier kernel.
inline const char* no_memory() {
  cudaError_t last = cudaGetLastError();
  bool other = last != cudaSuccess && last != cudaErrorMemoryAllocation;
  return other ? cudaGetErrorString(last) : "CUDA out of memory";
}

inline Tensor empty_on(const Tensor& other, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                       ScalarType type) {
  auto make = [&] { return torch::stable::empty(sizes, type, std::nullopt, other.device()); };
  return allocated(make, no_memory);
}

inline Tensor words_on(const Tensor& x, int64_t count) {
  return empty_on(x, {count}, ScalarType::Int);
}
inline uint32_t* words_of(const Tensor& t) { return static_cast<uint32_t*>(t.mutable_data_ptr()); }

inline Tensor to_contiguous(const Tensor& t) {
  return allocated([&] { return torch::stable::contiguous(t); }, no_memory);
}

inline Tensor row_major(const Tensor& t) { return t.is_contiguous() ? t : to_contiguous(t); }
inline Tensor dense(const Tensor& t) { return is_dense(t) ? t : to_contiguous(t); }

// Copies what a kernel wrote to `copy`, which may be the tensor itself.
inline void write_back(const Tensor& original, const Tensor& copy) {
  Tensor target = original;
  if (copy.get() != original.get()) torch::stable::copy_(target, copy);
}

}  // namespace mixprec::cuda
