// LayerNorm and RMSNorm of a row, element by element. RMSNorm is the case of mean and c2 = 0, which
// changes no bit.
#pragma once

#include "hd.h"

namespace mixprec {

// A sum over a row is that of kNormLanes partial sums: partial[j] = 0 + x[j] + x[j + kNormLanes] +
// ..., elements beyond the row being 0; then for s = kNormLanes / 2, ..., 2, 1:
// partial[j] += partial[j + s] for j < s.
constexpr int kNormLanes = 256;
// dweight and dbias are sums over bands of so many rows, of 0 + row after row, then 0 + band after
// band.
constexpr int kNormBand = 64;

MIXPREC_HD float norm_mean(float sum, float k) { return sum / k; }

// squares: the sum of (x - mean)^2.
MIXPREC_HD float norm_square(float x, float mean) { return (x - mean) * (x - mean); }
// Where the sum has overflowed, NaN, and not 0, with which a row would be 0.
MIXPREC_HD float norm_rstd(float squares, float k, float eps) {
  float variance = squares / k + eps;
  return 1.0f / square_root(variance) + 0.0f * variance;
}

MIXPREC_HD float norm_xhat(float x, float mean, float rstd) { return (x - mean) * rstd; }
// * weight and + bias where they are given (a weight of 1 and a bias of -0 change no bit).
MIXPREC_HD float norm_value(float xhat, float weight, float bias) { return xhat * weight + bias; }

// gw = g * weight; c1 = sum of gw * xhat / K; c2 = sum of gw / K. Then + g_total, if it is given
// (-0 changes no bit).
MIXPREC_HD float norm_dx(float gw, float xhat, float c1, float c2, float rstd) {
  return ((gw - c2) - xhat * c1) * rstd;
}

}  // namespace mixprec
