// The momentum of Muon for one element; the order of operations is part of the specification
// (docs/numerics.md).
#pragma once

#include "step.h"

namespace mixprec {

// The step's constants, each formed in fp64 and rounded once to Real.
template <class Real>
struct MuonScalars {
  GradScalars<Real> grad;
  Real one_minus_momentum;
};

struct MuonSettings {
  double lr;  // as in every optimizer's settings; not used
  double momentum;
  bool nesterov;
};

template <class Real>
MIXPREC_HD MuonScalars<Real> muon_scalars(const MuonSettings& s, const GradSettings& grad) {
  return {grad_scalars<Real>(grad), static_cast<Real>(1.0 - s.momentum)};
}

// The element of the matrix to orthogonalize; b is updated in place.
template <bool nesterov, class Real>
MIXPREC_HD Real muon_direction(Real grad, Real& b, const MuonScalars<Real>& s) {
  Real g = usable_grad(grad, s.grad);
  b = b + (g - b) * s.one_minus_momentum;
  return nesterov ? b + (g - b) * s.one_minus_momentum : b;
}

}  // namespace mixprec
