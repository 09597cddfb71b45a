// sgd_ on CUDA tensors.
#include "cuda/optim/sgd.cuh"
#include "cuda/optim/step_launch.h"

namespace mixprec::cuda {

namespace {

void sgd_(Tensors params, Tensors grads, Tensors momentum_buffers, Tensors masters, Tensor steps,
          double lr, double momentum, double dampening, double weight_decay, bool nesterov,
          Tensors state_scales, bool maximize, double max_value, bool stochastic_rounding,
          int64_t seed, std::vector<int64_t> indices, MaybeTensor lr_tensor, MaybeTensor inv_scale,
          MaybeTensor clip, MaybeTensor found_inf) {
  StepLists lists = {"sgd_",
                     {&params, &grads, &masters, &momentum_buffers, nullptr},
                     {false, false, true, true, true},
                     steps,
                     state_scales};
  SgdSettings settings = {lr, momentum, dampening, weight_decay, nesterov};
  launch_step(lists, SgdRule{settings},
              {maximize, max_value, stochastic_rounding, seed, indices, lr_tensor, inv_scale, clip,
               found_inf});
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) { m.impl("sgd_", TORCH_BOX(&mixprec::cuda::sgd_)); }
