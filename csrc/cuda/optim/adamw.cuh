// adamw_ on the GPU: its formula as a Rule of step.cuh.
#pragma once

#include "cuda/optim/step.cuh"
#include "math/adamw.h"

namespace mixprec::cuda {

struct AdamWRule {
  AdamWSettings settings;

  static constexpr int kStates = 2;  // exp_avg, exp_avg_sq
  static constexpr bool kNeedsState = true;
  template <class Real>
  using Scalars = AdamWScalars<Real>;

  template <class Real>
  __device__ __forceinline__ Scalars<Real> scalars(const GradSettings& grad, int64_t step) const {
    return adamw_scalars<Real>(settings, grad, step);
  }

  template <class Real>
  __device__ __forceinline__ Real update(Real p, Real grad, Real (&state)[kStates], bool has_state,
                                         int64_t step, const Scalars<Real>& s) const {
    (void)has_state, (void)step;
    return settings.decoupled_weight_decay ? mixprec::adamw<true>(p, grad, state[0], state[1], s)
                                           : mixprec::adamw<false>(p, grad, state[0], state[1], s);
  }
};

}  // namespace mixprec::cuda
