// update_delayed_scales_ on CUDA tensors.
#include "arguments/step.h"
#include "cuda/common/on_device.h"
#include "cuda/scale/delayed_scales.cuh"

namespace mixprec::cuda {

namespace {

void update_delayed_scales_(Tensors amax_histories, Tensors scales, Tensors amaxes,
                            std::vector<double> fmt_max, int64_t margin, bool power_of_two,
                            bool most_recent) {
  check_delayed_scales(amax_histories, scales, amaxes, fmt_max);
  float shift = check_margin(margin, "update_delayed_scales_");
  size_t n = scales.size();
  if (n == 0) return;

  OnDevice device(scales[0]);
  Tensors histories;
  std::vector<DelayedScale> list;
  for (size_t i = 0; i < n; ++i) {
    histories.push_back(row_major(amax_histories[i]));
    list.push_back({fp32_of(histories[i]), fp32_of(scales[i]), fp32_of(amaxes[i]),
                    static_cast<float>(fmt_max[i])});
  }
  DelayedRule rule = {histories[0].numel(), shift, power_of_two, most_recent};
  check_launch(update_delayed_scales(list.data(), static_cast<int64_t>(n), rule, device.stream),
               "update_delayed_scales_");
  for (size_t i = 0; i < n; ++i) write_back(amax_histories[i], histories[i]);
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("update_delayed_scales_", TORCH_BOX(&mixprec::cuda::update_delayed_scales_));
}
