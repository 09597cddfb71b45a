// What all optimizers' launchers do: check, launch, write back.
#pragma once

#include <string>

#include "cuda/optim/param_bundles.h"

namespace mixprec::cuda {

// The end of every update's signature.
struct StepCall {
  bool maximize;
  double max_value;
  bool stochastic_rounding;
  int64_t seed;
  const std::vector<int64_t>& indices;
  const MaybeTensor &lr_tensor, &inv_scale, &clip, &found_inf;
};

template <class Rule>
void launch_step(const StepLists& lists, const Rule& rule, const StepCall& call) {
  const Tensor& steps = lists.steps;
  const std::string op = lists.op;
  ParamBundles bundles(lists, call.max_value, call.stochastic_rounding, call.indices);
  StepArgs args = {};
  args.inv_scale = scalar_on(call.inv_scale, steps, (op + ": inv_scale").c_str());
  args.clip = scalar_on(call.clip, steps, (op + ": clip").c_str());
  args.found_inf = scalar_on(call.found_inf, steps, (op + ": found_inf").c_str());
  args.max_value = call.max_value;
  args.maximize = call.maximize;
  args.stochastic_rounding = call.stochastic_rounding;
  args.seed = call.seed;
  if (call.lr_tensor.has_value() && call.lr_tensor->scalar_type() == ScalarType::Double) {
    check_scalar_on(*call.lr_tensor, ScalarType::Double, steps, (op + ": lr_tensor").c_str());
    args.lr_f64 = static_cast<const double*>(call.lr_tensor->const_data_ptr());
  } else {
    args.lr_f32 = scalar_on(call.lr_tensor, steps, (op + ": lr_tensor").c_str());
  }
  if (steps.numel() == 0) return;

  OnDevice device(steps);
  args.steps = static_cast<float*>(steps.mutable_data_ptr());
  std::vector<StepTensor> tensors = bundles.tensors();
  int64_t bytes = static_cast<int64_t>(tensors.size() * sizeof(StepConstants<Rule>));
  static_assert(sizeof(StepConstants<Rule>) % sizeof(double) == 0);
  Tensor constants = empty_on(steps, {bytes / int64_t{sizeof(double)}}, ScalarType::Double);
  check_launch(
      step(tensors, rule, args, static_cast<StepConstants<Rule>*>(constants.mutable_data_ptr()),
           device.sms, device.stream),
      lists.op);
  bundles.write_back();
}

}  // namespace mixprec::cuda
