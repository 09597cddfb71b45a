// What the tensor cores of GPUs compute: one step of a sum of products, exactly. NVIDIA's:
//
//   e(x) = max(floor(log2 |x|), smallest normal exponent of x's format)
//   top  = max(min_exponent, e(c) and e(a_i) + e(b_i), of what is not 0)
//   unit = 2^(top - fraction_bits)
//   step = round(unit * (trunc(c / unit) + sum of trunc(a_i * b_i / unit)))
//
// The addends are integers and their sum is exact; round cuts to `significant_bits`, toward zero.
// This reproduces every result that was measured on V100, A100, Ada, H100, H200 and B200 (16 bits)
// by the authors of arXiv 2512.07004 (github.com/north-numerical-computing/MATLAB-tensor-core). Not
// measured: FP8 with c != 0 on Hopper, taken from mmasim (arXiv 2511.10909), and FP8 on Blackwell,
// taken from it too; results published for B200 equal correctly rounded exact sums instead.
#pragma once

#include "dispatch.h"

namespace mixprec {

enum class Gpu : int32_t { v100, a100, ada, hopper, blackwell, mi300 };

struct TensorCore {
  int fraction_bits, terms, min_exponent, significant_bits;
  bool promoted;  // our kernels add the sum of each 128 of K to an FP32 register
  int parts = 0;  // AMD's: in how many sums the products of a step are cut; see amd_step
};

// Blackwell's for block formats, MX and FP4 (with FP4, groups of 16 are summed before the cut).
constexpr TensorCore kMx = {25, 32, -133, 24, false}, kFp4 = {35, 64, -139, 24, false};

// For operands of this dtype; terms = 0 if the GPU has no instruction for them.
constexpr TensorCore tensor_core(Gpu gpu, Dtype dtype) {
  bool fp8 = dtype == Dtype::e4m3 || dtype == Dtype::e5m2;
  switch (gpu) {
    case Gpu::v100:
      return dtype == Dtype::f16 ? TensorCore{23, 4, -131, 24, false} : TensorCore{};
    case Gpu::a100:
      return fp8 ? TensorCore{} : TensorCore{24, 8, -132, 24, false};
    case Gpu::ada:
      return fp8 ? TensorCore{13, 16, -132, 14, true} : TensorCore{24, 8, -132, 24, false};
    case Gpu::hopper:
      return fp8 ? TensorCore{13, 32, -133, 14, true} : TensorCore{25, 16, -133, 24, false};
    case Gpu::mi300:
      return fp8 ? TensorCore{24, 16, -126, 24, false, 2} : TensorCore{24, 8, -126, 24, false, 1};
    default:
      return TensorCore{25, fp8 ? 32 : 16, -133, 24, false};
  }
}

// The smallest exponent of a normal number.
constexpr int min_exponent(Dtype dtype) {
  return dtype == Dtype::e4m3 ? -6 : dtype == Dtype::e5m2 || dtype == Dtype::f16 ? -14 : -126;
}

// x = significand * 2^(exponent - 23), the exponent being `least` or more.
struct Significand {
  int64_t significand;
  int exponent;
};

// Of a finite x of a format whose smallest exponent is `least`.
MIXPREC_HD Significand significand_of(float x, int least) {
  uint32_t u = float_bits(x) & 0x7FFFFFFFu;
  int exponent = static_cast<int>(u >> 23);
  int64_t significand = (u & 0x7FFFFFu) | (exponent > 0 ? 0x800000u : 0u);
  exponent = (exponent > 0 ? exponent : 1) - 127;
  if (exponent < least) {
    significand = least - exponent < 24 ? significand >> (least - exponent) : 0;
    exponent = least;
  }
  return {float_bits(x) >> 31 != 0 ? -significand : significand, exponent};
}

// x * 2^-shift, toward zero.
MIXPREC_HD int64_t cut(int64_t x, int shift) {
  if (shift > 62) return 0;
  return x < 0 ? -(-x >> shift) : x >> shift;
}

// sum * 2^unit with at most `bits` significant bits, toward zero; beyond FP32 Inf. In integers:
// some programs let the processor flush subnormal numbers.
MIXPREC_HD float round_sum(int64_t sum, int unit, int bits) {
  if (sum == 0) return 0.0f;
  uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  int length = 64 - __builtin_clzll(magnitude), exponent = unit + length - 1;
  int drop = length > bits ? length - bits : 0;
  magnitude = magnitude >> drop << drop;
  uint32_t u = 0x7F800000u;
  if (exponent < -126) {  // in units of the smallest FP32 number
    int shift = unit + 149;
    u = shift < -63 ? 0
                    : static_cast<uint32_t>(shift < 0 ? magnitude >> -shift : magnitude << shift);
  } else if (exponent < 128) {
    uint64_t fraction = length > 24 ? magnitude >> (length - 24) : magnitude << (24 - length);
    u = (static_cast<uint32_t>(exponent + 127) << 23) |
        (static_cast<uint32_t>(fraction) & 0x7FFFFF);
  }
  return bits_float(sum < 0 && u != 0 ? u | 0x80000000u : u);
}

// The sum of products: an integer, in units of 2^(top - fraction_bits), each product cut.
struct CutSum {
  int64_t sum;
  int top;
};

// Of `count` products whose exponents are `top` at most, or of a larger one: that of the largest.
MIXPREC_HD CutSum cut_products(int fraction, const float* a, int64_t stride_a, int least_a,
                               const float* b, int64_t stride_b, int least_b, int count, int top) {
  for (int i = 0; i < count; ++i) {
    float x = a[i * stride_a], y = b[i * stride_b];
    int e = significand_of(x, least_a).exponent + significand_of(y, least_b).exponent;
    if (x != 0.0f && y != 0.0f && e > top) top = e;
  }
  int64_t sum = 0;
  for (int i = 0; i < count; ++i) {
    Significand x = significand_of(a[i * stride_a], least_a);
    Significand y = significand_of(b[i * stride_b], least_b);
    sum += cut(x.significand * y.significand, 46 - fraction + top - x.exponent - y.exponent);
  }
  return {sum, top};
}

// x * 2^-shift, toward -Inf.
MIXPREC_HD int64_t floor_shift(int64_t x, int shift) { return x >> (shift < 63 ? shift : 63); }

// The step of AMD's CDNA 3, as mmasim has it (arXiv 2511.10909), of finite operands: products, in
// FP8 the even and the odd ones, are cut below their own largest one; their sums, and c, toward
// -Inf below the largest of all; the total to 32 bits toward -Inf, then to nearest even.
MIXPREC_HD float amd_step(const TensorCore& core, const float* a, int64_t stride_a, int least_a,
                          const float* b, int64_t stride_b, int least_b, int count, float c) {
  CutSum part[2] = {{0, -999}, {0, -999}};
  for (int p = 0; p < core.parts; ++p) {
    part[p] = cut_products(core.fraction_bits, a + p * stride_a, core.parts * stride_a, least_a,
                           b + p * stride_b, core.parts * stride_b, least_b,
                           (count - p + core.parts - 1) / core.parts, -999);
  }
  Significand start = significand_of(c, -126);
  int top = part[0].top > part[1].top ? part[0].top : part[1].top;
  int high = top > start.exponent ? top : start.exponent;
  if (core.parts > 1 && start.exponent < high - core.fraction_bits - 1) start.significand = 0;
  int64_t sum =
      floor_shift(part[0].sum, top - part[0].top) + floor_shift(part[1].sum, top - part[1].top);
  sum = floor_shift(sum * 256, high - top) +
        floor_shift(start.significand * 2, high - start.exponent) * 256;
  auto surplus = [&](int bits, int least) {  // of the bits of the sum, to which it is rounded
    int length = 64 - __builtin_clzll(static_cast<uint64_t>(sum < 0 ? -sum : sum) | 1);
    return length - bits > least ? length - bits : least;
  };
  int drop = surplus(32, high < -125 ? 1 : 0);
  sum = floor_shift(sum, drop) * (int64_t{1} << drop);
  drop = surplus(24, high < -117 ? -117 - high : 0);
  // To nearest even by what round_sum cuts off.
  int64_t half = drop == 0 ? 0 : (int64_t{1} << (drop - 1)) - 1;
  if (drop > 0) half += (sum < 0 ? -sum : sum) >> drop & 1;
  return round_sum(sum < 0 ? sum - half : sum + half, high - 32, 24);
}

// c + the sum of `count` products of a and b, which are values of formats with these smallest
// exponents, stride elements apart. NaN is 0x7FFFFFFF, a sum of 0 is +0.
MIXPREC_HD float tensor_core_step(const TensorCore& core, const float* a, int64_t stride_a,
                                  int least_a, const float* b, int64_t stride_b, int least_b,
                                  int count, float c) {
  bool nan = c != c, plus = float_bits(c) == 0x7F800000u, minus = float_bits(c) == 0xFF800000u;
  for (int i = 0; i < count; ++i) {
    float x = a[i * stride_a], y = b[i * stride_b];
    double product = static_cast<double>(x) * y;
    if (is_nonfinite(x) || is_nonfinite(y) || (core.parts > 0 && product * product >= 0x1p256)) {
      nan |= product != product;
      (product < 0 ? minus : plus) |= product == product;
    }
  }
  if (nan || (plus && minus)) return bits_float(0x7FFFFFFFu);
  if (plus || minus) return bits_float(plus ? 0x7F800000u : 0xFF800000u);
  if (core.parts > 0) {
    return amd_step(core, a, stride_a, least_a, b, stride_b, least_b, count, c);
  }
  Significand start = significand_of(c, -126);
  int top = core.min_exponent;
  if (start.significand != 0 && start.exponent > top) top = start.exponent;
  int fraction = core.fraction_bits, above = fraction > 23 ? fraction - 23 : 0;
  CutSum cuts = cut_products(fraction, a, stride_a, least_a, b, stride_b, least_b, count, top);
  int64_t sum =
      cut(start.significand * (1 << above), 23 + above - fraction + cuts.top - start.exponent);
  return round_sum(sum + cuts.sum, cuts.top - fraction, core.significant_bits);
}

}  // namespace mixprec
