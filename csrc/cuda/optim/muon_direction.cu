// muon_direction_ on CUDA tensors.
#include "cuda/optim/muon_direction.cuh"
#include "cuda/optim/step_launch.h"

namespace mixprec::cuda {

namespace {

void muon_direction_(Tensors params, Tensors grads, Tensors momentum_buffers, Tensors masters,
                     Tensor steps, double lr, double momentum, bool nesterov, Tensors state_scales,
                     bool maximize, double max_value, bool stochastic_rounding, int64_t seed,
                     std::vector<int64_t> indices, MaybeTensor lr_tensor, MaybeTensor inv_scale,
                     MaybeTensor clip, MaybeTensor found_inf) {
  StepLists lists = {"muon_direction_",
                     {&params, &grads, &masters, &momentum_buffers, nullptr},
                     {false, false, true, false, true},
                     steps,
                     state_scales};
  MuonSettings settings = {lr, momentum, nesterov};
  launch_step(lists, MuonRule{settings},
              {maximize, max_value, stochastic_rounding, seed, indices, lr_tensor, inv_scale, clip,
               found_inf});
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("muon_direction_", TORCH_BOX(&mixprec::cuda::muon_direction_));
}
