// The momentum of Muon for one element; the order of operations is part of the specification
// (docs/numerics.md).
#pragma once

#include "step.h"

namespace mixprec {

struct MuonDirection {
  double lr;  // as every rule has it; not used
  double momentum, nesterov;

  static constexpr const char* kName = "muon_direction_";
  static constexpr int kVariants = 2;             // without and with nesterov
  static constexpr int states(int) { return 1; }  // momentum_buffer
  MIXPREC_HD int variant(int, int64_t) const { return nesterov != 0; }

  template <class Real>
  struct Scalars {
    GradScalars<Real> grad;
    Real one_minus_momentum;
  };

  template <class Real>
  MIXPREC_HD Scalars<Real> scalars(const GradSettings& grad, int64_t) const {
    return {grad_scalars<Real>(grad), static_cast<Real>(1.0 - momentum)};
  }

  // The element of the matrix to orthogonalize; p is not used.
  template <int variant, class Real>
  MIXPREC_HD static Real update(Real, Real grad, Real& b, Real&, const Scalars<Real>& s) {
    Real g = usable_grad(grad, s.grad);
    b = b + (g - b) * s.one_minus_momentum;
    return variant == 1 ? b + (g - b) * s.one_minus_momentum : b;
  }
};

}  // namespace mixprec
