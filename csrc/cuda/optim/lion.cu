// lion_ on CUDA tensors.
#include "cuda/optim/lion.cuh"
#include "cuda/optim/step_launch.h"

namespace mixprec::cuda {

namespace {

void lion_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors masters, Tensor steps,
           double lr, double beta1, double beta2, double weight_decay, Tensors state_scales,
           bool maximize, double max_value, bool stochastic_rounding, int64_t seed,
           std::vector<int64_t> indices, MaybeTensor lr_tensor, MaybeTensor inv_scale,
           MaybeTensor clip, MaybeTensor found_inf) {
  StepLists lists = {"lion_",
                     {&params, &grads, &masters, &exp_avgs, nullptr},
                     {false, false, true, false, true},
                     steps,
                     state_scales};
  LionSettings settings = {lr, beta1, beta2, weight_decay};
  launch_step(lists, LionRule{settings},
              {maximize, max_value, stochastic_rounding, seed, indices, lr_tensor, inv_scale, clip,
               found_inf});
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) { m.impl("lion_", TORCH_BOX(&mixprec::cuda::lion_)); }
