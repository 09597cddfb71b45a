// The elementwise formulas of attention and its gradients.
#pragma once

#include "exp.h"

namespace mixprec {

// The weight of a score, of which `shift`, the maximum or the logsumexp of its row, is subtracted.
MIXPREC_HD float attention_weight(float score, float shift) { return exp_fp32(score - shift); }

// What is subtracted from scores with this maximum: a row that has seen nothing but -inf stays at
// weights of 0 instead of NaN until it sees another score.
MIXPREC_HD float attention_shift(float maximum) {
  return float_bits(maximum) == 0xFF800000u ? 0.0f : maximum;
}

// The gradient of q k^T. of_weight: the gradient of the weight; shared: sum of g * out of the row.
MIXPREC_HD float score_gradient(float weight, float of_weight, float shared, float scale) {
  return weight * (of_weight - shared) * scale;
}

}  // namespace mixprec
