// update_delayed_scales_: a few scalars per tensor, computed on one thread.
#include "math/delayed_scales.h"

#include "arguments/scales.h"

namespace mixprec::cpu {

// lists of n: amax_histories [L], scales and amaxes one element, all fp32; fmt_max: n numbers
void update_delayed_scales_(TensorList amax_histories, TensorList scales, TensorList amaxes,
                            std::vector<double> fmt_max, int64_t margin, bool power_of_two,
                            bool most_recent) {
  check_delayed_scales(amax_histories, scales, amaxes, fmt_max);
  float shift = check_margin(margin, "update_delayed_scales_");
  for (size_t i = 0; i < scales.size(); ++i) {
    Tensor history = to_contiguous(amax_histories[i]);  // usually no copy
    float& scale = *fp32_of(scales[i]);
    float& amax = *fp32_of(amaxes[i]);
    scale = update_delayed_scale(fp32_of(history), history.numel(), amax, scale,
                                 static_cast<float>(fmt_max[i]), shift, power_of_two, most_recent);
    amax = kUnused;
    if (!amax_histories[i].is_contiguous()) torch::stable::copy_(amax_histories[i], history);
  }
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("update_delayed_scales_", TORCH_BOX(&mixprec::cpu::update_delayed_scales_));
}
