// The launcher of every optimizer's update: check, launch, write back. The formula is Rule.
#pragma once

#include <string>

#include "cuda/optim/param_bundles.h"

namespace mixprec::cuda {

template <class Rule>
void update_(Tensors params, Tensors grads, Tensors states, Tensors state_scales, Tensors masters,
             Tensor steps, double lr, std::vector<double> settings, bool maximize, double max_value,
             bool stochastic_rounding, int64_t seed, std::vector<int64_t> indices,
             MaybeTensor lr_tensor, MaybeTensor inv_scale, MaybeTensor clip,
             MaybeTensor found_inf) {
  const char* op = Rule::kName;
  STD_TORCH_CHECK(settings.size() == kSettings<Rule>, op, ": settings must have ", kSettings<Rule>,
                  " numbers");
  Rule rule = make_rule<Rule>(lr, settings.data());
  UpdateLists lists = {
      op,     params, grads, states, state_scales, masters, steps, max_value, stochastic_rounding,
      indices};
  ParamBundles bundles(lists);
  int count = lists.states_each();
  STD_TORCH_CHECK(params.empty() || count == Rule::states(rule.variant(count, 1)), op,
                  ": states must have one tensor per state and param");
  StepArgs args = {};
  args.inv_scale = scalar_on(inv_scale, steps, op, "inv_scale");
  args.clip = scalar_on(clip, steps, op, "clip");
  args.found_inf = scalar_on(found_inf, steps, op, "found_inf");
  args.max_value = max_value;
  args.maximize = maximize;
  args.stochastic_rounding = stochastic_rounding;
  args.seed = seed;
  if (lr_tensor.has_value() && lr_tensor->scalar_type() == ScalarType::Double) {
    check_scalar(*lr_tensor, ScalarType::Double, steps, op, "lr_tensor");
    args.lr_f64 = static_cast<const double*>(lr_tensor->const_data_ptr());
  } else {
    args.lr_f32 = scalar_on(lr_tensor, steps, op, "lr_tensor");
  }
  if (steps.numel() == 0) return;

  OnDevice device(steps);
  args.steps = static_cast<float*>(steps.mutable_data_ptr());
  std::vector<StepTensor> tensors = bundles.tensors();
  int64_t bytes = static_cast<int64_t>(tensors.size() * sizeof(StepOfTensor<Rule>));
  static_assert(sizeof(StepOfTensor<Rule>) % sizeof(double) == 0);
  Tensor scratch = empty_on(steps, {bytes / int64_t{sizeof(double)}}, ScalarType::Double);
  auto* of_tensors = static_cast<StepOfTensor<Rule>*>(scratch.mutable_data_ptr());
  check_launch(step(tensors, rule, args, of_tensors, device.sms, device.stream), Rule::kName);
  bundles.write_back();
}

}  // namespace mixprec::cuda
