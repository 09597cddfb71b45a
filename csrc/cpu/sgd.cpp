// sgd_: the update of SGD, with or without momentum.
#include "cpu/step.h"

namespace mixprec::cpu {

void sgd_(TensorList params, TensorList grads, TensorList momentum_buffers, TensorList masters,
          Tensor steps, double lr, double momentum, double dampening, double weight_decay,
          bool nesterov, TensorList state_scales, bool maximize, double max_value,
          bool stochastic_rounding, int64_t seed, std::vector<int64_t> indices,
          MaybeTensor lr_tensor, MaybeTensor inv_scale, MaybeTensor clip, MaybeTensor found_inf) {
  std::vector<StepState> states;
  if (!momentum_buffers.empty()) {
    states.push_back({"momentum_buffers", std::move(momentum_buffers)});
  }
  Step step({"sgd_", std::move(params), std::move(grads), std::move(states), std::move(masters),
             steps, std::move(state_scales), lr, maximize, max_value, stochastic_rounding, seed,
             std::move(indices), lr_tensor, inv_scale, clip, found_inf});
  SgdSettings settings{step.lr(), momentum, dampening, weight_decay, nesterov};
  step.run(
      [&](int64_t count) -> SgdConstants {
        return {nesterov, count == 1, sgd_scalars<float>(settings, step.grad()),
                sgd_scalars<double>(settings, step.grad())};
      },
      loops().sgd);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) { m.impl("sgd_", TORCH_BOX(&mixprec::cpu::sgd_)); }
