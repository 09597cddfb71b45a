// lion_ on the GPU: its formula as a Rule of step.cuh.
#pragma once

#include "cuda/optim/step.cuh"
#include "math/lion.h"

namespace mixprec::cuda {

struct LionRule {
  LionSettings settings;

  static constexpr int kStates = 1;  // exp_avg
  static constexpr bool kNeedsState = true;
  template <class Real>
  using Scalars = LionScalars<Real>;

  template <class Real>
  __device__ __forceinline__ Scalars<Real> scalars(const GradSettings& grad, int64_t) const {
    return lion_scalars<Real>(settings, grad);
  }

  template <class Real>
  __device__ __forceinline__ Real update(Real p, Real grad, Real (&state)[kStates], bool, int64_t,
                                         const Scalars<Real>& s) const {
    return mixprec::lion(p, grad, state[0], s);
  }
};

}  // namespace mixprec::cuda
