// adamw_ on CUDA tensors.
#include "cuda/optim/step_launch.h"
#include "math/step.h"

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("adamw_", TORCH_BOX(&mixprec::cuda::update_<mixprec::AdamW>));
}
