// adamw_, sgd_, lion_ and muon_direction_ on CUDA tensors.
#include <array>

#include "arguments/step.h"
#include "cuda/common/on_device.h"
#include "cuda/optim/step.cuh"
#include "math/step.h"

namespace mixprec::cuda {

namespace {

// One param with its grad, master and states; flat: what the kernels read and write.
struct Bundle {
  std::array<MaybeTensor, kStepArrays> at, flat;
  StepTensor args;
};

// The tensors of param i in one memory order without gaps. Must be called with the params' device
// as the current one.
Bundle bundle_of(const UpdateLists& lists, size_t i, const CheckedParam& c) {
  Bundle bundle = {};
  auto& [at, flat, args] = bundle;
  at[kParam] = lists.params[i], at[kGrad] = lists.grads[i];
  if (!lists.masters.empty()) at[kMaster] = lists.masters[i];
  for (int k = 0; k < lists.states_each(); ++k) {
    at[kState + k] = lists.states[lists.place(k, i)];
    if (c.state[k] == Dtype::u8) at[kScale + k] = lists.state_scales[lists.place(k, i)];
  }
  const Tensor& param = lists.params[i];
  bool same_order = c.random ? param.is_contiguous() : is_dense(param);
  for (int a = 0; a < kScale; ++a) {
    same_order = same_order && (!at[a].has_value() || same_strides(param, *at[a]));
  }
  args = {{},
          {c.param, c.grad, c.master, c.state[0], c.state[1], Dtype::f32, Dtype::f32},
          param.numel(),
          lists.indices.empty() ? 0 : lists.indices[i]};
  for (int a = 0; a < kStepArrays; ++a) {
    if (!at[a].has_value()) continue;
    flat[a] = same_order ? at[a] : row_major(*at[a]);
    args.data[a] =
        a == kGrad ? const_cast<void*>(flat[a]->const_data_ptr()) : flat[a]->mutable_data_ptr();
  }
  return bundle;
}

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
  std::vector<CheckedParam> checked = UpdateCheck(lists).run();
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
  std::vector<Bundle> bundles;
  std::vector<StepTensor> tensors;
  for (size_t i = 0; i < params.size(); ++i) {
    tensors.push_back(bundles.emplace_back(bundle_of(lists, i, checked[i])).args);
  }
  int64_t bytes = static_cast<int64_t>(tensors.size() * sizeof(StepOfTensor<Rule>));
  static_assert(sizeof(StepOfTensor<Rule>) % sizeof(double) == 0);
  Tensor scratch = empty_on(steps, {bytes / int64_t{sizeof(double)}}, ScalarType::Double);
  auto* of_tensors = static_cast<StepOfTensor<Rule>*>(scratch.mutable_data_ptr());
  check_launch(step(tensors, rule, args, of_tensors, device), op);
  for (const Bundle& bundle : bundles) {
    for (int a = 0; a < kStepArrays; ++a) {
      if (a != kGrad && bundle.at[a].has_value()) write_back(*bundle.at[a], *bundle.flat[a]);
    }
  }
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("adamw_", TORCH_BOX(&mixprec::cuda::update_<mixprec::AdamW>));
  m.impl("sgd_", TORCH_BOX(&mixprec::cuda::update_<mixprec::Sgd>));
  m.impl("lion_", TORCH_BOX(&mixprec::cuda::update_<mixprec::Lion>));
  m.impl("muon_direction_", TORCH_BOX(&mixprec::cuda::update_<mixprec::MuonDirection>));
}
