// One Lion update of one element; the order of operations is part of the specification
// (docs/numerics.md).
#pragma once

#include "step.h"

namespace mixprec {

struct Lion {
  double lr, beta1, beta2, weight_decay;

  static constexpr const char* kName = "lion_";
  static constexpr int kVariants = 1;
  static constexpr int states(int) { return 1; }  // exp_avg
  MIXPREC_HD int variant(int, int64_t) const { return 0; }

  template <class Real>
  struct Scalars {
    GradScalars<Real> grad;
    Real decay;  // lr * weight_decay
    Real one_minus_beta1;
    Real one_minus_beta2;
    Real lr;
  };

  template <class Real>
  MIXPREC_HD Scalars<Real> scalars(const GradSettings& grad, int64_t) const {
    return {grad_scalars<Real>(grad), static_cast<Real>(lr * weight_decay),
            static_cast<Real>(1.0 - beta1), static_cast<Real>(1.0 - beta2), static_cast<Real>(lr)};
  }

  template <int, class Real>
  MIXPREC_HD static Real update(Real p, Real grad, Real& m, Real&, const Scalars<Real>& s) {
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
};

}  // namespace mixprec
