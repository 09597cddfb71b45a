// adamw_ on CUDA tensors.
#include "cuda/optim/adamw.cuh"
#include "cuda/optim/step_launch.h"

namespace mixprec::cuda {

namespace {

void adamw_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors masters,
            Tensor steps, double lr, double beta1, double beta2, double eps, double weight_decay,
            bool decoupled_weight_decay, Tensors state_scales, bool maximize, double max_value,
            bool stochastic_rounding, int64_t seed, std::vector<int64_t> indices,
            MaybeTensor lr_tensor, MaybeTensor inv_scale, MaybeTensor clip, MaybeTensor found_inf) {
  StepLists lists = {"adamw_",
                     {&params, &grads, &masters, &exp_avgs, &exp_avg_sqs},
                     {false, false, true, false, false},
                     steps,
                     state_scales};
  AdamWSettings settings = {lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay};
  launch_step(lists, AdamWRule{settings},
              {maximize, max_value, stochastic_rounding, seed, indices, lr_tensor, inv_scale, clip,
               found_inf});
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) { m.impl("adamw_", TORCH_BOX(&mixprec::cuda::adamw_)); }
