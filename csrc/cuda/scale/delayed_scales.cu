// update_delayed_scales_ on CUDA tensors.
#include <cmath>

#include "cuda/common/on_device.h"
#include "cuda/scale/delayed_scales.cuh"
#include "overlap.h"

namespace mixprec::cuda {

namespace {

float* fp32_of(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

void update_delayed_scales_(Tensors amax_histories, Tensors scales, Tensors amaxes,
                            std::vector<double> fmt_max, int64_t margin, bool power_of_two,
                            bool most_recent) {
  size_t n = scales.size();
  STD_TORCH_CHECK(amax_histories.size() == n && amaxes.size() == n && fmt_max.size() == n,
                  "update_delayed_scales_: the lists must be of one length");
  STD_TORCH_CHECK(margin >= -64 && margin <= 64,
                  "update_delayed_scales_: margin must be in [-64, 64]");
  if (n == 0) return;
  for (size_t i = 0; i < n; ++i) {
    const Tensor& history = amax_histories[i];
    STD_TORCH_CHECK(history.dim() == 1 && history.numel() > 0 &&
                        same_shape(history, amax_histories[0]) &&
                        on_device_of(history, scales[0]) &&
                        history.scalar_type() == ScalarType::Float && is_writable(history),
                    "update_delayed_scales_: amax_histories must be fp32 [L] on one CUDA device");
    check_scalar_on(scales[i], ScalarType::Float, scales[0], "update_delayed_scales_: scales");
    check_scalar_on(amaxes[i], ScalarType::Float, scales[0], "update_delayed_scales_: amaxes");
    STD_TORCH_CHECK(scales[i].dim() == 0 && amaxes[i].dim() == 0,
                    "update_delayed_scales_: scales and amaxes must have shape []");
    STD_TORCH_CHECK(fmt_max[i] > 0 && std::isfinite(fmt_max[i]),
                    "update_delayed_scales_: fmt_max must be positive and finite");
  }
  check_disjoint(amax_histories, "update_delayed_scales_", "amax_histories");

  OnDevice device(scales[0]);
  Tensors histories;
  std::vector<DelayedScale> list;
  for (size_t i = 0; i < n; ++i) {
    histories.push_back(row_major(amax_histories[i]));
    list.push_back({fp32_of(histories[i]), fp32_of(scales[i]), fp32_of(amaxes[i]),
                    static_cast<float>(fmt_max[i])});
  }
  DelayedRule rule = {histories[0].numel(), std::ldexp(1.0f, static_cast<int>(-margin)),
                      power_of_two, most_recent};
  check_launch(update_delayed_scales(list.data(), static_cast<int64_t>(n), rule, device.stream),
               "update_delayed_scales_");
  for (size_t i = 0; i < n; ++i) write_back(amax_histories[i], histories[i]);
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("update_delayed_scales_", TORCH_BOX(&mixprec::cuda::update_delayed_scales_));
}
