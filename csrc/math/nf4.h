// NF4: a weight in 4 bits, blocks of 64 elements that share a scale. Documented in
// mixprec/ops/nf4.py.
#pragma once

#include "convert.h"

namespace mixprec {

constexpr int kNf4Block = 64;
constexpr int64_t kNf4Nested = 256;  // scales that share one of their own
constexpr int kNf4Zero = 7;          // the code of 0

constexpr int64_t nf4_blocks(int64_t n) { return (n + kNf4Block - 1) / kNf4Block; }
constexpr int64_t nf4_nested(int64_t n) { return (nf4_blocks(n) + kNf4Nested - 1) / kNf4Nested; }
constexpr int64_t nf4_bytes(int64_t n) { return (n + 1) / 2; }

// Quantiles of the normal distribution; QLoRA (arXiv 2305.14314), appendix E.
constexpr float kNf4Values[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

struct Nf4Midpoints {
  float of[15];
};
constexpr Nf4Midpoints nf4_midpoints() {
  Nf4Midpoints m = {};
  for (int i = 0; i < 15; ++i) m.of[i] = (kNf4Values[i] + kNf4Values[i + 1]) / 2.0f;
  return m;
}

// What a scale is at least where numbers are divided by it.
constexpr float kNf4MinScale = 1e-38f;

// The 256 values of the codes of scales, in order: 0, 1, and with either sign the centers of 2^i
// equal parts of [0.1, 1], times 10^(i - 6).
struct DynamicMap {
  float of[256];
};
constexpr DynamicMap dynamic_map() {
  constexpr float powers[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
  DynamicMap map = {};
  int code = 128;
  for (int i = 0; i < 7; ++i) {
    int parts = 1 << i;
    float width = (1.0f - 0.1f) / static_cast<float>(parts), last = 0.1f;
    for (int k = 1; k <= parts; ++k, ++code) {
      double from_left = static_cast<double>(0.1f) + static_cast<double>(width) * k;
      double from_right = 1.0 - static_cast<double>(width) * (parts - k);
      float next = static_cast<float>(2 * k < parts ? from_left : from_right);
      map.of[code] = (last + next) / 2.0f * powers[i];
      map.of[254 - code] = -map.of[code];
      last = next;
    }
  }
  map.of[255] = 1.0f;
  return map;
}

}  // namespace mixprec
