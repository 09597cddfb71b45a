// One AdamW update of one element; the order of the operations is binding (docs/numerics.md).
#pragma once

#include "hd.h"

namespace mixprec {

// The step's constants, each formed in fp64 and rounded once to Real.
template <class Real>
struct AdamWScalars {
  Real inv_scale;
  Real clip;   // negated to maximize
  Real decay;  // lr * weight_decay
  Real one_minus_beta1;
  Real beta2;
  Real one_minus_beta2;
  Real eps;
  Real step_size;     // lr / (1 - beta1^step)
  Real inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^step)
};

// beta^step by products alone: pow differs between math libraries.
MIXPREC_HD double power(double beta, int64_t step) {
  double result = 1.0;
  for (; step > 0; step >>= 1, beta *= beta) {
    if (step & 1) result *= beta;
  }
  return result;
}

MIXPREC_HD float square_root(float x) { return __builtin_sqrtf(x); }
MIXPREC_HD double square_root(double x) { return __builtin_sqrt(x); }

// What the caller sets, from which the scalars of a step follow.
struct AdamWSettings {
  double lr, beta1, beta2, eps, weight_decay, inv_scale, clip;
};

template <class Real>
MIXPREC_HD AdamWScalars<Real> adamw_scalars(const AdamWSettings& s, int64_t step) {
  double bc1 = 1.0 - power(s.beta1, step), bc2 = 1.0 - power(s.beta2, step);
  return {static_cast<Real>(s.inv_scale),
          static_cast<Real>(s.clip),
          static_cast<Real>(s.lr * s.weight_decay),
          static_cast<Real>(1.0 - s.beta1),
          static_cast<Real>(s.beta2),
          static_cast<Real>(1.0 - s.beta2),
          static_cast<Real>(s.eps),
          static_cast<Real>(s.lr / bc1),
          static_cast<Real>(1.0 / square_root(bc2))};
}

// p <- AdamW(p, grad); m and v are updated in place.
template <class Real>
MIXPREC_HD Real adamw(Real p, Real grad, Real& m, Real& v, const AdamWScalars<Real>& s) {
  Real g = grad * s.inv_scale * s.clip;
  p = p - p * s.decay;
  m = m + (g - m) * s.one_minus_beta1;
  v = v * s.beta2 + (g * g) * s.one_minus_beta2;
  return p - (m / (square_root(v) * s.inv_sqrt_bc2 + s.eps)) * s.step_size;
}

}  // namespace mixprec
