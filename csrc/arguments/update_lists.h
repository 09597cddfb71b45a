// The tensors of an optimizer's update, on every device; mixprec/ops/step.py documents them.
#pragma once

#include "arguments/check.h"
#include "arguments/overlap.h"
#include "math/state8.h"

namespace mixprec {

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
    std::vector<CheckedParam> found(count);
    bool random = a_.stochastic_rounding;
    for (size_t i = 0; i < count; ++i) {
      found[i] = check_param(i);
      random = random || found[i].random;
    }
    check_disjoint(a_.params, a_.op, "params");
    require(a_.indices.size() == count || (a_.indices.empty() && !random),
            "indices must have one number per param for stochastic rounding");
    for (int64_t index : a_.indices) {
      require(index >= 0 && index < kMaxIndices, "indices must be in [0, 2^30)");
    }
    return found;
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
    CheckedParam found;
    found.param = dtype_of(param, "a param of the optimizer's step");
    found.grad = dtype_of(grad, "a grad of the optimizer's step");
    Sizes sizes = param.sizes();
    Dtype p = found.param, g = found.grad;
    bool narrow = p != Dtype::f64;
    require(!is_fp8(p), "params must be fp32, bf16, fp16 or fp64");
    require(narrow ? is_float(g) : g == Dtype::f64,
            "grads must be fp32, bf16 or fp16 (fp64 for fp64 params)");
    bool own = check_like(param, sizes, true,
                          "params must have elements that share no memory, on one device");
    bool like = check_like(grad, sizes, false,
                           "grads must have their params' shapes, on the params' device");
    found.contiguous = own && like;

    ScalarType real = narrow ? ScalarType::Float : ScalarType::Double;
    Dtype wide = narrow ? Dtype::f32 : Dtype::f64;
    for (int s = 0; s < a_.states_each(); ++s) {
      const Tensor& t = a_.states[a_.place(s, i)];
      ScalarType type = t.scalar_type();
      bool bf16 = narrow && type == ScalarType::BFloat16, u8 = narrow && type == ScalarType::Byte;
      require(bf16 || u8 || type == real,
              "states must be fp32, bf16 or uint8 (fp64 for fp64 params)");
      found.contiguous = check_written(t, sizes) && found.contiguous;
      found.random = found.random || bf16 || u8;
      found.state[s] = bf16 ? Dtype::bf16 : u8 ? Dtype::u8 : wide;
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
      found.master = !remainder ? wide : i16 ? Dtype::i16 : Dtype::i8;
      require(remainder || type == real,
              "masters must be fp32, or int16 or int8 for bf16 params (fp64 for fp64 params)");
      found.random = found.random || found.master == Dtype::i8;
      found.contiguous = check_written(t, sizes) && found.contiguous;
    }
    found.stochastic = a_.stochastic_rounding && a_.masters.empty() && p == Dtype::bf16;
    found.random = found.random || found.stochastic;
    return found;
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
