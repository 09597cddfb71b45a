// One SGD update of one element; the order of operations is part of the specification
// (docs/numerics.md).
#pragma once

#include "step.h"

namespace mixprec {

struct Sgd {
  double lr, momentum, dampening, weight_decay, nesterov;

  // Without momentum; with it, 1 + 2 * nesterov + (first step, which the buffer begins with).
  static constexpr const char* kName = "sgd_";
  static constexpr int kVariants = 5;
  static constexpr int states(int variant) { return variant == 0 ? 0 : 1; }  // momentum_buffer
  MIXPREC_HD int variant(int count, int64_t step) const {
    return count == 0 ? 0 : 1 + (nesterov != 0 ? 2 : 0) + (step == 1 ? 1 : 0);
  }

  template <class Real>
  struct Scalars {
    GradScalars<Real> grad;
    Real weight_decay;
    Real momentum;
    Real one_minus_dampening;
    Real lr;
  };

  template <class Real>
  MIXPREC_HD Scalars<Real> scalars(const GradSettings& grad, int64_t) const {
    return {grad_scalars<Real>(grad), static_cast<Real>(weight_decay), static_cast<Real>(momentum),
            static_cast<Real>(1.0 - dampening), static_cast<Real>(lr)};
  }

  template <int variant, class Real>
  MIXPREC_HD static Real update(Real p, Real grad, Real& b, Real&, const Scalars<Real>& s) {
    Real g = usable_grad(grad, s.grad);
    // Without decay an infinite p must stay infinite: 0 * Inf would be NaN.
    g = s.weight_decay != 0 ? g + p * s.weight_decay : g;
    if (variant > 0) {
      b = (variant - 1) % 2 == 1 ? g : b * s.momentum + g * s.one_minus_dampening;
      g = (variant - 1) / 2 == 1 ? g + b * s.momentum : b;
    }
    return p - g * s.lr;
  }
};

}  // namespace mixprec
