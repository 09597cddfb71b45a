// The end of a step of delayed scaling, for one tensor; source in mixprec/ops/delayed_scales.py.
#pragma once

#include "scale.h"

namespace mixprec {

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
