// lion_: the update of Lion.
#include "cpu/step.h"

namespace mixprec::cpu {

void lion_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList masters,
           Tensor steps, double lr, double beta1, double beta2, double weight_decay,
           TensorList state_scales, bool maximize, double max_value, bool stochastic_rounding,
           int64_t seed, std::vector<int64_t> indices, MaybeTensor lr_tensor, MaybeTensor inv_scale,
           MaybeTensor clip, MaybeTensor found_inf) {
  Step step({"lion_",
             std::move(params),
             std::move(grads),
             {{"exp_avgs", std::move(exp_avgs)}},
             std::move(masters),
             steps,
             std::move(state_scales),
             lr,
             maximize,
             max_value,
             stochastic_rounding,
             seed,
             std::move(indices),
             lr_tensor,
             inv_scale,
             clip,
             found_inf});
  LionSettings settings{step.lr(), beta1, beta2, weight_decay};
  step.run(
      [&](int64_t) -> LionConstants {
        return {lion_scalars<float>(settings, step.grad()),
                lion_scalars<double>(settings, step.grad())};
      },
      loops().lion);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) { m.impl("lion_", TORCH_BOX(&mixprec::cpu::lion_)); }
