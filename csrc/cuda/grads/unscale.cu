// unscale_ and grad_stats_ on CUDA tensors.
#include "arguments/step.h"
#include "cuda/common/on_device.h"
#include "cuda/grads/unscale.cuh"

namespace mixprec::cuda {

namespace {

int64_t* counts_of(const MaybeTensor& counts) {
  return counts.has_value() ? static_cast<int64_t*>(counts->mutable_data_ptr()) : nullptr;
}

// Scratch for `numbers` 8-byte values per chunk of the list.
Tensor chunk_scratch(const GradList& list, const Tensor& found_inf, int numbers, const char* op) {
  int64_t chunks = chunks_in(list);
  STD_TORCH_CHECK(chunks < INT32_MAX, op, ": too many elements in all");
  return empty_on(found_inf, {numbers * chunks}, ScalarType::Double);
}

void unscale_(Tensors grads, Tensor inv_scale, Tensor found_inf, MaybeTensor counts) {
  std::vector<Dtype> dtypes = check_grads(grads, inv_scale, found_inf, counts, "unscale_");
  check_written(grads, "unscale_");
  if (grads.empty()) return;

  OnDevice device(found_inf);
  int64_t* counted = counts_of(counts);
  Tensors flat;
  GradList list;
  for (size_t i = 0; i < grads.size(); ++i) {
    flat.push_back(dense(grads[i]));
    list.push_back({dtypes[i], flat[i].mutable_data_ptr(), flat[i].numel()});
  }
  Tensor scratch = chunk_scratch(list, found_inf, counted != nullptr ? 1 : 0, "unscale_");
  ChunkStats chunks = {nullptr, static_cast<uint64_t*>(scratch.mutable_data_ptr())};
  check_launch(unscale(list, read_fp32(inv_scale), fp32_of(found_inf), counted, chunks, device),
               "unscale_");
  for (size_t i = 0; i < grads.size(); ++i) write_back(grads[i], flat[i]);
}

void grad_stats_(Tensors grads, MaybeTensor inv_scale, Tensor found_inf, Tensor sum_sq,
                 MaybeTensor counts) {
  std::vector<Dtype> dtypes = check_grads(grads, inv_scale, found_inf, counts, "grad_stats_");
  check_table(sum_sq, ScalarType::Double, {static_cast<int64_t>(grads.size())}, found_inf,
              "grad_stats_", "sum_sq");
  if (grads.empty()) return;

  OnDevice device(found_inf);
  int64_t* counted = counts_of(counts);
  GradList list;
  for (size_t i = 0; i < grads.size(); ++i) {
    grads[i] = dense(grads[i]);
    list.push_back({dtypes[i], const_cast<void*>(grads[i].const_data_ptr()), grads[i].numel()});
  }
  Tensor scratch = chunk_scratch(list, found_inf, counted != nullptr ? 2 : 1, "grad_stats_");
  double* sums = static_cast<double*>(scratch.mutable_data_ptr());
  ChunkStats chunks = {sums, reinterpret_cast<uint64_t*>(sums + chunks_in(list))};
  const float* s = inv_scale.has_value() ? read_fp32(*inv_scale) : nullptr;
  check_launch(grad_stats(list, s, fp32_of(found_inf),
                          static_cast<double*>(sum_sq.mutable_data_ptr()), counted, chunks, device),
               "grad_stats_");
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("unscale_", TORCH_BOX(&mixprec::cuda::unscale_));
  m.impl("grad_stats_", TORCH_BOX(&mixprec::cuda::grad_stats_));
}
