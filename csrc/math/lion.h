// One Lion update of one element; the order of operations is part of the specification
// (docs/numerics.md).
#pragma once

#include "step.h"

namespace mixprec {

// The step's constants, each formed in fp64 and rounded once to Real.
template <class Real>
struct LionScalars {
  GradScalars<Real> grad;
  Real decay;  // lr * weight_decay
  Real one_minus_beta1;
  Real one_minus_beta2;
  Real lr;
};

struct LionSettings {
  double lr, beta1, beta2, weight_decay;
};

template <class Real>
MIXPREC_HD LionScalars<Real> lion_scalars(const LionSettings& s, const GradSettings& grad) {
  return {grad_scalars<Real>(grad), static_cast<Real>(s.lr * s.weight_decay),
          static_cast<Real>(1.0 - s.beta1), static_cast<Real>(1.0 - s.beta2),
          static_cast<Real>(s.lr)};
}

// p <- Lion(p, grad); m is updated in place.
template <class Real>
MIXPREC_HD Real lion(Real p, Real grad, Real& m, const LionScalars<Real>& s) {
  Real g = usable_grad(grad, s.grad);
  // Without decay an infinite p must stay infinite: 0 * Inf would be NaN.
  p = s.decay != 0 ? p - p * s.decay : p;
  Real c = m + (g - m) * s.one_minus_beta1;
  // In this form GCC vectorises it. NaN stays; +-0 give 0, so that a p of -0 stays.
  Real sign = (c > 0 ? Real(1) : Real(0)) - (c < 0 ? Real(1) : Real(0));
  sign = c == c ? sign : c;
  m = m + (g - m) * s.one_minus_beta2;
  return p - sign * s.lr;
}

}  // namespace mixprec
