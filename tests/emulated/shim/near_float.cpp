// The divisions of near_float.cuh, of a reciprocal that is as wrong as it may be, and activations
// made of them against plain FP32, for test_near_float.py.
#include "cuda/fused/activate.cuh"

using namespace mixprec;
using namespace mixprec::cuda;

namespace {

bool same(float a, float b) { return a != a ? b != b : float_bits(a) == float_bits(b); }

template <Activation kind>
bool activates(float x) {
  ValueAndSlope<float> right = activation<kind>(x);
  ValueAndSlope<NearFloat> near = activation<kind, true>(NearFloat(x));
  return same(right.value, near.value.at) && same(right.slope, near.slope.at);
}

bool activates(Activation kind, float x) {
  switch (kind) {
    case Activation::silu:
      return activates<Activation::silu>(x);
    case Activation::gelu:
      return activates<Activation::gelu>(x);
    default:
      return activates<Activation::gelu_tanh>(x);
  }
}

}  // namespace

extern "C" {

// The first fraction of a divisor for which a reciprocal or a quotient is not FP32's; else 2^23.
int64_t divides_otherwise() {
  uint32_t state = 1;
  for (uint32_t fraction = 0; fraction < 1u << 23; ++fraction) {
    state = state * 1664525u + 1013904223u;
    uint32_t exponent = 127 + (state >> 8) % 126;  // 1 to 2^126
    float b = bits_float(exponent << 23 | fraction);
    float a = bits_float((state & 0x80000000u) | exponent << 23 | (state >> 3 & 0x7FFFFFu));
    if (!same((1.0f / NearFloat(b)).at, 1.0f / b)) return fraction;
    if (!same((NearFloat(a) / NearFloat(b)).at, a / b)) return fraction;
  }
  return 1 << 23;
}

// The first pattern, of every `step`-th and of both signs, from 0 to activation_near, for which an
// activation or its slope is not that of any number; else that of activation_near.
int64_t activates_otherwise(int kind, int64_t step) {
  Activation of = static_cast<Activation>(kind);
  uint32_t last = float_bits(activation_near(of));
  for (int64_t u = 0; u <= last; u += step) {
    float x = bits_float(static_cast<uint32_t>(u));
    if (!activates(of, x) || !activates(of, -x)) return u;
  }
  return activates(of, bits_float(last)) && activates(of, -bits_float(last)) ? last : last - 1;
}
}
