// update_delayed_scales_: a few scalars per tensor, computed on one thread.
#include "math/delayed_scales.h"

#include <cmath>

#include "check.h"
#include "overlap.h"

namespace mixprec::cpu {

namespace {

float* data(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

}  // namespace

// lists of n: amax_histories [L], scales and amaxes one element, all fp32; fmt_max: n numbers
void update_delayed_scales_(TensorList amax_histories, TensorList scales, TensorList amaxes,
                            std::vector<double> fmt_max, int64_t margin, bool power_of_two,
                            bool most_recent) {
  const char* op = "update_delayed_scales_";
  size_t n = scales.size();
  STD_TORCH_CHECK(amax_histories.size() == n && amaxes.size() == n && fmt_max.size() == n,
                  "update_delayed_scales_: the lists must be of one length");
  STD_TORCH_CHECK(margin >= -64 && margin <= 64,
                  "update_delayed_scales_: margin must be in [-64, 64]");
  for (size_t i = 0; i < n; ++i) {
    const Tensor& history = amax_histories[i];
    STD_TORCH_CHECK(history.dim() == 1 && history.numel() > 0 &&
                        same_shape(history, amax_histories[0]) && on_cpu(history) &&
                        history.scalar_type() == ScalarType::Float && is_writable(history),
                    "update_delayed_scales_: amax_histories must be fp32 [L] on the CPU");
    check_scalar(scales[i], ScalarType::Float, op, "scales");
    check_scalar(amaxes[i], ScalarType::Float, op, "amaxes");
    STD_TORCH_CHECK(scales[i].dim() == 0 && amaxes[i].dim() == 0,
                    "update_delayed_scales_: scales and amaxes must have shape []");
    STD_TORCH_CHECK(fmt_max[i] > 0 && std::isfinite(fmt_max[i]),
                    "update_delayed_scales_: fmt_max must be positive and finite");
  }
  check_disjoint(amax_histories, op, "amax_histories");
  float shift = std::ldexp(1.0f, static_cast<int>(-margin));
  for (size_t i = 0; i < n; ++i) {
    Tensor history = to_contiguous(amax_histories[i]);  // usually no copy
    float& scale = *data(scales[i]);
    float& amax = *data(amaxes[i]);
    scale = update_delayed_scale(data(history), history.numel(), amax, scale,
                                 static_cast<float>(fmt_max[i]), shift, power_of_two, most_recent);
    amax = kUnused;
    if (!amax_histories[i].is_contiguous()) torch::stable::copy_(amax_histories[i], history);
  }
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("update_delayed_scales_", TORCH_BOX(&mixprec::cpu::update_delayed_scales_));
}
