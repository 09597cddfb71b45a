// adamw_ on CUDA tensors.
#include "cuda/adamw.cuh"
#include "cuda/on_device.h"

namespace mixprec::cuda {

namespace {

// params[i] with the tensors beside it; master is absent for all i or for none.
struct Row {
  Tensor param, grad, exp_avg, exp_avg_sq;
  MaybeTensor master;
};

void check_state(const Tensor& t, ScalarType real, const Tensor& param) {
  STD_TORCH_CHECK(
      t.scalar_type() == real && same_shape(t, param) && on_device_of(t, param) && is_writable(t),
      "adamw_: state and masters must be fp32 (fp64 for an fp64 param), of their "
      "param's shape, on its device, writable");
}

void check_row(const Row& row, const Tensor& step, const Tensor& first) {
  Dtype p = dtype_of(row.param, "adamw_: a param"), g = dtype_of(row.grad, "adamw_: a grad");
  STD_TORCH_CHECK(!is_fp8(p) && on_device_of(row.param, first) && is_writable(row.param),
                  "adamw_: a param must be floating point, on the first one's device, writable");
  STD_TORCH_CHECK((p == Dtype::f64 ? g == Dtype::f64 : is_float(g)) &&
                      same_shape(row.grad, row.param) && on_device_of(row.grad, row.param),
                  "adamw_: a grad must have its param's shape, be on its device and be fp32, bf16 "
                  "or fp16 (fp64 for an fp64 param)");
  ScalarType real = p == Dtype::f64 ? ScalarType::Double : ScalarType::Float;
  check_state(row.exp_avg, real, row.param);
  check_state(row.exp_avg_sq, real, row.param);
  if (row.master.has_value()) check_state(*row.master, real, row.param);
  check_scalar_on(step, ScalarType::Float, first, "adamw_: a step");
}

// All tensors of a row in one memory order without gaps.
bool is_flat(const Row& row) {
  auto fits = [&](const Tensor& t) { return same_strides(row.param, t); };
  return is_dense(row.param) && fits(row.grad) && fits(row.exp_avg) && fits(row.exp_avg_sq) &&
         (!row.master.has_value() || fits(*row.master));
}

Row row_major_row(const Row& row) {
  Row flat = {row_major(row.param), row_major(row.grad), row_major(row.exp_avg),
              row_major(row.exp_avg_sq), row.master};
  if (row.master.has_value()) flat.master = row_major(*row.master);
  return flat;
}

void write_back(const Tensor& original, const Tensor& copy) {
  Tensor target = original;
  if (copy.get() != original.get()) torch::stable::copy_(target, copy);
}

AdamWTensor pointers(const Row& row, const Tensor& step) {
  return {dtype_of(row.param, "adamw_: a param"),
          dtype_of(row.grad, "adamw_: a grad"),
          row.param.mutable_data_ptr(),
          row.grad.const_data_ptr(),
          row.exp_avg.mutable_data_ptr(),
          row.exp_avg_sq.mutable_data_ptr(),
          row.master.has_value() ? row.master->mutable_data_ptr() : nullptr,
          static_cast<float*>(step.mutable_data_ptr()),
          row.param.numel()};
}

void adamw_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors masters,
            Tensors steps, double lr, double beta1, double beta2, double eps, double weight_decay,
            bool maximize, MaybeTensor inv_scale, MaybeTensor clip, MaybeTensor found_inf) {
  size_t count = params.size();
  STD_TORCH_CHECK(
      grads.size() == count && exp_avgs.size() == count && exp_avg_sqs.size() == count &&
          steps.size() == count && (masters.empty() || masters.size() == count),
      "adamw_: grads, exp_avgs, exp_avg_sqs, masters and steps must have one tensor per "
      "param");
  if (count == 0) return;
  const Tensor& first = params[0];
  std::vector<Row> rows;
  for (size_t i = 0; i < count; ++i) {
    rows.push_back({params[i], grads[i], exp_avgs[i], exp_avg_sqs[i],
                    masters.empty() ? MaybeTensor() : MaybeTensor(masters[i])});
    check_row(rows[i], steps[i], first);
  }
  AdamWScalarInputs inputs = {scalar_on(inv_scale, first, "adamw_: inv_scale"),
                              scalar_on(clip, first, "adamw_: clip"),
                              scalar_on(found_inf, first, "adamw_: found_inf")};

  OnDevice device(first);
  std::vector<Row> flat;
  std::vector<AdamWTensor> tensors;
  for (size_t i = 0; i < count; ++i) {
    flat.push_back(is_flat(rows[i]) ? rows[i] : row_major_row(rows[i]));
    tensors.push_back(pointers(flat[i], steps[i]));
  }
  int64_t doubles = static_cast<int64_t>(count * sizeof(AdamWConstants) / sizeof(double));
  Tensor constants = empty_on(first, {doubles}, ScalarType::Double);
  AdamWSettings settings = {lr, beta1, beta2, eps, weight_decay, 1.0, 1.0};
  check_launch(
      adamw(tensors, settings, maximize, inputs,
            static_cast<AdamWConstants*>(constants.mutable_data_ptr()), device.sms, device.stream),
      "adamw_");
  for (size_t i = 0; i < count; ++i) {
    write_back(params[i], flat[i].param);
    write_back(exp_avgs[i], flat[i].exp_avg);
    write_back(exp_avg_sqs[i], flat[i].exp_avg_sq);
    if (!masters.empty()) write_back(masters[i], *flat[i].master);
  }
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) { m.impl("adamw_", TORCH_BOX(&mixprec::cuda::adamw_)); }
