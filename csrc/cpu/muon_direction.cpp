// muon_direction_: the momentum of Muon.
#include "cpu/step.h"

namespace mixprec::cpu {

void muon_direction_(TensorList params, TensorList grads, TensorList momentum_buffers,
                     TensorList masters, Tensor steps, double lr, double momentum, bool nesterov,
                     TensorList state_scales, bool maximize, double max_value,
                     bool stochastic_rounding, int64_t seed, std::vector<int64_t> indices,
                     MaybeTensor lr_tensor, MaybeTensor inv_scale, MaybeTensor clip,
                     MaybeTensor found_inf) {
  Step step({"muon_direction_",
             std::move(params),
             std::move(grads),
             {{"momentum_buffers", std::move(momentum_buffers)}},
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
  MuonSettings settings{step.lr(), momentum, nesterov};
  step.run(
      [&](int64_t) -> MuonConstants {
        return {nesterov, muon_scalars<float>(settings, step.grad()),
                muon_scalars<double>(settings, step.grad())};
      },
      loops().muon_direction);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("muon_direction_", TORCH_BOX(&mixprec::cpu::muon_direction_));
}
