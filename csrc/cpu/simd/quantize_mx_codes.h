// The codes of blocks, for quantize_mx. Included once per instruction set, after
// quantize_mx_scales.h.
//
// Elements are rounded from 16 bits, those of bf16: what they are multiplied with is a power of
// two, or the product is cut to 16 bits with a bit for the rest, which no format of at most 4 bits
// of significand can tell apart.

// 16 numbers in fp32.
template <class R, class X>
Floats16 floats_16(const X* x) {
  alignas(64) X in[16];
  __builtin_memcpy(in, x, sizeof in);
  Floats16 values;
  if constexpr (sizeof(X) == 4) {
    __builtin_memcpy(&values, in, sizeof values);
  } else if constexpr (kIsBf16<X>) {
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
  return block == 32 && kIsBf16<X> && scale >= 32 && scale < 255;
}

// The codes of groups, up to the first of the other kind; returns how many groups. Not inlined, so
// that constants stay in registers.
template <class R, class E>
__attribute__((noinline)) int64_t encode_bf16(const Bf16* x, int64_t groups, const uint8_t* scale,
                                              uint8_t* q) {
  constexpr int64_t bytes = Element<E>::bits == 4 ? 16 : 32;
  int64_t g = 0;
  for (; g < groups && encodes_words<32, Bf16>(scale[g]); ++g) {
    encode_group<R, E>(&x[g * 32].bits, scale[g], q + g * bytes);
  }
  return g;
}
template <class R, class E, int block, class X>
__attribute__((noinline)) int64_t encode_products(const X* x, int64_t groups, const uint8_t* scale,
                                                  const float* factor, uint8_t* q) {
  constexpr int64_t bytes = Element<E>::bits == 4 ? 16 : 32, blocks = kMxGroup / block;
  int64_t g = 0;
  for (; g < groups && !encodes_words<block, X>(scale[g]); ++g) {
    alignas(64) uint16_t words[kMxGroup];
    cut_group<R, block>(x + g * kMxGroup, factor + g * blocks, words);
    encode_group<R, E>(words, 127, q + g * bytes);
  }
  return g;
}

template <class R, class E, int block, class X>
void encode_groups(const X* x, int64_t groups, uint32_t most, const MxBuffers& b, uint8_t* q) {
  constexpr int64_t bytes = Element<E>::bits == 4 ? 16 : 32, blocks = kMxGroup / block;
  for (int64_t g = 0; g < groups;) {
    if constexpr (block == 32 && kIsBf16<X>) {
      g += encode_bf16<R, E>(x + g * kMxGroup, groups - g, b.scale + g, q + g * bytes);
    }
    g += encode_products<R, E, block>(x + g * kMxGroup, groups - g, b.scale + g * blocks,
                                      b.factor + g * blocks, q + g * bytes);
  }
  for (int64_t i = 0; is_nonfinite_bits(most) && i < groups * blocks; ++i) {
    if (is_nonfinite_bits(b.largest[i])) {
      __builtin_memset(q + i * (bytes / blocks), 0, static_cast<uint64_t>(bytes / blocks));
    }
  }
}
