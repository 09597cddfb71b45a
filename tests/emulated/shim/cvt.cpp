// The model of the GPU's conversion instructions against the casts of csrc/math, and the divisions
// of near_float.cuh, of a reciprocal that is as wrong as it may be, and activations made of them
// against plain FP32, for test_cvt.py.
#include "cuda/common/convert.cuh"
#include "cuda/fused/activate.cuh"
#include "cuda/grads/grads.cuh"
#include "math/mx.h"

using namespace mixprec;
using namespace mixprec::cuda;

namespace {

// Of 16 bits; any NaN is any other.
template <class T>
bool agrees(float x, uint32_t pair) {
  uint16_t code = Convert<T>::encode(x).bits, first = static_cast<uint16_t>(pair);
  if (first != pair >> 16) return false;
  bool nan = x != x,
       is_nan = is_nonfinite(decode(T{first})) && decode(T{first}) != decode(T{first});
  // What the gradients' kernels take for finite stays so.
  bool finite = !is_nonfinite(decode(T{code}));
  return (nan ? is_nan : first == code) && is_finite_in<T>(x) == finite;
}

// The kernels use the instruction unless x is Inf, which it saturates.
template <class Q>
bool agrees_in_fp8(float x, uint32_t codes) {
  uint8_t code = Convert<Q>::encode(x, 1.0f).bits, first = static_cast<uint8_t>(codes);
  if (codes != first * 0x01010101u) return false;
  if (__builtin_isinf(x)) return (first & 0x7F) == (std::is_same_v<Q, E4m3> ? 0x7E : 0x7B);
  return x != x ? (first & 0x7F) == 0x7F : first == code;
}

// NaN is not encoded.
bool agrees_in_fp4(float x) {
  const float eight[8] = {x, x, x, x, x, x, x, x};
  return x != x || ptx::e2m1x8(eight) == encode_element<E2m1>(x) * 0x11111111u;
}

bool agrees(int instruction, float x) {
  const float four[4] = {x, x, x, x};
  switch (instruction) {
    case 0:
      return agrees<Bf16>(x, ptx::bf16x2(x, x));
    case 1:
      return agrees<Fp16>(x, ptx::fp16x2(x, x));
    case 2:
      return agrees_in_fp8<E4m3>(x, ptx::e4m3x4(four));
    case 3:
      return agrees_in_fp8<E5m2>(x, ptx::e5m2x4(four));
    default:
      return agrees_in_fp4(x);
  }
}

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

// The first pattern of [first, last) for which an instruction and the cast disagree; else last.
int64_t disagrees(int instruction, int64_t first, int64_t last) {
  for (; first < last; ++first) {
    if (!agrees(instruction, bits_float(static_cast<uint32_t>(first)))) break;
  }
  return first;
}

// Likewise of the multiples of `step` and of the patterns before and after each.
int64_t disagrees_near(int instruction, int64_t step) {
  constexpr int64_t all = int64_t{1} << 32;
  for (int64_t u = 0; u < all; u += step) {
    if (int64_t at = disagrees(instruction, u - 1, u + 2); at != u + 2) return at;
  }
  return all;
}

// Likewise of all FP16 numbers, and of all pairs of FP8 and of FP4 codes.
int64_t widens_otherwise() {
  for (uint32_t u = 0; u < 1 << 16; ++u) {
    Fp16 x = {static_cast<uint16_t>(u)};
    if (!same(ptx::widen(x), decode(x))) return u;
    E4m3 q[2] = {{static_cast<uint8_t>(u)}, {static_cast<uint8_t>(u >> 8)}};
    E5m2 p[2] = {{q[0].bits}, {q[1].bits}};
    float of_q[2], of_p[2];
    decode_all(q, of_q);
    decode_all(p, of_p);
    uint32_t fp4 = ptx::fp16x2_of_e2m1x2(q[0].bits);
    for (int j = 0; j < 2; ++j) {
      if (!same(of_q[j], decode(q[j])) || !same(of_p[j], decode(p[j]))) return u;
      E2m1 code = {static_cast<uint8_t>(q[0].bits >> (4 * j) & 0xF)};
      Fp16 half = {static_cast<uint16_t>(fp4 >> (16 * j))};
      if (!same(decode(half), decode_element(code))) return u;
    }
  }
  return 1 << 16;
}

// The first element is the lowest part.
int in_order() {
  const float steps[8] = {0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.5f};
  const float four[4] = {1.0f, 2.0f, 1.0f, 2.0f};
  E4m3 q[2] = {Convert<E4m3>::encode(1.0f, 1.0f), Convert<E4m3>::encode(2.0f, 1.0f)};
  return ptx::bf16x2(1.0f, 2.0f) == 0x40003F80u && ptx::fp16x2(1.0f, 2.0f) == 0x40003C00u &&
         ptx::e4m3x4(four) == (0x40380000u | q[0].bits | q[1].bits << 8) &&
         ptx::e5m2x4(four) == 0x403C403Cu &&
         ptx::max_u16x2(0x00028001u, 0x7FFF7FFFu) == 0x7FFF8001u &&
         ptx::e2m1x8(steps) == 0x97654321u && ptx::fp16x2_of_e4m3x2(0x4038) == 0x40003C00u;
}

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
