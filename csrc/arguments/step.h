// The arguments of the ops of a training step, on every device: of gradients, of scales, and of the
// updates of optimizers.
#pragma once

#include <cmath>

#include "arguments/check.h"
#include "math/scale.h"
#include "math/state8.h"

namespace mixprec {

// Returns the dtypes of the gradients.
inline std::vector<Dtype> check_grads(const TensorList& grads, const MaybeTensor& inv_scale,
                                      const Tensor& found_inf, const MaybeTensor& counts,
                                      const char* op) {
  check_scalar(found_inf, ScalarType::Float, found_inf, op, "found_inf");
  if (inv_scale.has_value()) {
    check_scalar(*inv_scale, ScalarType::Float, found_inf, op, "inv_scale");
  }
  int64_t count = static_cast<int64_t>(grads.size());
  if (counts.has_value()) {
    check_table(*counts, ScalarType::Long, {count, 4}, found_inf, op, "counts");
  }
  std::vector<Dtype> dtypes;
  dtypes.reserve(grads.size());
  for (const Tensor& grad : grads) {
    dtypes.push_back(dtype_of(grad, op));
    STD_TORCH_CHECK(!is_fp8(dtypes.back()) && same_device(grad, found_inf), op,
                    ": gradients must be floating point, on found_inf's device");
  }
  return dtypes;
}

inline void check_written(const TensorList& grads, const char* op) {
  for (const Tensor& grad : grads) {
    STD_TORCH_CHECK(is_writable(grad), op, ": the elements of a gradient share memory");
  }
  check_disjoint(grads, op, "grads");
}

inline float check_margin(int64_t margin, const char* op) {
  STD_TORCH_CHECK(margin >= -64 && margin <= 64, op, ": margin must be in [-64, 64]");
  return std::ldexp(1.0f, static_cast<int>(-margin));
}

// Returns the largest number of the format.
inline float check_scale_from_amax(const Tensor& scale, const Tensor& scale_inv, const Tensor& amax,
                                   ScalarType type) {
  float fmt_max = format_max(dtype_of(type, "scale_from_amax_: dtype"));
  STD_TORCH_CHECK(fmt_max > 0.0f, "scale_from_amax_: dtype must be fp8, fp16 or bf16");
  for (const Tensor* t : {&scale, &scale_inv, &amax}) {
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && same_device(*t, scale) &&
                        same_shape(*t, scale) && (t == &amax || is_writable(*t)),
                    "scale_from_amax_: scale, scale_inv and amax must be fp32 of one shape");
  }
  return fmt_max;
}

inline void check_clip_coef(const Tensor& sum_sq, double max_norm) {
  STD_TORCH_CHECK(sum_sq.scalar_type() == ScalarType::Double && sum_sq.is_contiguous(),
                  "clip_coef: sum_sq must be fp64, contiguous");
  STD_TORCH_CHECK(max_norm > 0, "clip_coef: max_norm must be positive");
}

inline void check_loss_scale(const Tensor& scale, const Tensor& growth_tracker,
                             const Tensor& hysteresis_tracker, const Tensor& counters,
                             const Tensor& found_inf, const MaybeTensor& underflow) {
  const char* op = "update_scale_";
  check_scalar(scale, ScalarType::Float, scale, op, "scale");
  check_scalar(growth_tracker, ScalarType::Int, scale, op, "growth_tracker");
  check_scalar(hysteresis_tracker, ScalarType::Int, scale, op, "hysteresis_tracker");
  check_table(counters, ScalarType::Long, {3}, scale, op, "counters");
  check_scalar(found_inf, ScalarType::Float, scale, op, "found_inf");
  if (underflow.has_value()) check_scalar(*underflow, ScalarType::Float, scale, op, "underflow");
}

inline LossScaleRule loss_scale_rule(double growth_factor, double backoff_factor,
                                     int64_t growth_interval, double min_scale, double max_scale,
                                     int64_t hysteresis, double grow_on_underflow) {
  STD_TORCH_CHECK(growth_factor >= 1 && std::isfinite(growth_factor) && backoff_factor > 0 &&
                      backoff_factor <= 1 && growth_interval >= 1 && min_scale >= 0 &&
                      std::isfinite(min_scale) && max_scale > 0 && hysteresis >= 1 &&
                      grow_on_underflow >= 0 && grow_on_underflow <= 1,
                  "update_scale_: a setting is out of its range");
  return {growth_factor,
          backoff_factor,
          growth_interval,
          static_cast<float>(min_scale),
          static_cast<float>(max_scale),
          static_cast<int32_t>(hysteresis)};
}

inline void check_delayed_scales(const TensorList& amax_histories, const TensorList& scales,
                                 const TensorList& amaxes, const std::vector<double>& fmt_max) {
  const char* op = "update_delayed_scales_";
  size_t n = scales.size();
  STD_TORCH_CHECK(amax_histories.size() == n && amaxes.size() == n && fmt_max.size() == n, op,
                  ": the lists must be of one length");
  for (size_t i = 0; i < n; ++i) {
    const Tensor& history = amax_histories[i];
    STD_TORCH_CHECK(history.dim() == 1 && history.numel() > 0 &&
                        same_shape(history, amax_histories[0]) && same_device(history, scales[0]) &&
                        history.scalar_type() == ScalarType::Float && is_writable(history),
                    op, ": amax_histories must be fp32 [L] on one device");
    check_scalar(scales[i], ScalarType::Float, scales[0], op, "scales");
    check_scalar(amaxes[i], ScalarType::Float, scales[0], op, "amaxes");
    STD_TORCH_CHECK(scales[i].dim() == 0 && amaxes[i].dim() == 0, op,
                    ": scales and amaxes must have shape []");
    STD_TORCH_CHECK(fmt_max[i] > 0 && std::isfinite(fmt_max[i]), op,
                    ": fmt_max must be positive and finite");
  }
  check_disjoint(amax_histories, op, "amax_histories");
}

constexpr int64_t kMaxIndices = int64_t{1} << 30;  // the two upper bits hold the stream

struct UpdateLists {
  const char* op;
  TensorList params, grads, states, state_scales, masters;
  Tensor steps;
  double max_value;
  bool stochastic_rounding;
  std::vector<int64_t> indices;

  // The number of arrays of state that each param has, and the place of one in the list.
  int states_each() const {
    return params.empty() ? 0 : static_cast<int>(states.size() / params.size());
  }
  size_t place(int s, size_t i) const { return s * params.size() + i; }
};

// What the checks find of a param and its tensors: computing it twice would be measurable with a
// thousand small tensors.
struct CheckedParam {
  Dtype param, grad;
  Dtype master = Dtype::none;  // i16, i8: a remainder
  Dtype state[2] = {Dtype::none, Dtype::none};
  bool stochastic = false;  // the param is rounded stochastically, not a master
  bool contiguous = false;  // all tensors are, so that no memory order needs matching
  bool random = false;      // random bits are drawn, in row-major order
};

class UpdateCheck {
 public:
  explicit UpdateCheck(const UpdateLists& lists) : a_(lists), on_gpu_(lists.steps.is_cuda()) {}

  // Nothing has been written when it raises.
  std::vector<CheckedParam> run() const {
    size_t count = a_.params.size();
    require(a_.grads.size() == count && (a_.masters.empty() || a_.masters.size() == count),
            "grads and masters must have one tensor per param");
    int states = a_.states_each();
    require(states <= 2 && a_.states.size() == states * count &&
                (a_.state_scales.empty() || a_.state_scales.size() == a_.states.size()),
            "states and state_scales must have one tensor per state and param");
    check_table(a_.steps, ScalarType::Float, {static_cast<int64_t>(count)}, a_.steps, a_.op,
                "steps");
    require(a_.max_value > 0, "max_value must be positive");
    std::vector<CheckedParam> checked(count);
    bool random = a_.stochastic_rounding;
    for (size_t i = 0; i < count; ++i) {
      checked[i] = check_param(i);
      random = random || checked[i].random;
    }
    check_disjoint(a_.params, a_.op, "params");
    require(a_.indices.size() == count || (a_.indices.empty() && !random),
            "indices must have one number per param for stochastic rounding");
    for (int64_t index : a_.indices) {
      require(index >= 0 && index < kMaxIndices, "indices must be in [0, 2^30)");
    }
    return checked;
  }

 private:
  void require(bool fits, const char* what) const { STD_TORCH_CHECK(fits, a_.op, ": ", what); }

  // Returns whether it is contiguous. (The dispatcher calls a CPU kernel only if all tensors are on
  // the CPU.)
  bool check_like(const Tensor& t, Sizes sizes, bool written, const char* what) const {
    bool contiguous = t.is_contiguous();
    require(has_shape(t, sizes) && (contiguous || !written || is_writable(t)) &&
                (!on_gpu_ || same_device(t, a_.steps)),
            what);
    return contiguous;
  }

  CheckedParam check_param(size_t i) const {
    const Tensor &param = a_.params[i], &grad = a_.grads[i];
    CheckedParam checked;
    checked.param = dtype_of(param, "a param of the optimizer's step");
    checked.grad = dtype_of(grad, "a grad of the optimizer's step");
    Sizes sizes = param.sizes();
    Dtype p = checked.param, g = checked.grad;
    bool narrow = p != Dtype::f64;
    require(!is_fp8(p), "params must be fp32, bf16, fp16 or fp64");
    require(narrow ? is_float(g) : g == Dtype::f64,
            "grads must be fp32, bf16 or fp16 (fp64 for fp64 params)");
    checked.contiguous = check_like(
        param, sizes, true, "params must have elements that share no memory, on one device");
    checked.contiguous &= check_like(grad, sizes, false,
                                     "grads must have their params' shapes, on the params' device");

    ScalarType real = narrow ? ScalarType::Float : ScalarType::Double;
    Dtype wide = narrow ? Dtype::f32 : Dtype::f64;
    for (int s = 0; s < a_.states_each(); ++s) {
      const Tensor& t = a_.states[a_.place(s, i)];
      ScalarType type = t.scalar_type();
      bool bf16 = narrow && type == ScalarType::BFloat16, u8 = narrow && type == ScalarType::Byte;
      require(bf16 || u8 || type == real,
              "states must be fp32, bf16 or uint8 (fp64 for fp64 params)");
      checked.contiguous &= check_written(t, sizes);
      checked.random |= bf16 || u8;
      checked.state[s] = bf16 ? Dtype::bf16 : u8 ? Dtype::u8 : wide;
      if (!u8) continue;
      require(!a_.state_scales.empty(), "state_scales must hold the scales of states in uint8");
      check_table(a_.state_scales[a_.place(s, i)], ScalarType::Float, {state8_blocks(t.numel())},
                  a_.steps, a_.op, "state_scales");
    }
    if (!a_.masters.empty()) {
      const Tensor& t = a_.masters[i];
      ScalarType type = t.scalar_type();
      bool i16 = type == ScalarType::Short, i8 = type == ScalarType::Char;
      bool remainder = (i16 || i8) && p == Dtype::bf16;
      checked.master = !remainder ? wide : i16 ? Dtype::i16 : Dtype::i8;
      require(remainder || type == real,
              "masters must be fp32, or int16 or int8 for bf16 params (fp64 for fp64 params)");
      checked.random |= checked.master == Dtype::i8;
      checked.contiguous &= check_written(t, sizes);
    }
    checked.stochastic = a_.stochastic_rounding && a_.masters.empty() && p == Dtype::bf16;
    checked.random |= checked.stochastic;
    return checked;
  }

  bool check_written(const Tensor& t, Sizes sizes) const {
    return check_like(t, sizes, true,
                      "states and masters must have their params' shapes, and elements that share "
                      "no memory, on one device");
  }

  const UpdateLists& a_;
  bool on_gpu_;
};

}  // namespace mixprec
