// sgd_ on the GPU: its formula as a Rule of step.cuh.
#pragma once

#include "cuda/optim/step.cuh"
#include "math/sgd.h"

namespace mixprec::cuda {

struct SgdRule {
  SgdSettings settings;

  static constexpr int kStates = 1;           // momentum_buffer
  static constexpr bool kNeedsState = false;  // absent without momentum
  template <class Real>
  using Scalars = SgdScalars<Real>;

  template <class Real>
  __device__ __forceinline__ Scalars<Real> scalars(const GradSettings& grad, int64_t) const {
    return sgd_scalars<Real>(settings, grad);
  }

  template <class Real>
  __device__ __forceinline__ Real update(Real p, Real grad, Real (&state)[kStates], bool has_state,
                                         int64_t step, const Scalars<Real>& s) const {
    if (!has_state) return mixprec::sgd(p, grad, s);
    return settings.nesterov ? mixprec::sgd_momentum<true>(p, grad, state[0], step == 1, s)
                             : mixprec::sgd_momentum<false>(p, grad, state[0], step == 1, s);
  }
};

}  // namespace mixprec::cuda
