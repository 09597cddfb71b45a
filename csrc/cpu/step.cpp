// Checks the arguments of the optimizer updates and lays them out for the loops.
#include "cpu/step.h"

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

double read_lr(const StepArguments& a) {
  if (!a.lr_tensor.has_value()) return a.lr;
  const Tensor& t = *a.lr_tensor;
  bool wide = t.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(t.numel() == 1 && on_cpu(t) && (wide || t.scalar_type() == ScalarType::Float),
                  a.op, ": lr_tensor must hold one fp32 or fp64 on the CPU");
  const void* data = t.const_data_ptr();
  return wide ? *static_cast<const double*>(data) : *static_cast<const float*>(data);
}

}  // namespace

Step::Step(StepArguments arguments) : arguments_(std::move(arguments)) {
  const StepArguments& a = arguments_;
  size_t count = a.params.size();
  auto check_list = [&](const TensorList& list, const char* name) {
    STD_TORCH_CHECK(list.size() == count, a.op, ": ", name, " must have one tensor per param");
  };
  check_list(a.grads, "grads");
  for (const StepState& state : a.states) check_list(state.tensors, state.name);
  if (!a.masters.empty()) check_list(a.masters, "masters");
  STD_TORCH_CHECK(a.state_scales.empty() || a.state_scales.size() == a.states.size() * count, a.op,
                  ": state_scales must have one tensor per state and param");
  check_table(a.steps, ScalarType::Float, {static_cast<int64_t>(count)}, a.op, "steps");
  STD_TORCH_CHECK(a.max_value > 0, a.op, ": max_value must be positive");
  lr_ = read_lr(a);
  grad_ = {read_scalar(a.inv_scale, 1.0f, a.op, "inv_scale"),
           read_scalar(a.clip, 1.0f, a.op, "clip"), a.max_value, a.maximize};
  skipped_ = read_scalar(a.found_inf, 0.0f, a.op, "found_inf") != 0.0f;

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
  for (size_t s = 0; s < a.states.size(); ++s) {
    const Tensor& t = a.states[s].tensors[i];
    ScalarType type = t.scalar_type();
    bool bf16 = narrow && type == ScalarType::BFloat16, u8 = narrow && type == ScalarType::Byte;
    STD_TORCH_CHECK(bf16 || u8 || type == real, a.op, ": ", a.states[s].name,
                    " must be fp32, bf16 or uint8 (fp64 for fp64 params)");
    row.contiguous = check_written(t, sizes, a.op, a.states[s].name) && row.contiguous;
    row.random = row.random || bf16 || u8;
    arrays.state_dtype[s] = bf16 ? Dtype::bf16 : u8 ? Dtype::u8 : narrow ? Dtype::f32 : Dtype::f64;
    if (u8) {
      STD_TORCH_CHECK(!a.state_scales.empty(), a.op,
                      ": state_scales must hold the scales of states in uint8");
      const Tensor& scales = a.state_scales[s * a.params.size() + i];
      check_table(scales, ScalarType::Float, {state8_blocks(t.numel())}, a.op, "state_scales");
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
  for (StepState& state : a.states) written.push_back(&state.tensors[i]);
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
    for (size_t s = 0; s < a.states.size(); ++s) {
      arrays.state[s] = a.states[s].tensors[i].mutable_data_ptr();
      if (arrays.state_dtype[s] == Dtype::u8) {
        Tensor& scales = a.state_scales[s * a.params.size() + i];
        arrays.scale[s] = static_cast<float*>(scales.mutable_data_ptr());
      }
    }
    if (!a.masters.empty()) arrays.master = a.masters[i].mutable_data_ptr();
    counts[i] += 1.0f;
    arrays.step = static_cast<int64_t>(counts[i]);
    arrays.seed = a.seed;
    arrays.index = a.indices.empty() ? 0 : a.indices[i];
  }
}

void Step::write_back() {
  for (auto& [original, copy] : copies_) torch::stable::copy_(original, copy);
}

}  // namespace mixprec::cpu
