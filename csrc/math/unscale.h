// g * inv_scale in the arithmetic of the gradient's width: fp32, or fp64 for fp64 gradients.
#pragma once

#include "convert.h"

namespace mixprec {

// The class of a gradient element, from its bits: those of fp32, to which every narrower format
// decodes exactly, or of fp64. `raw` is the value before unscaling, `unscaled` after. Inf and NaN
// need no look at `raw`: whatever they are multiplied with, 0 and NaN included, is Inf or NaN.
struct GradKind {
  bool inf, nan;         // after
  bool zero, subnormal;  // before, in the gradient's own format
};

template <class Bits>
MIXPREC_HD GradKind grad_kind(Bits raw, Bits unscaled, Bits sign, Bits infinity, Bits min_normal) {
  raw &= ~sign;
  unscaled &= ~sign;
  // 0 - 1 wraps around to the largest number.
  return {unscaled == infinity, unscaled > infinity, raw == 0, raw - 1 < min_normal - 1};
}

template <class T>
struct MinNormal {
  static constexpr uint32_t bits = 0x00800000u;  // fp32, bf16: 2^-126
};
template <>
struct MinNormal<Fp16> {
  static constexpr uint32_t bits = 0x38800000u;  // 2^-14
};

template <class T>
struct Unscale {
  using Real = float;
  static MIXPREC_HD GradKind kind(float raw, float unscaled) {
    return grad_kind<uint32_t>(float_bits(raw), float_bits(unscaled), 0x80000000u, 0x7F800000u,
                               MinNormal<T>::bits);
  }
  static MIXPREC_HD float apply(T g, float inv_scale) { return decode(g) * inv_scale; }
  static MIXPREC_HD T round(float x) { return Convert<T>::encode(x); }
};

template <>
struct Unscale<double> {
  using Real = double;
  static MIXPREC_HD GradKind kind(double raw, double unscaled) {
    uint64_t before, after;
    __builtin_memcpy(&before, &raw, sizeof before);
    __builtin_memcpy(&after, &unscaled, sizeof after);
    return grad_kind<uint64_t>(before, after, 1ull << 63, 0x7FFull << 52, 1ull << 52);
  }
  static MIXPREC_HD double apply(double g, double inv_scale) { return g * inv_scale; }
  static MIXPREC_HD double round(double x) { return x; }
};

}  // namespace mixprec
