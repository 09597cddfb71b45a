// g * inv_scale in the arithmetic of the gradient's width: fp32, or fp64 for fp64 gradients.
#pragma once

#include "convert.h"

namespace mixprec {

template <class T>
struct Unscale {
  using Real = float;
  static MIXPREC_HD float apply(T g, float inv_scale) { return decode(g) * inv_scale; }
  static MIXPREC_HD T round(float x) { return Convert<T>::encode(x); }
  static MIXPREC_HD bool bad(T g) { return is_nonfinite(decode(g)); }
};

template <>
struct Unscale<double> {
  using Real = double;
  static MIXPREC_HD double apply(double g, double inv_scale) { return g * inv_scale; }
  static MIXPREC_HD double round(double x) { return x; }
  static MIXPREC_HD bool bad(double g) { return is_nonfinite(g); }
};

}  // namespace mixprec
