// adamw_: Adam's update.
#include "cpu/step.h"

namespace mixprec::cpu {

void adamw_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
            TensorList masters, Tensor steps, double lr, double beta1, double beta2, double eps,
            double weight_decay, bool decoupled_weight_decay, TensorList state_scales,
            bool maximize, double max_value, bool stochastic_rounding, int64_t seed,
            std::vector<int64_t> indices, MaybeTensor lr_tensor, MaybeTensor inv_scale,
            MaybeTensor clip, MaybeTensor found_inf) {
  Step step({"adamw_",
             std::move(params),
             std::move(grads),
             {{"exp_avgs", std::move(exp_avgs)}, {"exp_avg_sqs", std::move(exp_avg_sqs)}},
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
  AdamWSettings settings{step.lr(), beta1, beta2, eps, weight_decay, decoupled_weight_decay};
  step.run(
      [&](int64_t count) -> AdamWConstants {
        return {decoupled_weight_decay, adamw_scalars<float>(settings, step.grad(), count),
                adamw_scalars<double>(settings, step.grad(), count)};
      },
      loops().adamw);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) { m.impl("adamw_", TORCH_BOX(&mixprec::cpu::adamw_)); }
