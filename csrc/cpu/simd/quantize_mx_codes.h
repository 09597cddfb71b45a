// The scales and the codes of blocks, for quantize_mx. Included once per instruction set, after
// dequantize_mx_loops.h.
//
// Elements are rounded from 16 bits, those of bf16: what they are multiplied with is a power of
// two, or the product is cut to 16 bits with a bit for the rest, which no format of at most 4 bits
// of significand can tell apart.

struct MxBuffers {
  alignas(64) float values[kMxPiece];
  alignas(64) uint64_t words[kMxPiece / 4];  // random bits
  alignas(64) uint8_t codes[kMxPiece];
  alignas(64) uint32_t largest[kMxPiece / 16];
  float factor[kMxPiece / 16];
  uint8_t scale[kMxPiece / 16];
};

// The largest magnitudes of blocks first, first + step, ... in turn.
template <int block, int blocks, class X>
typename VectorOf<sizeof(X)>::Signed largest_lanes(const X* x, int64_t first, int64_t step,
                                                   int64_t end) {
  using V = VectorOf<sizeof(X)>;  // whose order as signed numbers is that of magnitudes
  using Signed = typename V::Signed;
  if constexpr (blocks == 1) {
    const X* in = x + (first < end ? first : end - 1) * block;
    Signed largest = {}, v;
    for (int i = 0; i < block; i += V::count) {
      __builtin_memcpy(&v, in + i, sizeof v);
      v &= (Signed)(~typename V::Unsigned{} >> 1);
      largest = v > largest ? v : largest;
    }
    return largest;
  } else {
    using Unsigned = typename V::Unsigned;
    auto a = (Unsigned)largest_lanes<block, blocks / 2>(x, first, 2 * step, end);
    auto b = (Unsigned)largest_lanes<block, blocks / 2>(x, first + step, 2 * step, end);
    typename V::Lanes lanes;
    auto low = (Signed)interleave<false>(a, b, lanes), high = (Signed)interleave<true>(a, b, lanes);
    return low > high ? low : high;
  }
}

template <int block, class X>
uint32_t largest_of(const X* x, int64_t blocks, uint32_t* __restrict largest) {
  constexpr int count = VectorOf<sizeof(X)>::count;
  X magnitudes[kMxPiece / 16];
  for (int64_t b = 0; b < blocks; b += count) {
    auto lanes = largest_lanes<block, count>(x, b, 1, blocks);
    __builtin_memcpy(magnitudes + b, &lanes, sizeof lanes);
  }
  uint32_t most = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    largest[b] = float_bits(decode(magnitudes[b]));
    most = largest[b] > most ? largest[b] : most;
  }
  return most;
}

inline void scales_of(const ScaleRule& rule, int64_t blocks, MxBuffers& b) {
  auto each = [&](auto scale) {
    for (int64_t i = 0; i < blocks; ++i) {
      BlockScale s = scale(b.largest[i], rule);
      b.scale[i] = s.code;
      b.factor[i] = s.factor;
    }
  };
  if (!rule.nvfp4) return each([](uint32_t amax, const ScaleRule& r) { return mx_scale(amax, r); });
  if (rule.up) {
    return each([](uint32_t amax, const ScaleRule& r) { return nvfp4_scale<true>(amax, r); });
  }
  each([](uint32_t amax, const ScaleRule& r) { return nvfp4_scale<false>(amax, r); });
}

// Of NVFP4 with two scales to choose from.
template <class X>
void choose_scales(const X* x, const ScaleRule& rule, int64_t blocks, MxBuffers& b) {
  for (int64_t i = 0; i < blocks; ++i) {
    BlockScale better = better_scale(x + 16 * i, b.largest[i], rule);
    b.scale[i] = better.code;
    b.factor[i] = better.factor;
  }
}

// 16 numbers in fp32.
template <class R, class X>
Floats16 floats_16(const X* x) {
  alignas(64) X in[16];
  __builtin_memcpy(in, x, sizeof in);
  Floats16 values;
  if constexpr (sizeof(X) == 4) {
    __builtin_memcpy(&values, in, sizeof values);
  } else if constexpr (__is_same(X, Bf16)) {
    Words16 words;
    __builtin_memcpy(&words, in, sizeof words);
    values = (Floats16)(R::widen(words) << 16);
  } else {
    alignas(64) float decoded[16];
#pragma GCC unroll 1  // else it would be unrolled before it could be vectorised
    for (int i = 0; i < 16; ++i) decoded[i] = decode(in[i]);
    __builtin_memcpy(&values, decoded, sizeof values);
  }
  return values;
}

// The products of a group with the factors of its blocks, cut to 16 bits, of which the last one is
// set if any is that is cut off.
template <class R, int block, class X>
MIXPREC_HD void cut_group(const X* x, const float* factor, uint16_t* words) {
  if constexpr (R::of_32_words) {
    Floats16 first = floats_16<R>(x) * factor[0];
    Floats16 second = floats_16<R>(x + 16) * factor[32 / block - 1];
    Words32 both = R::cut((Uints16)first, (Uints16)second);
    __builtin_memcpy(words, &both, sizeof both);
  } else {
    for (int i = 0; i < kMxGroup; i += block) {
      float by = factor[i / block];
#pragma GCC unroll 1
      for (int j = i; j < i + block; ++j) {
        uint32_t u = float_bits(decode(x[j]) * by);
        words[j] = static_cast<uint16_t>((u | ((u & 0xFFFF) + 0xFFFF)) >> 16);
      }
    }
  }
}

// The code, in the low bits but for the sign in bit 7, of a number u of 16 bits times
// 2^(127 - scale): as encode_element. U, S: words and signed words, one or vectors of them.
// A number in steps of 2^-8 of a code is a convex function of the bits, linear for each exponent,
// so that it is the largest of linear functions.
template <class E, class S, class U>
MIXPREC_HD U encode_word(U u, S scale) {
  using F = Element<E>;
  constexpr int m = F::mantissa, below = m + 1;  // exponents below that of normal numbers
  constexpr int most_code = static_cast<int>(F::max_bits >> (23 - m)) - ((127 - F::bias) << m);
  S low = (S)((scale - static_cast<int16_t>(F::bias + below)) * static_cast<int16_t>(128));
  S high = (S)(low + static_cast<int16_t>((most_code << (7 - m)) + 128 * below));
  S bits = (S)(u & 0x7FFF);
  bits = bits > low ? bits : low;
  bits = (S)((bits < high ? bits : high) - low);
  S steps = bits;
  if constexpr (sizeof(S) == 64 && below > 2) {  // the one for the exponent: AVX-512 shifts words
    S start = (S)((U)bits & 0xFF80);
    S last = S{} + static_cast<int16_t>(128 * (below + 1));
    start = start < last ? start : last;
    steps = (bits - start + 128) << (start >> 7);
    steps = (S)((U)steps >> 1);
  } else {
#pragma GCC unroll 4
    for (int i = 1; i <= below; ++i) {
      S line = (S)((S)(bits - static_cast<int16_t>(128 * i)) << i);
      steps = line > steps ? line : steps;
    }
  }
  U rounded = (U)((U)steps + (U)(((U)steps >> 8 & 1) + 127));
  return (U)((U)(rounded | (u & 0x8000)) >> 8);
}

// The codes of a group of numbers of 16 bits times 2^(127 - scale).
template <class R, class E>
MIXPREC_HD void encode_group(const uint16_t* __restrict words, int scale, uint8_t* __restrict q) {
  constexpr int bits = Element<E>::bits;
  if constexpr (R::of_32_words) {
    Words32 u;
    __builtin_memcpy(&u, words, sizeof u);
    Words32 codes = encode_word<E>(u, Shorts32{} + static_cast<int16_t>(scale));
    if constexpr (bits == 4) {
      Uints16 pairs = (Uints16)((codes | codes >> 4) & 15);
      Bytes16 bytes = R::narrow_bytes(pairs | pairs >> 12);
      __builtin_memcpy(q, &bytes, sizeof bytes);
    } else {
      if constexpr (bits == 6) codes = (codes & 0x1F) | (codes >> 2 & 0x20);
      Bytes32 bytes = R::narrow_bytes(codes);
      __builtin_memcpy(q, &bytes, sizeof bytes);
    }
  } else {
    alignas(64) uint16_t codes[kMxGroup];
#pragma GCC unroll 1
    for (int i = 0; i < kMxGroup; ++i)
      codes[i] = encode_word<E>(words[i], static_cast<int16_t>(scale));
    if constexpr (bits == 4) {
      const Pair* pairs = reinterpret_cast<const Pair*>(codes);
#pragma GCC unroll 1
      for (int i = 0; i < kMxGroup / 2; ++i) {
        uint32_t both = (pairs[i] | pairs[i] >> 4) & 0x000F000F;
        q[i] = static_cast<uint8_t>(both | both >> 12);
      }
    } else {
#pragma GCC unroll 1
      for (int i = 0; i < kMxGroup; ++i) {
        uint16_t code = codes[i];
        q[i] = static_cast<uint8_t>(bits == 8 ? code : (code & 0x1F) | (code >> 2 & 0x20));
      }
    }
  }
}

// Whether a block's numbers of 16 bits can be encoded as they are: those that are subnormal are
// then too small for a code.
template <int block, class X>
bool encodes_words(uint8_t scale) {
  return block == 32 && __is_same(X, Bf16) && scale >= 32 && scale < 255;
}

// The codes of groups from the first one on, which are encoded as they are or as products, up to
// one of the other kind; returns how many groups. Not inlined, so that constants stay in registers.
template <class R, class E, int block, bool as_they_are, class X>
__attribute__((noinline)) int64_t encode_run(const X* x, int64_t groups, const uint8_t* scale,
                                             const float* factor, uint8_t* q) {
  int64_t g = 0;
  for (; g < groups && encodes_words<block, X>(scale[g]) == as_they_are; ++g) {
    uint8_t* codes = q + g * kGroupBytes<E>;
    if constexpr (as_they_are) {
      encode_group<R, E>(&x[g * kMxGroup].bits, scale[g], codes);
    } else {
      alignas(64) uint16_t words[kMxGroup];
      cut_group<R, block>(x + g * kMxGroup, factor + g * (kMxGroup / block), words);
      encode_group<R, E>(words, 127, codes);
    }
  }
  return g;
}

template <class R, class E, int block, class X>
void encode_groups(const X* x, int64_t groups, uint32_t most, const MxBuffers& b, uint8_t* q) {
  constexpr int64_t bytes = kGroupBytes<E>, blocks = kMxGroup / block;
  for (int64_t g = 0; g < groups;) {
    auto run = [&](auto* encode) {
      g += encode(x + g * kMxGroup, groups - g, b.scale + g * blocks, b.factor + g * blocks,
                  q + g * bytes);
    };
    if constexpr (block == 32 && __is_same(X, Bf16)) run(encode_run<R, E, block, true, X>);
    run(encode_run<R, E, block, false, X>);
  }
  for (int64_t i = 0; is_nonfinite_bits(most) && i < groups * blocks; ++i) {
    if (is_nonfinite_bits(b.largest[i])) {
      __builtin_memset(q + i * (bytes / blocks), 0, static_cast<uint64_t>(bytes / blocks));
    }
  }
}
