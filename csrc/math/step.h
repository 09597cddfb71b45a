// Shared by the optimizer updates: the gradient as they use it.
#pragma once

#include "hd.h"

namespace mixprec {

template <class Real>
struct GradScalars {
  Real inv_scale;
  Real clip;  // negated to maximize
  Real max_value;
};

template <class Real>
MIXPREC_HD Real usable_grad(Real grad, const GradScalars<Real>& s) {
  Real g = grad * s.inv_scale * s.clip;
  g = g > s.max_value ? s.max_value : g;  // NaN stays NaN
  return g < -s.max_value ? -s.max_value : g;
}

// The caller's hyperparameters, from which the scalars of a step are computed.
struct GradSettings {
  double inv_scale, clip, max_value;
  bool maximize;
};

template <class Real>
MIXPREC_HD GradScalars<Real> grad_scalars(const GradSettings& s) {
  return {static_cast<Real>(s.inv_scale), static_cast<Real>(s.maximize ? -s.clip : s.clip),
          static_cast<Real>(s.max_value)};
}

}  // namespace mixprec
