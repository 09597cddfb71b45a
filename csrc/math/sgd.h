// One SGD update of one element; the order of operations is part of the specification
// (docs/numerics.md).
#pragma once

#include "step.h"

namespace mixprec {

// The step's constants, each formed in fp64 and rounded once to Real.
template <class Real>
struct SgdScalars {
  GradScalars<Real> grad;
  Real weight_decay;
  Real momentum;
  Real one_minus_dampening;
  Real lr;
};

struct SgdSettings {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
};

template <class Real>
MIXPREC_HD SgdScalars<Real> sgd_scalars(const SgdSettings& s, const GradSettings& grad) {
  return {grad_scalars<Real>(grad), static_cast<Real>(s.weight_decay),
          static_cast<Real>(s.momentum), static_cast<Real>(1.0 - s.dampening),
          static_cast<Real>(s.lr)};
}

// Without decay an infinite p must stay infinite: 0 * Inf would be NaN.
template <class Real>
MIXPREC_HD Real decayed_grad(Real p, Real grad, const SgdScalars<Real>& s) {
  Real g = usable_grad(grad, s.grad);
  return s.weight_decay != 0 ? g + p * s.weight_decay : g;
}

// p <- SGD(p, grad) without momentum.
template <class Real>
MIXPREC_HD Real sgd(Real p, Real grad, const SgdScalars<Real>& s) {
  Real g = decayed_grad(p, grad, s);
  return p - g * s.lr;
}

// With momentum; b is updated in place, or initialised at the first step (`first`).
template <bool nesterov, class Real>
MIXPREC_HD Real sgd_momentum(Real p, Real grad, Real& b, bool first, const SgdScalars<Real>& s) {
  Real g = decayed_grad(p, grad, s);
  Real later = b * s.momentum + g * s.one_minus_dampening;
  b = first ? g : later;
  g = nesterov ? g + b * s.momentum : b;
  return p - g * s.lr;
}

}  // namespace mixprec
