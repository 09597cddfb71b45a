// The scale that follows from an amax, the end of a step of delayed scaling, and the update of the
// loss scale. The sources of the formulas are named in mixprec/ops/scale.py and delayed_scales.py.
#pragma once

#include "hd.h"

namespace mixprec {

// fmt_max / amax * 2^-margin in one rounding, clamped to [2^-126, 2^126] so that its inverse is
// normal; `previous` where amax is 0, Inf or NaN.
MIXPREC_HD float scale_from_amax(float amax, float fmt_max, float two_to_minus_margin,
                                 bool power_of_two, float previous) {
  if (!(amax > 0.0f) || is_nonfinite(amax)) return previous;
  float scale = fmt_max / amax * two_to_minus_margin;
  // Masking the mantissa rounds down; a logarithm would give Inf at the top of the range.
  if (power_of_two) scale = bits_float(float_bits(scale) & 0x7F800000u);
  scale = scale < 0x1p-126f ? 0x1p-126f : scale;
  return scale > 0x1p126f ? 0x1p126f : scale;
}

// A scale that the caller has given: NaN, which every result then shows, unless it is positive and
// its inverse is normal.
MIXPREC_HD float checked_scale(float given) {
  return given >= 0x1p-126f && given <= 0x1p126f ? given : bits_float(0x7FC00000u);
}

// min(1, max_norm / (norm + 1e-6)), NaN where the norm is.
MIXPREC_HD float clip_coef(double sum_sq, double max_norm) {
  double clip = max_norm / (square_root(sum_sq) + 1e-6);
  return static_cast<float>(clip > 1.0 ? 1.0 : clip);
}

struct LossScale {
  float scale;
  int32_t growth_tracker;
  int32_t hysteresis_tracker;
  int64_t skipped, applied, skipped_in_a_row;  // counts of updates
};

struct LossScaleRule {
  double growth_factor;  // the products are formed in fp64 and rounded once, as torch does
  double backoff_factor;
  int64_t growth_interval;
  float min_scale;
  float max_scale;
  int32_t hysteresis;
};

// Growth on underflow needs only growth_interval / kEarly updates without an overflow.
constexpr int64_t kEarly = 20;

MIXPREC_HD LossScale update_loss_scale(LossScale s, bool found_inf, bool underflow,
                                       const LossScaleRule& rule) {
  s.skipped += found_inf;
  s.applied += !found_inf;
  s.skipped_in_a_row = found_inf ? s.skipped_in_a_row + 1 : 0;
  if (found_inf) {
    s.growth_tracker = 0;
    s.hysteresis_tracker = s.hysteresis_tracker > 1 ? s.hysteresis_tracker - 1 : 0;
    if (s.hysteresis_tracker == 0) {
      float lower = static_cast<float>(s.scale * rule.backoff_factor);
      lower = lower < rule.min_scale ? rule.min_scale : lower;
      s.scale = lower < s.scale ? lower : s.scale;
    }
  } else if (int64_t waited = ++s.growth_tracker;
             waited >= rule.growth_interval ||
             (underflow && waited * kEarly >= rule.growth_interval)) {
    float higher = static_cast<float>(s.scale * rule.growth_factor);
    higher = higher > rule.max_scale ? rule.max_scale : higher;
    if (!is_nonfinite(higher) && higher > s.scale) s.scale = higher;
    s.growth_tracker = 0;
    s.hysteresis_tracker = rule.hysteresis;
  }
  return s;
}

constexpr float kUnused = -1.0f;  // marks an unused entry: no amax is negative

// Records amax in history (L entries, newest first) unless it is unused or not finite, and returns
// the scale of the next step.
MIXPREC_HD float update_delayed_scale(float* history, int64_t length, float amax, float scale,
                                      float fmt_max, float two_to_minus_margin, bool power_of_two,
                                      bool most_recent) {
  if (amax < 0.0f || is_nonfinite(amax)) return scale;
  float largest = amax;
  for (int64_t i = length - 1; i > 0; --i) {
    history[i] = history[i - 1];
    if (!most_recent && history[i] > largest) largest = history[i];
  }
  history[0] = amax;
  return scale_from_amax(largest, fmt_max, two_to_minus_margin, power_of_two, scale);
}

}  // namespace mixprec
