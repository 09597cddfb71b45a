// Block formats, MX and NVFP4: numbers in blocks of 32 or 16 that share a scale of one byte. The
// rules are in docs/numerics.md, the sources in mixprec/ops/_reference/block_formats.py.
#pragma once

#include "convert.h"
#include "scale.h"

namespace mixprec {

struct E2m1 {  // in the low 4 bits
  uint8_t bits;
};
struct E3m2 {  // in the low 6 bits
  uint8_t bits;
};
struct E2m3 {
  uint8_t bits;
};

// bits: the width of a code. max_bits: the largest number, as bits of fp32.
template <int width, int mantissa_bits, int exponent_bias, uint32_t largest>
struct ElementFormat {
  static constexpr int bits = width, mantissa = mantissa_bits, bias = exponent_bias;
  static constexpr uint32_t max_bits = largest;
};
template <class E>
struct Element;
template <>
struct Element<E4m3> : ElementFormat<8, 3, 7, 0x43E00000u> {};
template <>
struct Element<E5m2> : ElementFormat<8, 2, 15, 0x47600000u> {};
template <>
struct Element<E3m2> : ElementFormat<6, 2, 3, 0x41E00000u> {};
template <>
struct Element<E2m3> : ElementFormat<6, 3, 1, 0x40F00000u> {};
template <>
struct Element<E2m1> : ElementFormat<4, 1, 1, 0x40C00000u> {};

template <class E>
MIXPREC_HD uint8_t with_sign(uint32_t magnitude, float y) {
  return static_cast<uint8_t>(magnitude | (float_bits(y) >> 31) << (Element<E>::bits - 1));
}

// The code of y, which is not NaN: to nearest, ties to even, saturated.
template <class E>
MIXPREC_HD uint8_t encode_element(float y) {
  using F = Element<E>;
  uint32_t u = float_bits(y) & 0x7FFFFFFFu;
  return with_sign<E>(round_magnitude<F::mantissa, F::bias, F::max_bits>(u), y);
}

// The same, rounded up if the part of a step that is cut off, in units of 2^-16, and 16 random bits
// carry.
template <class E>
MIXPREC_HD uint8_t encode_element(float y, uint32_t random) {
  using F = Element<E>;
  constexpr uint32_t min_normal = static_cast<uint32_t>(128 - F::bias) << 23;
  uint32_t u = float_bits(y) & 0x7FFFFFFFu;
  u = u < F::max_bits ? u : F::max_bits;
  uint32_t exponent = u & 0x7F800000u;
  exponent = exponent > min_normal ? exponent : min_normal;
  float unit = bits_float((static_cast<uint32_t>(270 + F::mantissa) << 23) - exponent);
  uint32_t steps = static_cast<uint32_t>(static_cast<int32_t>(bits_float(u) * unit));
  uint32_t code = ((steps + random) >> 16) + ((exponent - min_normal) >> (23 - F::mantissa));
  return with_sign<E>(code, y);
}

// Of fewer than 8 bits; what is above them is ignored.
template <class E>
MIXPREC_HD float decode_element(E q) {
  using F = Element<E>;
  constexpr uint32_t sign_bit = 1u << (F::bits - 1);
  uint32_t magnitude = q.bits & (sign_bit - 1);
  uint32_t sign = (q.bits & sign_bit) << (32 - F::bits);
  uint32_t normal =
      (magnitude << (23 - F::mantissa)) + (static_cast<uint32_t>(127 - F::bias) << 23);
  constexpr float least = 1.0f / static_cast<float>(1 << (F::bias - 1 + F::mantissa));
  float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * least;
  uint32_t u = magnitude < (1u << F::mantissa) ? float_bits(subnormal) : normal;
  return bits_float(u | sign);
}
MIXPREC_HD float decode_element(E4m3 q) { return decode(q); }
MIXPREC_HD float decode_element(E5m2 q) { return decode(q); }

// E8M0: 2^(code - 127), 255 is NaN.
MIXPREC_HD float e8m0_value(uint8_t code) {
  uint32_t u = static_cast<uint32_t>(code) << 23;
  u = code == 0 ? 0x00400000u : u;  // subnormal
  return bits_float(code == 255 ? 0x7FC00000u : u);
}

enum class BlockFormat : int32_t { mxfp8_e4m3, mxfp8_e5m2, mxfp6_e3m2, mxfp6_e2m3, mxfp4, nvfp4 };

// Elements that share a scale; scales and bytes of codes in a row of k elements.
MIXPREC_HD int block_size(BlockFormat f) { return f == BlockFormat::nvfp4 ? 16 : 32; }
MIXPREC_HD int64_t blocks_of(BlockFormat f, int64_t k) {
  return (k + block_size(f) - 1) / block_size(f);
}
MIXPREC_HD bool is_fp4(BlockFormat f) { return f >= BlockFormat::mxfp4; }
MIXPREC_HD int64_t block_bytes(BlockFormat f, int64_t k) { return is_fp4(f) ? (k + 1) / 2 : k; }

// Swizzled scales, as the tensor cores of Blackwell read them: tiles of 128 rows and 4 blocks, each
// 512 bytes, row-major, with zeros beyond the last row and block.
constexpr int64_t kSwizzleRows = 128, kSwizzleBlocks = 4;
MIXPREC_HD int64_t swizzle_tiles(int64_t size, int64_t side) { return (size + side - 1) / side; }

// The position of a scale; blocks: those of a row.
MIXPREC_HD int64_t swizzled_at(int64_t row, int64_t block, int64_t blocks) {
  int64_t across = swizzle_tiles(blocks, kSwizzleBlocks);
  int64_t tile = row / kSwizzleRows * across + block / kSwizzleBlocks;
  return tile * kSwizzleRows * kSwizzleBlocks + row % 32 * 16 + row % kSwizzleRows / 32 * 4 +
         block % kSwizzleBlocks;
}

// f(Element{}) for the type of the elements.
template <class F>
MIXPREC_HD void with_element(BlockFormat format, F&& f) {
  switch (format) {
    case BlockFormat::mxfp8_e4m3:
      return f(E4m3{});
    case BlockFormat::mxfp8_e5m2:
      return f(E5m2{});
    case BlockFormat::mxfp6_e3m2:
      return f(E3m2{});
    case BlockFormat::mxfp6_e2m3:
      return f(E2m3{});
    default:
      return f(E2m1{});
  }
}

enum class ScaleMode : int32_t { floor, ceil, even, rceil };

// By which error a block has the better of the scales that make its amax 6 or 4.
enum class Adaptive : int32_t { none, mae, mse };

// How the scale of a block follows from its amax, the same for all blocks of a tensor.
struct ScaleRule {
  bool nvfp4;
  bool up;  // NVFP4: scales are rounded up, as stochastic rounding needs it
  // MX: the exponent of `amax`'s bits plus `add`, which carries into it, less that of the largest
  // element.
  uint32_t add;
  int32_t largest;
  // NVFP4: S / 6 and 1 / S of the scale S of the tensor.
  float sixth, tensor_inv;
  // NVFP4 with two scales to choose from: S, the amax of the tensor and their product.
  Adaptive adaptive = Adaptive::none;
  float scale = 0.0f, amax = 0.0f, largest_product = 0.0f;
};

template <class E>
MIXPREC_HD ScaleRule mx_rule(ScaleMode mode) {
  constexpr uint32_t fraction = 0x7FFFFFu, max_bits = Element<E>::max_bits;
  uint32_t add = mode == ScaleMode::floor  ? 0u
                 : mode == ScaleMode::ceil ? fraction
                 : mode == ScaleMode::even ? 1u << (22 - Element<E>::mantissa)
                                           : fraction - (max_bits & fraction);
  return {false, false, add, static_cast<int32_t>(max_bits >> 23) - 127, 0.0f, 0.0f};
}

// How the scales of NVFP4 blocks are made. bound: the largest; factor: by which they are larger
// than those that make the largest element 6; nearest: Transformer Engine's, by a reciprocal and
// never up.
struct Nvfp4Scales {
  float bound = 448.0f, factor = 1.0f;
  bool nearest = false;
  Adaptive adaptive = Adaptive::none;
};

MIXPREC_HD ScaleRule nvfp4_rule(float tensor_amax, bool stochastic, Nvfp4Scales how = {}) {
  auto largest = static_cast<float>(6.0 * how.bound / how.factor);
  float scale = scale_from_amax(tensor_amax, largest, 1.0f, false, 1.0f);
  float times = how.nearest ? scale * static_cast<float>(how.factor / 6.0)
                            : scale / static_cast<float>(6.0 / how.factor);
  bool up = stochastic && !how.nearest;
  return {true, up, 0u, 0, times, 1.0f / scale, how.adaptive, scale, tensor_amax, 6.0f * how.bound};
}

MIXPREC_HD ScaleRule scale_rule(BlockFormat format, ScaleMode mode, float tensor_amax,
                                bool stochastic) {
  if (format == BlockFormat::nvfp4) return nvfp4_rule(tensor_amax, stochastic);
  ScaleRule rule = {};
  with_element(format, [&](auto e) { rule = mx_rule<decltype(e)>(mode); });
  return rule;
}

// A cast to a block format.
struct BlockCastRule {
  BlockFormat format;
  ScaleRule scale;
  bool stochastic;
  uint64_t seed;
  uint32_t stream;  // 0 for x, 1 for its transpose
  // The amaxes of square blocks, as bits, from that of the first element on; or none.
  const uint32_t* squares = nullptr;
  int64_t ld_squares = 0;

  // The same for what begins with another element.
  MIXPREC_HD BlockCastRule at(int64_t row, int64_t col) const {
    BlockCastRule there = *this;
    int block = block_size(format);
    if (squares != nullptr) there.squares += row / block * ld_squares + col / block;
    return there;
  }
};

struct BlockScale {
  uint8_t code;
  float factor;  // what elements are multiplied with
};

// amax: the bits of the largest magnitude of a block. If it is Inf or NaN the code is NaN, and all
// codes of elements are 0, whatever the factor.
MIXPREC_HD BlockScale mx_scale(uint32_t amax, const ScaleRule& rule) {
  int32_t code = static_cast<int32_t>((amax + rule.add) >> 23) - rule.largest;
  code = code > 0 ? code : 0;
  code = is_nonfinite_bits(amax) ? 255 : code;
  // 2^(127 - code), a normal number: codes of finite blocks are at most 253.
  uint32_t factor = code == 255 ? 0u : static_cast<uint32_t>(254 - code) << 23;
  return {static_cast<uint8_t>(code), bits_float(factor)};
}

template <bool up>
MIXPREC_HD BlockScale nvfp4_scale(uint32_t amax, const ScaleRule& rule) {
  E4m3 code = Convert<E4m3>::encode<true>(bits_float(amax), rule.sixth);
  if (up) {
    uint32_t below = decode(code) < bits_float(amax) * rule.sixth ? 1u : 0u;
    uint32_t raised = code.bits + below;
    code.bits = static_cast<uint8_t>(raised < 0x7Fu ? raised : 0x7Eu);  // 448
  }
  float factor = 1.0f / (decode(code) * rule.tensor_inv);
  factor = factor < 0x1.FFFFFEp127f ? factor : 0x1.FFFFFEp127f;
  return {is_nonfinite_bits(amax) ? uint8_t{0x7F} : code.bits, factor};
}

MIXPREC_HD BlockScale block_scale(uint32_t amax, const ScaleRule& rule) {
  if (!rule.nvfp4) return mx_scale(amax, rule);
  return rule.up ? nvfp4_scale<true>(amax, rule) : nvfp4_scale<false>(amax, rule);
}

// The sum over a block of NVFP4 of |x' - x| or (x' - x)^2, in order, for the values x' with this
// scale.
template <class X>
MIXPREC_HD float block_error(const X* x, const BlockScale& s, const ScaleRule& rule) {
  float off[16], total = 0.0f, scale = decode(E4m3{s.code});
  for (int i = 0; i < 16; ++i) {
    float v = decode(x[i]), q = decode_element(E2m1{encode_element<E2m1>(v * s.factor)});
    off[i] = q * scale * rule.amax / rule.largest_product - v;
  }
  bool mse = rule.adaptive == Adaptive::mse;
  for (float e : off) total += mse ? e * e : e < 0.0f ? -e : e;
  return total;
}

// The better of the scales that make the largest element of x 4 and 6: the latter if both are as
// good. amax: its bits.
template <class X>
MIXPREC_HD BlockScale better_scale(const X* x, uint32_t amax, const ScaleRule& rule) {
  ScaleRule exactly = rule;
  exactly.sixth = 1.0f;
  float exact = bits_float(amax) / 6.0f * rule.scale;
  BlockScale six = block_scale(float_bits(exact), exactly);
  BlockScale four = block_scale(float_bits(exact * 1.5f), exactly);
  return block_error(x, four, rule) < block_error(x, six, rule) ? four : six;
}

}  // namespace mixprec
