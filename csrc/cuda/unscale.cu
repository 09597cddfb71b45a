// unscale_ and grad_stats_ on CUDA tensors.
#include "cuda/grad_stats.cuh"
#include "cuda/on_device.h"
#include "cuda/unscale.cuh"

namespace mixprec::cuda {

namespace {

Dtype check_grad(const Tensor& grad, const Tensor& found_inf, const char* what) {
  Dtype dtype = dtype_of(grad, what);
  STD_TORCH_CHECK(!is_fp8(dtype) && on_device_of(grad, found_inf), what,
                  " must be floating point on found_inf's device");
  return dtype;
}

void unscale_(Tensors grads, Tensor inv_scale, Tensor found_inf) {
  check_scalar_on(found_inf, ScalarType::Float, found_inf, "unscale_: found_inf");
  check_scalar_on(inv_scale, ScalarType::Float, found_inf, "unscale_: inv_scale");
  std::vector<Dtype> dtypes;
  for (const Tensor& grad : grads) {
    dtypes.push_back(check_grad(grad, found_inf, "unscale_: a gradient"));
    STD_TORCH_CHECK(is_writable(grad), "unscale_: the elements of a gradient share memory");
  }
  if (grads.empty()) return;

  OnDevice device(found_inf);
  Tensors flat;
  GradList list;
  for (size_t i = 0; i < grads.size(); ++i) {
    flat.push_back(dense(grads[i]));
    list.push_back({dtypes[i], flat[i].mutable_data_ptr(), flat[i].numel()});
  }
  check_launch(
      unscale(list, static_cast<const float*>(inv_scale.const_data_ptr()),
              static_cast<float*>(found_inf.mutable_data_ptr()), device.sms, device.stream),
      "unscale_");
  for (size_t i = 0; i < grads.size(); ++i) {
    if (flat[i].get() != grads[i].get()) torch::stable::copy_(grads[i], flat[i]);
  }
}

void grad_stats_(Tensors grads, MaybeTensor inv_scale, Tensor found_inf, Tensor sum_sq) {
  check_scalar_on(found_inf, ScalarType::Float, found_inf, "grad_stats_: found_inf");
  check_scalar_on(sum_sq, ScalarType::Double, found_inf, "grad_stats_: sum_sq");
  GradStats stats = {};
  stats.inv_scale = scalar_on(inv_scale, found_inf, "grad_stats_: inv_scale");
  stats.found_inf = static_cast<float*>(found_inf.mutable_data_ptr());
  stats.sum_sq = static_cast<double*>(sum_sq.mutable_data_ptr());
  std::vector<Dtype> dtypes;
  for (const Tensor& grad : grads) {
    dtypes.push_back(check_grad(grad, found_inf, "grad_stats_: a gradient"));
  }

  OnDevice device(found_inf);
  GradList list;
  for (size_t i = 0; i < grads.size(); ++i) {
    grads[i] = dense(grads[i]);
    list.push_back({dtypes[i], const_cast<void*>(grads[i].const_data_ptr()), grads[i].numel()});
  }
  int64_t chunks = grad_stats_chunks(list);
  STD_TORCH_CHECK(chunks < INT32_MAX, "grad_stats_: too many elements in all");
  // One more, for the counter.
  Tensor scratch = empty_on(found_inf, {chunks + 1}, ScalarType::Double);
  stats.partials = static_cast<double*>(scratch.mutable_data_ptr());
  stats.done = reinterpret_cast<unsigned*>(stats.partials + chunks);
  cudaError_t error = cudaMemsetAsync(stats.done, 0, sizeof(double), device.stream);
  if (error == cudaSuccess) error = grad_stats(list, stats, device.sms, device.stream);
  check_launch(error, "grad_stats_");
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("unscale_", TORCH_BOX(&mixprec::cuda::unscale_));
  m.impl("grad_stats_", TORCH_BOX(&mixprec::cuda::grad_stats_));
}
