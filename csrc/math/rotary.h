// The rotation of a pair of features.
#pragma once

#include "hd.h"

namespace mixprec {

MIXPREC_HD float rotary_first(float x1, float x2, float cos, float sin) {
  return x1 * cos - x2 * sin;
}

MIXPREC_HD float rotary_second(float x1, float x2, float cos, float sin) {
  return x2 * cos + x1 * sin;
}

}  // namespace mixprec
