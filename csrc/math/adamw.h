// One Adam update of one element; the order of operations is part of the specification
// (docs/numerics.md).
#pragma once

#include "step.h"

namespace mixprec {

// The step's constants, each formed in fp64 and rounded once to Real.
template <class Real>
struct AdamWScalars {
  GradScalars<Real> grad;
  Real decay;  // lr * weight_decay if decoupled, else weight_decay
  Real one_minus_beta1;
  Real beta2;
  Real one_minus_beta2;
  Real eps;
  Real step_size;     // lr / (1 - beta1^step)
  Real inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^step)
};

// beta^step by multiplication only: pow differs between math libraries.
MIXPREC_HD double power(double beta, int64_t step) {
  double result = 1.0;
  for (; step > 0; step >>= 1, beta *= beta) {
    if (step & 1) result *= beta;
  }
  return result;
}

struct AdamWSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled_weight_decay;
};

template <class Real>
MIXPREC_HD AdamWScalars<Real> adamw_scalars(const AdamWSettings& s, const GradSettings& grad,
                                            int64_t step) {
  double bc1 = 1.0 - power(s.beta1, step), bc2 = 1.0 - power(s.beta2, step);
  double decay = s.decoupled_weight_decay ? s.lr * s.weight_decay : s.weight_decay;
  return {grad_scalars<Real>(grad),         static_cast<Real>(decay),
          static_cast<Real>(1.0 - s.beta1), static_cast<Real>(s.beta2),
          static_cast<Real>(1.0 - s.beta2), static_cast<Real>(s.eps),
          static_cast<Real>(s.lr / bc1),    static_cast<Real>(1.0 / square_root(bc2))};
}

// p <- Adam(p, grad); m and v are updated in place.
template <bool decoupled_weight_decay, class Real>
MIXPREC_HD Real adamw(Real p, Real grad, Real& m, Real& v, const AdamWScalars<Real>& s) {
  Real g = usable_grad(grad, s.grad);
  // Without decay an infinite p must stay infinite: 0 * Inf would be NaN.
  if (decoupled_weight_decay) {
    p = s.decay != 0 ? p - p * s.decay : p;
  } else {
    g = s.decay != 0 ? g + p * s.decay : g;
  }
  m = m + (g - m) * s.one_minus_beta1;
  v = v * s.beta2 + (g * g) * s.one_minus_beta2;
  return p - (m / (square_root(v) * s.inv_sqrt_bc2 + s.eps)) * s.step_size;
}

}  // namespace mixprec
