// One Adam update of one element; the order of operations is part of the specification
// (docs/numerics.md).
#pragma once

#include "step.h"

namespace mixprec {

// beta^step by multiplication only: pow differs between math libraries.
MIXPREC_HD double power(double beta, int64_t step) {
  double result = 1.0;
  for (; step > 0; step >>= 1, beta *= beta) {
    if (step & 1) result *= beta;
  }
  return result;
}

struct AdamW {
  double lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay;

  static constexpr const char* kName = "adamw_";
  static constexpr int kVariants = 2;  // with L2 regularization, with decoupled weight decay
  static constexpr int states(int) { return 2; }  // exp_avg, exp_avg_sq
  MIXPREC_HD int variant(int, int64_t) const { return decoupled_weight_decay != 0; }

  template <class Real>
  struct Scalars {
    GradScalars<Real> grad;
    Real decay;  // lr * weight_decay if decoupled, else weight_decay
    Real one_minus_beta1;
    Real beta2;
    Real one_minus_beta2;
    Real eps;
    Real step_size;     // lr / (1 - beta1^step)
    Real inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^step)
  };

  template <class Real>
  MIXPREC_HD Scalars<Real> scalars(const GradSettings& grad, int64_t step) const {
    double bc1 = 1.0 - power(beta1, step), bc2 = 1.0 - power(beta2, step);
    double decay = decoupled_weight_decay != 0 ? lr * weight_decay : weight_decay;
    return {grad_scalars<Real>(grad),       static_cast<Real>(decay),
            static_cast<Real>(1.0 - beta1), static_cast<Real>(beta2),
            static_cast<Real>(1.0 - beta2), static_cast<Real>(eps),
            static_cast<Real>(lr / bc1),    static_cast<Real>(1.0 / square_root(bc2))};
  }

  template <int variant, class Real>
  MIXPREC_HD static Real update(Real p, Real grad, Real& m, Real& v, const Scalars<Real>& s) {
    Real g = usable_grad(grad, s.grad);
    // Without decay an infinite p must stay infinite: 0 * Inf would be NaN.
    if (variant == 1) {
      p = s.decay != 0 ? p - p * s.decay : p;
    } else {
      g = s.decay != 0 ? g + p * s.decay : g;
    }
    m = m + (g - m) * s.one_minus_beta1;
    v = v * s.beta2 + (g * g) * s.one_minus_beta2;
    return p - (m / (square_root(v) * s.inv_sqrt_bc2 + s.eps)) * s.step_size;
  }
};

}  // namespace mixprec
