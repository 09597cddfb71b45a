// unscale_ and grad_stats_ on CUDA tensors.
#include "cuda/common/on_device.h"
#include "cuda/grads/grad_stats.cuh"
#include "cuda/grads/unscale.cuh"
#include "overlap.h"

namespace mixprec::cuda {

namespace {

Dtype check_grad(const Tensor& grad, const Tensor& found_inf, const char* what) {
  Dtype dtype = dtype_of(grad, what);
  STD_TORCH_CHECK(!is_fp8(dtype) && on_device_of(grad, found_inf), what,
                  " must be floating point on found_inf's device");
  return dtype;
}

// int64 [grads, 4]; null if it is not given.
int64_t* counts_on(const MaybeTensor& counts, const Tensors& grads, const Tensor& found_inf,
                   const char* what) {
  if (!counts.has_value()) return nullptr;
  STD_TORCH_CHECK(counts->scalar_type() == ScalarType::Long && counts->dim() == 2 &&
                      counts->size(0) == static_cast<int64_t>(grads.size()) &&
                      counts->size(1) == kKinds && counts->is_contiguous() &&
                      on_device_of(*counts, found_inf),
                  what, " must be int64 [grads, 4], contiguous, on found_inf's device");
  return static_cast<int64_t*>(counts->mutable_data_ptr());
}

// Scratch for `numbers` 8-byte values per chunk of the list.
Tensor chunk_scratch(const GradList& list, const Tensor& found_inf, int numbers, const char* op) {
  int64_t chunks = chunks_in(list);
  STD_TORCH_CHECK(chunks < INT32_MAX, op, ": too many elements in all");
  return empty_on(found_inf, {numbers * chunks}, ScalarType::Double);
}

void unscale_(Tensors grads, Tensor inv_scale, Tensor found_inf, MaybeTensor counts) {
  check_scalar_on(found_inf, ScalarType::Float, found_inf, "unscale_: found_inf");
  check_scalar_on(inv_scale, ScalarType::Float, found_inf, "unscale_: inv_scale");
  int64_t* counted = counts_on(counts, grads, found_inf, "unscale_: counts");
  std::vector<Dtype> dtypes;
  for (const Tensor& grad : grads) {
    dtypes.push_back(check_grad(grad, found_inf, "unscale_: a gradient"));
    STD_TORCH_CHECK(is_writable(grad), "unscale_: the elements of a gradient share memory");
  }
  check_disjoint(grads, "unscale_", "grads");
  if (grads.empty()) return;

  OnDevice device(found_inf);
  Tensors flat;
  GradList list;
  for (size_t i = 0; i < grads.size(); ++i) {
    flat.push_back(dense(grads[i]));
    list.push_back({dtypes[i], flat[i].mutable_data_ptr(), flat[i].numel()});
  }
  Tensor scratch = chunk_scratch(list, found_inf, counted != nullptr ? 1 : 0, "unscale_");
  ChunkStats chunks = {nullptr, static_cast<uint64_t*>(scratch.mutable_data_ptr())};
  check_launch(unscale(list, static_cast<const float*>(inv_scale.const_data_ptr()),
                       static_cast<float*>(found_inf.mutable_data_ptr()), counted, chunks,
                       device.sms, device.stream),
               "unscale_");
  for (size_t i = 0; i < grads.size(); ++i) write_back(grads[i], flat[i]);
}

void grad_stats_(Tensors grads, MaybeTensor inv_scale, Tensor found_inf, Tensor sum_sq,
                 MaybeTensor counts) {
  check_scalar_on(found_inf, ScalarType::Float, found_inf, "grad_stats_: found_inf");
  const float* s = scalar_on(inv_scale, found_inf, "grad_stats_: inv_scale");
  STD_TORCH_CHECK(sum_sq.scalar_type() == ScalarType::Double && sum_sq.dim() == 1 &&
                      sum_sq.numel() == static_cast<int64_t>(grads.size()) &&
                      sum_sq.is_contiguous() && on_device_of(sum_sq, found_inf),
                  "grad_stats_: sum_sq must be fp64 [grads], contiguous, on found_inf's device");
  int64_t* counted = counts_on(counts, grads, found_inf, "grad_stats_: counts");
  std::vector<Dtype> dtypes;
  for (const Tensor& grad : grads) {
    dtypes.push_back(check_grad(grad, found_inf, "grad_stats_: a gradient"));
  }
  if (grads.empty()) return;

  OnDevice device(found_inf);
  GradList list;
  for (size_t i = 0; i < grads.size(); ++i) {
    grads[i] = dense(grads[i]);
    list.push_back({dtypes[i], const_cast<void*>(grads[i].const_data_ptr()), grads[i].numel()});
  }
  Tensor scratch = chunk_scratch(list, found_inf, counted != nullptr ? 2 : 1, "grad_stats_");
  double* sums = static_cast<double*>(scratch.mutable_data_ptr());
  ChunkStats chunks = {sums, reinterpret_cast<uint64_t*>(sums + chunks_in(list))};
  check_launch(grad_stats(list, s, static_cast<float*>(found_inf.mutable_data_ptr()),
                          static_cast<double*>(sum_sq.mutable_data_ptr()), counted, chunks,
                          device.sms, device.stream),
               "grad_stats_");
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("unscale_", TORCH_BOX(&mixprec::cuda::unscale_));
  m.impl("grad_stats_", TORCH_BOX(&mixprec::cuda::grad_stats_));
}
