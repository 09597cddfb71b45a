// scale_from_amax_, inv_scale, clip_coef, update_scale_: a few scalars each, computed on one
// thread.
#include "math/scale.h"

#include <cmath>

#include "check.h"

namespace mixprec::cpu {

namespace {

template <class T>
T& scalar(const Tensor& t) {
  return *static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace

// scale, scale_inv, amax: fp32, all of the same shape
void scale_from_amax_(Tensor scale, Tensor scale_inv, Tensor amax, ScalarType type, int64_t margin,
                      bool power_of_two) {
  float fmt_max = format_max(dtype_of(type, "scale_from_amax_: dtype"));
  STD_TORCH_CHECK(fmt_max > 0.0f, "scale_from_amax_: dtype must be fp8, fp16 or bf16");
  STD_TORCH_CHECK(margin >= -64 && margin <= 64, "scale_from_amax_: margin must be in [-64, 64]");
  for (const Tensor* t : {&scale, &scale_inv, &amax}) {
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && on_cpu(*t) && same_shape(*t, scale) &&
                        (t == &amax || is_writable(*t)),
                    "scale_from_amax_: scale, scale_inv and amax must be fp32 of one shape");
  }
  Tensor old = to_contiguous(scale), in = to_contiguous(amax);
  Tensor s = empty(scale.sizes(), ScalarType::Float), inv = empty(scale.sizes(), ScalarType::Float);
  const float* previous = static_cast<const float*>(old.const_data_ptr());
  const float* a = static_cast<const float*>(in.const_data_ptr());
  float* out = static_cast<float*>(s.mutable_data_ptr());
  float* out_inv = static_cast<float*>(inv.mutable_data_ptr());
  float shift = std::ldexp(1.0f, static_cast<int>(-margin));
  for (int64_t i = 0; i < s.numel(); ++i) {
    out[i] = scale_from_amax(a[i], fmt_max, shift, power_of_two, previous[i]);
    out_inv[i] = 1.0f / out[i];
  }
  torch::stable::copy_(scale, s);
  torch::stable::copy_(scale_inv, inv);
}

// scale: fp32, one element -> the same shape
Tensor inv_scale(Tensor scale) {
  check_scalar(scale, ScalarType::Float, "inv_scale", "scale");
  Tensor result = empty(scale.sizes(), ScalarType::Float);
  scalar<float>(result) = static_cast<float>(1.0 / static_cast<double>(scalar<float>(scale)));
  return result;
}

// sum_sq: fp64, any shape -> fp32 []
Tensor clip_coef(Tensor sum_sq, double max_norm) {
  STD_TORCH_CHECK(
      sum_sq.scalar_type() == ScalarType::Double && on_cpu(sum_sq) && sum_sq.is_contiguous(),
      "clip_coef: sum_sq must be fp64, contiguous, on the CPU");
  STD_TORCH_CHECK(max_norm > 0, "clip_coef: max_norm must be positive");
  const double* part = static_cast<const double*>(sum_sq.const_data_ptr());
  double total = 0.0;
  for (int64_t i = 0; i < sum_sq.numel(); ++i) total += part[i];
  return empty_scalar(mixprec::clip_coef(total, max_norm));
}

// one element each: scale, found_inf and underflow fp32, the trackers int32; counters: int64 [3]
void update_scale_(Tensor scale, Tensor growth_tracker, Tensor hysteresis_tracker, Tensor counters,
                   Tensor found_inf, MaybeTensor underflow, double growth_factor,
                   double backoff_factor, int64_t growth_interval, double min_scale,
                   double max_scale, int64_t hysteresis, double grow_on_underflow) {
  const char* op = "update_scale_";
  check_scalar(scale, ScalarType::Float, op, "scale");
  check_scalar(growth_tracker, ScalarType::Int, op, "growth_tracker");
  check_scalar(hysteresis_tracker, ScalarType::Int, op, "hysteresis_tracker");
  check_table(counters, ScalarType::Long, {3}, op, "counters");
  check_scalar(found_inf, ScalarType::Float, op, "found_inf");
  bool underflows =
      read_scalar(underflow, 0.0f, op, "underflow") > static_cast<float>(grow_on_underflow);
  STD_TORCH_CHECK(growth_factor >= 1 && std::isfinite(growth_factor) && backoff_factor > 0 &&
                      backoff_factor <= 1 && growth_interval >= 1 && min_scale >= 0 &&
                      std::isfinite(min_scale) && max_scale > 0 && hysteresis >= 1 &&
                      grow_on_underflow >= 0 && grow_on_underflow <= 1,
                  "update_scale_: a setting is out of its range");
  LossScaleRule rule{growth_factor,
                     backoff_factor,
                     growth_interval,
                     static_cast<float>(min_scale),
                     static_cast<float>(max_scale),
                     static_cast<int32_t>(hysteresis)};
  int64_t* counts = static_cast<int64_t*>(counters.mutable_data_ptr());
  LossScale now =
      update_loss_scale({scalar<float>(scale), scalar<int32_t>(growth_tracker),
                         scalar<int32_t>(hysteresis_tracker), counts[0], counts[1], counts[2]},
                        scalar<float>(found_inf) != 0.0f, underflows, rule);
  scalar<float>(scale) = now.scale;
  scalar<int32_t>(growth_tracker) = now.growth_tracker;
  scalar<int32_t>(hysteresis_tracker) = now.hysteresis_tracker;
  counts[0] = now.skipped;
  counts[1] = now.applied;
  counts[2] = now.skipped_in_a_row;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("scale_from_amax_", TORCH_BOX(&mixprec::cpu::scale_from_amax_));
  m.impl("inv_scale", TORCH_BOX(&mixprec::cpu::inv_scale));
  m.impl("clip_coef", TORCH_BOX(&mixprec::cpu::clip_coef));
  m.impl("update_scale_", TORCH_BOX(&mixprec::cpu::update_scale_));
}
