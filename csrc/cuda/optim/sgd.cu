// sgd_ on CUDA tensors.
#include "cuda/optim/step_launch.h"
#include "math/step.h"

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("sgd_", TORCH_BOX(&mixprec::cuda::update_<mixprec::Sgd>));
}
