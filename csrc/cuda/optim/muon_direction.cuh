// muon_direction_ on the GPU: its formula as a Rule of step.cuh.
#pragma once

#include "cuda/optim/step.cuh"
#include "math/muon_direction.h"

namespace mixprec::cuda {

struct MuonRule {
  MuonSettings settings;

  static constexpr int kStates = 1;  // momentum_buffer
  static constexpr bool kNeedsState = true;
  template <class Real>
  using Scalars = MuonScalars<Real>;

  template <class Real>
  __device__ __forceinline__ Scalars<Real> scalars(const GradSettings& grad, int64_t) const {
    return muon_scalars<Real>(settings, grad);
  }

  template <class Real>
  __device__ __forceinline__ Real update(Real, Real grad, Real (&state)[kStates], bool, int64_t,
                                         const Scalars<Real>& s) const {
    return settings.nesterov ? mixprec::muon_direction<true>(grad, state[0], s)
                             : mixprec::muon_direction<false>(grad, state[0], s);
  }
};

}  // namespace mixprec::cuda
