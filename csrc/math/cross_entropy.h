// What cross_entropy and cross_entropy_backward compute of each logit. Numbers (F) are float, or
// several vectors side by side, as in activation.h.
#pragma once

#include "activation.h"

namespace mixprec {

// e^d: 0 below -87, e^87 above 87; NaN stays.
template <class F>
MIXPREC_HD F bounded_exp(F d) {
  F e = exp_fp32_near(if_negative(87.0f - d, 87.0f, d));
  return if_negative(d + 87.0f, 0.0f, e);
}

// tanh(x / softcap), scale being 2 / softcap; below 1/8, where the difference would cancel, its
// series.
template <class F>
MIXPREC_HD F softcap_tanh(F x, float scale) {
  F v = x * scale, u = v * 0.5f, q = u * u;
  F series = ((q * (-17.0f / 315.0f) + 2.0f / 15.0f) * q - 1.0f / 3.0f) * q * u + u;
  return if_negative(q - 0.015625f, series, 1.0f - 2.0f / (bounded_exp(v) + 1.0f));
}

struct Softcap {
  float value, scale;  // 0: none; 2 / value
};

MIXPREC_HD Softcap make_softcap(double value) {
  return {static_cast<float>(value), value == 0.0 ? 0.0f : static_cast<float>(2.0 / value)};
}

// Of a row: factor of its probabilities, the label smoothing of each class, the weight of its loss.
struct CrossEntropyRow {
  float logsumexp, factor, smoothing, weight;
};

// label: 1 - label_smoothing for the target, else 0.
template <bool capped, class F>
MIXPREC_HD F cross_entropy_grad(F x, float label, const CrossEntropyRow& row, Softcap softcap) {
  F t = x, s = x;
  if constexpr (capped) {
    t = softcap_tanh(x, softcap.scale);
    s = t * softcap.value;
  }
  F g = (bounded_exp(s - row.logsumexp) * row.factor - row.smoothing) - label;
  if constexpr (capped) g = g * (1.0f - t * t);
  return g * row.weight;
}

}  // namespace mixprec
