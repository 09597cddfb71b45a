// adamw_, sgd_, lion_ and muon_direction_: the parallel loop over all params.
#include "math/step.h"

#include "arguments/step.h"
#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

class Step {
 public:
  // Checks all arguments; nothing is written before run.
  Step(UpdateLists lists, int64_t seed)
      : lists_(std::move(lists)), seed_(seed), checked_(UpdateCheck(lists_).run()) {}

  // The number of arrays of state that each param has.
  int states() const { return lists_.states_each(); }

  // Counts the step and updates all elements of all params on all threads.
  template <class Rule>
  void run(const Rule& rule, const GradSettings& grad, StepLoop<Rule> loop) {
    prepare();
    // Adjacent params usually have the same step count: reuse its constants.
    std::vector<std::pair<int, StepConstants<Rule>>> constants;
    std::vector<int32_t> constants_of(arrays_.size());
    for (size_t i = 0; i < arrays_.size(); ++i) {
      int64_t step = arrays_[i].step;
      if (i == 0 || step != arrays_[i - 1].step) {
        constants.emplace_back(rule.variant(states(), step), step_constants(rule, grad, step));
      }
      constants_of[i] = static_cast<int32_t>(constants.size()) - 1;
    }
    for_pieces(cut(lists_.params), [&](int64_t, const Piece& p) {
      const auto& [variant, scalars] = constants[constants_of[p.tensor]];
      loop(arrays_[p.tensor], p.begin, p.end, variant, scalars);
    });
    for (auto& [original, copy] : copies_) torch::stable::copy_(original, copy);
  }

 private:
  void prepare();
  void flatten(size_t i);

  UpdateLists lists_;
  int64_t seed_;
  std::vector<CheckedParam> checked_;
  std::vector<StepArrays> arrays_;
  std::vector<std::pair<Tensor, Tensor>> copies_;  // original, contiguous copy
};

// Makes the tensors of param i flat ranges in one common order, which is row-major if random bits
// are drawn. Tensors that were copied for this and are written are copied back later.
void Step::flatten(size_t i) {
  UpdateLists& a = lists_;
  std::vector<Tensor*> written{&a.params[i]};
  for (int s = 0; s < states(); ++s) written.push_back(&a.states[a.place(s, i)]);
  if (!a.masters.empty()) written.push_back(&a.masters[i]);
  const Tensor& param = a.params[i];
  bool flat = !checked_[i].random && is_dense(param) && same_strides(param, a.grads[i]);
  for (const Tensor* t : written) flat = flat && same_strides(param, *t);
  if (flat) return;
  a.grads[i] = to_contiguous(a.grads[i]);
  for (Tensor* t : written) {
    if (t->is_contiguous()) continue;
    Tensor original = *t;
    *t = to_contiguous(original);
    copies_.emplace_back(original, *t);
  }
}

void Step::prepare() {
  UpdateLists& a = lists_;
  float* counts = fp32_of(a.steps);
  arrays_.resize(checked_.size());
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const CheckedParam& checked = checked_[i];
    if (!checked.contiguous) flatten(i);
    StepArrays& arrays = arrays_[i];
    arrays.param_dtype = checked.param, arrays.grad_dtype = checked.grad;
    arrays.master_dtype = checked.master, arrays.stochastic = checked.stochastic;
    arrays.param = a.params[i].mutable_data_ptr();
    arrays.grad = a.grads[i].const_data_ptr();
    for (int s = 0; s < states(); ++s) {
      size_t place = a.place(s, i);
      arrays.state_dtype[s] = checked.state[s];
      arrays.state[s] = a.states[place].mutable_data_ptr();
      if (checked.state[s] == Dtype::u8) arrays.scale[s] = fp32_of(a.state_scales[place]);
    }
    if (!a.masters.empty()) arrays.master = a.masters[i].mutable_data_ptr();
    counts[i] += 1.0f;
    arrays.step = static_cast<int64_t>(counts[i]);
    arrays.seed = seed_;
    arrays.index = a.indices.empty() ? 0 : a.indices[i];
  }
}

double read_lr(double lr, const MaybeTensor& lr_tensor, const char* op) {
  if (!lr_tensor.has_value()) return lr;
  const Tensor& t = *lr_tensor;
  bool wide = t.scalar_type() == ScalarType::Double;
  check_scalar(t, wide ? ScalarType::Double : ScalarType::Float, t, op, "lr_tensor");
  const void* data = t.const_data_ptr();
  return wide ? *static_cast<const double*>(data) : *static_cast<const float*>(data);
}

template <class Rule, StepLoop<Rule> Loops::* loop>
void update_(TensorList params, TensorList grads, TensorList states, TensorList state_scales,
             TensorList masters, Tensor steps, double lr, std::vector<double> settings,
             bool maximize, double max_value, bool stochastic_rounding, int64_t seed,
             std::vector<int64_t> indices, MaybeTensor lr_tensor, MaybeTensor inv_scale,
             MaybeTensor clip, MaybeTensor found_inf) {
  const char* op = Rule::kName;
  STD_TORCH_CHECK(settings.size() == kSettings<Rule>, op, ": settings must have ", kSettings<Rule>,
                  " numbers");
  Rule rule = make_rule<Rule>(read_lr(lr, lr_tensor, op), settings.data());
  GradSettings grad = {read_scalar(inv_scale, 1.0f, op, "inv_scale"),
                       read_scalar(clip, 1.0f, op, "clip"), max_value, maximize};
  bool skipped = read_scalar(found_inf, 0.0f, op, "found_inf") != 0.0f;
  bool none = params.empty();
  Step step({op, std::move(params), std::move(grads), std::move(states), std::move(state_scales),
             std::move(masters), steps, max_value, stochastic_rounding, std::move(indices)},
            seed);
  int count = step.states();
  STD_TORCH_CHECK(none || count == Rule::states(rule.variant(count, 1)), op,
                  ": states must have one tensor per state and param");
  if (!skipped) step.run(rule, grad, loops().*loop);
}

constexpr auto adamw_ = &update_<AdamW, &Loops::adamw>;
constexpr auto sgd_ = &update_<Sgd, &Loops::sgd>;
constexpr auto lion_ = &update_<Lion, &Loops::lion>;
constexpr auto muon_direction_ = &update_<MuonDirection, &Loops::muon_direction>;

}  // namespace

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("adamw_", TORCH_BOX(mixprec::cpu::adamw_));
  m.impl("sgd_", TORCH_BOX(mixprec::cpu::sgd_));
  m.impl("lion_", TORCH_BOX(mixprec::cpu::lion_));
  m.impl("muon_direction_", TORCH_BOX(mixprec::cpu::muon_direction_));
}
