// adamw_, sgd_, lion_ and muon_direction_: the checks of their arguments and the parallel loop over
// all params. The formulas are the rules in csrc/math.
#include "check.h"
#include "cpu/parallel.h"
#include "cpu/simd/loops.h"
#include "math/state8.h"
#include "overlap.h"

namespace mixprec::cpu {

namespace {

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

constexpr int64_t kMaxIndices = int64_t{1} << 30;  // the two upper bits hold the stream

bool is_shape(const Tensor& t, Sizes sizes) {
  auto own = t.sizes();
  bool same = own.size() == sizes.size();
  for (size_t d = 0; same && d < sizes.size(); ++d) same = own[d] == sizes[d];
  return same;
}

// Checks a tensor that the update writes. Returns whether it is contiguous.
bool check_written(const Tensor& t, Sizes sizes, const char* op, const char* name) {
  bool contiguous = t.is_contiguous();
  STD_TORCH_CHECK(is_shape(t, sizes) && (contiguous || is_writable(t)), op, ": ", name,
                  " must have their params' shapes, and elements that share no memory");
  return contiguous;
}

// The arguments of every update, documented in mixprec/ops/adamw.py.
struct StepArguments {
  const char* op;
  TensorList params, grads, states, state_scales, masters;
  Tensor steps;
  double max_value;
  bool stochastic_rounding;
  int64_t seed;
  std::vector<int64_t> indices;
};

class Step {
 public:
  // Checks all arguments; nothing is written before run.
  explicit Step(StepArguments);

  // The number of arrays of state that each param has.
  int states() const { return states_; }

  // Counts the step and updates all elements of all params on all threads.
  template <class Rule>
  void run(const Rule& rule, const GradSettings& grad, StepLoop<Rule> loop) {
    prepare();
    // Adjacent params usually have the same step count: reuse its constants.
    std::vector<std::pair<int, StepConstants<Rule>>> constants;
    std::vector<int32_t> constants_of(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      int64_t step = rows_[i].arrays.step;
      if (i == 0 || step != rows_[i - 1].arrays.step) {
        constants.emplace_back(rule.variant(states_, step), step_constants(rule, grad, step));
      }
      constants_of[i] = static_cast<int32_t>(constants.size()) - 1;
    }
    for_pieces(cut(arguments_.params), [&](int64_t, const Piece& p) {
      const auto& [variant, scalars] = constants[constants_of[p.tensor]];
      loop(rows_[p.tensor].arrays, p.begin, p.end, variant, scalars);
    });
    for (auto& [original, copy] : copies_) torch::stable::copy_(original, copy);
  }

 private:
  // A param and its tensors, with the results of the checks: computing these twice would be
  // measurable with a thousand small tensors.
  struct Row {
    StepArrays arrays;
    bool contiguous;  // all tensors are, so that no memory order needs matching
    bool random;      // random bits are drawn, in row-major order
  };

  void check_row(size_t i);
  void prepare();
  void flatten(size_t i);

  StepArguments arguments_;
  int states_;
  std::vector<Row> rows_;
  std::vector<std::pair<Tensor, Tensor>> copies_;  // original, contiguous copy
};

Step::Step(StepArguments arguments) : arguments_(std::move(arguments)) {
  const StepArguments& a = arguments_;
  size_t count = a.params.size();
  STD_TORCH_CHECK(a.grads.size() == count && (a.masters.empty() || a.masters.size() == count), a.op,
                  ": grads and masters must have one tensor per param");
  states_ = count == 0 ? 0 : static_cast<int>(a.states.size() / count);
  STD_TORCH_CHECK(states_ <= 2 && a.states.size() == states_ * count &&
                      (a.state_scales.empty() || a.state_scales.size() == a.states.size()),
                  a.op, ": states and state_scales must have one tensor per state and param");
  check_table(a.steps, ScalarType::Float, {static_cast<int64_t>(count)}, a.steps, a.op, "steps");
  STD_TORCH_CHECK(a.max_value > 0, a.op, ": max_value must be positive");

  rows_.resize(count);
  bool random = a.stochastic_rounding;
  for (size_t i = 0; i < count; ++i) {
    check_row(i);
    random = random || rows_[i].random;
  }
  check_disjoint(a.params, a.op, "params");
  STD_TORCH_CHECK(a.indices.size() == count || (a.indices.empty() && !random), a.op,
                  ": indices must have one number per param for stochastic rounding");
  for (int64_t index : a.indices) {
    STD_TORCH_CHECK(index >= 0 && index < kMaxIndices, a.op, ": indices must be in [0, 2^30)");
  }
}

// (Devices are not checked: the dispatcher would not call this with a tensor on another device.)
void Step::check_row(size_t i) {
  const StepArguments& a = arguments_;
  Row& row = rows_[i];
  StepArrays& arrays = row.arrays;
  const Tensor &param = a.params[i], &grad = a.grads[i];
  Sizes sizes = param.sizes();
  arrays.param_dtype = dtype_of(param, "a param of the optimizer's step");
  arrays.grad_dtype = dtype_of(grad, "a grad of the optimizer's step");
  Dtype p = arrays.param_dtype, g = arrays.grad_dtype;
  bool narrow = p != Dtype::f64;
  STD_TORCH_CHECK(!is_fp8(p), a.op, ": params must be fp32, bf16, fp16 or fp64");
  STD_TORCH_CHECK(is_shape(grad, sizes) && (narrow ? is_float(g) : g == Dtype::f64), a.op,
                  ": grads must have their params' shapes and be fp32, bf16 or fp16 (fp64 for "
                  "fp64 params)");
  row.contiguous = check_written(param, sizes, a.op, "params");
  row.contiguous = grad.is_contiguous() && row.contiguous;

  ScalarType real = narrow ? ScalarType::Float : ScalarType::Double;
  for (int s = 0; s < states_; ++s) {
    const Tensor& t = a.states[s * a.params.size() + i];
    ScalarType type = t.scalar_type();
    bool bf16 = narrow && type == ScalarType::BFloat16, u8 = narrow && type == ScalarType::Byte;
    STD_TORCH_CHECK(bf16 || u8 || type == real, a.op,
                    ": states must be fp32, bf16 or uint8 (fp64 for fp64 params)");
    row.contiguous = check_written(t, sizes, a.op, "states") && row.contiguous;
    row.random = row.random || bf16 || u8;
    arrays.state_dtype[s] = bf16 ? Dtype::bf16 : u8 ? Dtype::u8 : narrow ? Dtype::f32 : Dtype::f64;
    if (u8) {
      STD_TORCH_CHECK(!a.state_scales.empty(), a.op,
                      ": state_scales must hold the scales of states in uint8");
      const Tensor& scales = a.state_scales[s * a.params.size() + i];
      check_table(scales, ScalarType::Float, {state8_blocks(t.numel())}, a.steps, a.op,
                  "state_scales");
    }
  }
  if (!a.masters.empty()) {
    const Tensor& t = a.masters[i];
    ScalarType type = t.scalar_type();
    bool remainder = type == ScalarType::Short && p == Dtype::bf16;
    STD_TORCH_CHECK(remainder || type == real, a.op,
                    ": masters must be fp32, or int16 for bf16 params (fp64 for fp64 params)");
    row.contiguous = check_written(t, sizes, a.op, "masters") && row.contiguous;
    arrays.master_kind = remainder ? Master::remainder : Master::real;
  }
  arrays.stochastic = a.stochastic_rounding && a.masters.empty() && p == Dtype::bf16;
  row.random = row.random || arrays.stochastic;
}

// Makes the tensors of param i flat ranges in one common order, which is row-major if random bits
// are drawn. Tensors that were copied for this and are written are copied back later.
void Step::flatten(size_t i) {
  StepArguments& a = arguments_;
  std::vector<Tensor*> written{&a.params[i]};
  for (int s = 0; s < states_; ++s) written.push_back(&a.states[s * a.params.size() + i]);
  if (!a.masters.empty()) written.push_back(&a.masters[i]);
  const Tensor& param = a.params[i];
  bool flat = !rows_[i].random && is_dense(param) && same_strides(param, a.grads[i]);
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
  StepArguments& a = arguments_;
  float* counts = static_cast<float*>(a.steps.mutable_data_ptr());
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (!rows_[i].contiguous) flatten(i);
    StepArrays& arrays = rows_[i].arrays;
    arrays.param = a.params[i].mutable_data_ptr();
    arrays.grad = a.grads[i].const_data_ptr();
    for (int s = 0; s < states_; ++s) {
      size_t place = s * a.params.size() + i;
      arrays.state[s] = a.states[place].mutable_data_ptr();
      if (arrays.state_dtype[s] == Dtype::u8) {
        arrays.scale[s] = static_cast<float*>(a.state_scales[place].mutable_data_ptr());
      }
    }
    if (!a.masters.empty()) arrays.master = a.masters[i].mutable_data_ptr();
    counts[i] += 1.0f;
    arrays.step = static_cast<int64_t>(counts[i]);
    arrays.seed = a.seed;
    arrays.index = a.indices.empty() ? 0 : a.indices[i];
  }
}

double read_lr(double lr, const MaybeTensor& lr_tensor, const char* op) {
  if (!lr_tensor.has_value()) return lr;
  const Tensor& t = *lr_tensor;
  bool wide = t.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(t.numel() == 1 && on_cpu(t) && (wide || t.scalar_type() == ScalarType::Float), op,
                  ": lr_tensor must hold one fp32 or fp64 on the CPU");
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
             std::move(masters), steps, max_value, stochastic_rounding, seed, std::move(indices)});
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
