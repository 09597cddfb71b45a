// Loops of quantize_mx. Included once per instruction set, after those of dequantize_mx.
//
// Elements are rounded from 16 bits, those of bf16: what they are multiplied with is a power of
// two, or the product is cut to 16 bits with a bit for the rest, which no format of at most 4 bits
// of significand can tell apart.

constexpr int64_t kMxRows = 128, kMxCols = 128;

struct MxBuffers {
  alignas(64) float values[kMxPiece];
  alignas(64) uint64_t words[kMxPiece / 4];  // random bits
  alignas(64) uint8_t codes[kMxPiece];
  alignas(64) uint32_t largest[kMxPiece / 16];
  float factor[kMxPiece / 16];
  uint8_t scale[kMxPiece / 16];
};

template <class X>
struct MxLanes {  // whose order as numbers is that of magnitudes
  typedef Shorts8 Signed;
  typedef Words8 Unsigned;
  static constexpr int count = 8;
};
template <>
struct MxLanes<float> {
  typedef Ints4 Signed;
  typedef Uints4 Unsigned;
  static constexpr int count = 4;
};

// The largest magnitudes of blocks first, first + step, ... in turn.
template <int block, int blocks, class X>
typename MxLanes<X>::Signed largest_lanes(const X* x, int64_t first, int64_t step, int64_t end) {
  using Lanes = MxLanes<X>;
  using Signed = typename Lanes::Signed;
  if constexpr (blocks == 1) {
    const X* in = x + (first < end ? first : end - 1) * block;
    Signed largest = {}, v;
    for (int i = 0; i < block; i += Lanes::count) {
      __builtin_memcpy(&v, in + i, sizeof v);
      v = (Signed)((typename Lanes::Unsigned)v << 1 >> 1);
      largest = v > largest ? v : largest;
    }
    return largest;
  } else {
    using Unsigned = typename Lanes::Unsigned;
    auto a = (Unsigned)largest_lanes<block, blocks / 2>(x, first, 2 * step, end);
    auto b = (Unsigned)largest_lanes<block, blocks / 2>(x, first + step, 2 * step, end);
    Signed low = (Signed)interleave_low(a, b), high = (Signed)interleave_high(a, b);
    return low > high ? low : high;
  }
}

template <int block, class X>
uint32_t largest_of(const X* x, int64_t blocks, uint32_t* __restrict largest) {
  constexpr int count = MxLanes<X>::count;
  X found[kMxPiece / 16];
  for (int64_t b = 0; b < blocks; b += count) {
    auto lanes = largest_lanes<block, count>(x, b, 1, blocks);
    __builtin_memcpy(found + b, &lanes, sizeof lanes);
  }
  uint32_t most = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    largest[b] = float_bits(decode(found[b]));
    most = largest[b] > most ? largest[b] : most;
  }
  return most;
}

inline void scales_of(const ScaleRule& rule, int64_t blocks, MxBuffers& b) {
  if (rule.nvfp4) {
    for (int64_t i = 0; i < blocks; ++i) {
      BlockScale s = nvfp4_scale(b.largest[i], rule);
      b.scale[i] = s.code;
      b.factor[i] = s.factor;
    }
  } else {
    for (int64_t i = 0; i < blocks; ++i) {
      BlockScale s = mx_scale(b.largest[i], rule);
      b.scale[i] = s.code;
      b.factor[i] = s.factor;
    }
  }
}

// 16 products in fp32.
template <class R, class X>
Floats16 products_16(const X* x, float factor) {
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
  return values * factor;
}

// The products of a group with the factors of its blocks, cut to 16 bits, of which the last one is
// set if any is that is cut off.
template <class R, int block, class X>
MIXPREC_HD void cut_group(const X* x, const float* factor, uint16_t* words) {
  if constexpr (R::of_32_words) {
    Floats16 first = products_16<R>(x, factor[0]);
    Words32 both = R::cut((Uints16)first, (Uints16)products_16<R>(x + 16, factor[32 / block - 1]));
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
MIXPREC_HD U encode_word(U u, int scale) {
  using F = Element<E>;
  constexpr int m = F::mantissa, below = m + 1;  // exponents below that of normal numbers
  constexpr int most_code = static_cast<int>(F::max_bits >> (23 - m)) - ((127 - F::bias) << m);
  S low = S{} + static_cast<int16_t>((scale - F::bias - below) * 128);
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
    Words32 codes = encode_word<E, Shorts32>(u, scale);
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
    for (int i = 0; i < kMxGroup; ++i) codes[i] = encode_word<E, int16_t>(words[i], scale);
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

template <class E, int block>
void encode_block(const float* __restrict x, float factor, const uint64_t* words,
                  uint8_t* __restrict codes) {
  typedef uint16_t Half __attribute__((may_alias));
  const Half* __restrict random = reinterpret_cast<const Half*>(words);
#pragma GCC unroll 1  // 16 elements would be unrolled before they could be vectorised
  for (int i = 0; i < block; ++i) codes[i] = encode_element<E>(x[i] * factor, random[i]);
}

// The same, rounded stochastically.
template <class E, int block, class X>
void encode_stochastic(const BlockCastRule& rule, const X* x, int64_t n, int64_t element,
                       MxBuffers& b, uint8_t* q) {
  random_words(element / 8, 0, rule.stream << 30, rule.seed, n / 8, b.words);
  for (int64_t i = 0; i < n; ++i) b.values[i] = decode(x[i]);
  constexpr bool pairs = Element<E>::bits == 4;
  for (int64_t i = 0; i < n / block; ++i) {
    uint8_t* codes = (pairs ? b.codes : q) + i * block;
    if (is_nonfinite_bits(b.largest[i])) {
      __builtin_memset(codes, 0, block);
    } else {
      encode_block<E, block>(b.values + i * block, b.factor[i], b.words + i * block / 4, codes);
    }
  }
  if (pairs) join_codes(4, b.codes, q, n / 2);
}

// At most kMxPiece elements in whole groups.
template <class E, int block, class X>
uint32_t quantize_groups(const BlockCastRule& rule, const X* x, int64_t n, int64_t element,
                         MxBuffers& b, uint8_t* q, uint8_t* scale_inv) {
  uint32_t most = largest_of<block>(x, n / block, b.largest);
  scales_of(rule.scale, n / block, b);
  __builtin_memcpy(scale_inv, b.scale, static_cast<uint64_t>(n / block));
  if (rule.stochastic) {
    encode_stochastic<E, block>(rule, x, n, element, b, q);
  } else {
    encode_groups<Registers, E, block>(x, n / kMxGroup, most, b, q);
  }
  return most;
}

// n elements of a row; the last group in a copy.
template <class E, int block, class X>
uint32_t quantize_row(const BlockCastRule& rule, const X* x, int64_t n, int64_t element,
                      MxBuffers& b, uint8_t* q, uint8_t* scale_inv) {
  int64_t last = n % kMxGroup, whole = n - last;
  uint32_t most = 0;
  for (int64_t i = 0; i < whole; i += kMxPiece) {
    int64_t count = whole - i < kMxPiece ? whole - i : kMxPiece;
    uint32_t largest = quantize_groups<E, block>(rule, x + i, count, element + i, b,
                                                 q + block_bytes(rule.format, i),
                                                 scale_inv + i / block);
    most = largest > most ? largest : most;
  }
  if (last > 0) {
    X copy[kMxGroup] = {};
    uint8_t codes[kMxGroup], scales[kMxGroup / block];
    __builtin_memcpy(copy, x + whole, static_cast<uint64_t>(last) * sizeof(X));
    uint32_t largest =
        quantize_groups<E, block>(rule, copy, kMxGroup, element + whole, b, codes, scales);
    most = largest > most ? largest : most;
    uint64_t bytes = static_cast<uint64_t>(block_bytes(rule.format, last));
    __builtin_memcpy(q + block_bytes(rule.format, whole), codes, bytes);
    __builtin_memcpy(scale_inv + whole / block, scales,
                     static_cast<uint64_t>(blocks_of(rule.format, last)));
  }
  return most;
}

// f(Type<E>{}, Type<int[block size]>{})
template <class F>
void with_blocks(BlockFormat format, const F& f) {
  if (format == BlockFormat::nvfp4) return f(Type<E2m1>{}, Type<int[16]>{});
  with_element(format, [&](auto e) { f(Type<decltype(e)>{}, Type<int[32]>{}); });
}

uint32_t quantize_mx(const BlockCastRule& rule, const void* x, int64_t n, int64_t element,
                     uint8_t* q, uint8_t* scale_inv) {
  MxBuffers buffers;
  uint32_t most = 0;
  with_float(rule.x_dtype, [&](auto t) {
    with_blocks(rule.format, [&](auto e, auto size) {
      using X = typename decltype(t)::type;
      using E = typename decltype(e)::type;
      constexpr int block = sizeof(typename decltype(size)::type) / sizeof(int);
      most = quantize_row<E, block>(rule, static_cast<const X*>(x), n, element, buffers, q,
                                    scale_inv);
    });
  });
  return most;
}

// The transpose of a tile, with zeros beyond `rows`. Rows of x are fetched early, also those of the
// next tile below.
template <class X>
void turn(const X* x, int64_t ld, int64_t rows, int64_t cols, X* turned, int64_t ld_turned) {
  for (int64_t r = 0; r < rows; r += kAhead) {
    for (int64_t i = r + 2 * kAhead; i < r + 3 * kAhead; ++i) prefetch_row(x + i * ld, cols);
    int64_t count = rows - r < kAhead ? rows - r : kAhead;
    transpose_tile(x + r * ld, ld, turned + r, ld_turned, count, cols);
  }
  for (int64_t c = 0; rows < ld_turned && c < cols; ++c) {
    uint64_t bytes = static_cast<uint64_t>(ld_turned - rows) * sizeof(X);
    __builtin_memset(static_cast<void*>(turned + c * ld_turned + rows), 0, bytes);
  }
}

void quantize_mx_columns(const BlockCastRule& rule, const void* x, int64_t ld, int64_t rows,
                         int64_t cols, int64_t element, int64_t ld_element, uint8_t* q_t,
                         int64_t ld_q, uint8_t* scale_inv_t, int64_t ld_scale) {
  MxBuffers buffers;
  with_float(rule.x_dtype, [&](auto t) {
    with_blocks(rule.format, [&](auto e, auto size) {
      using X = typename decltype(t)::type;
      using E = typename decltype(e)::type;
      constexpr int block = sizeof(typename decltype(size)::type) / sizeof(int);
      alignas(64) X turned[kMxCols * kMxRows];
      alignas(64) uint8_t codes[kMxPiece], scales[kMxPiece / block];
      int64_t whole = (rows + kMxGroup - 1) / kMxGroup * kMxGroup;
      turn(static_cast<const X*>(x), ld, rows, cols, turned, whole);
      bool stream = ld * ld_q >= kStreamed;
      int64_t at_once = rule.stochastic ? 1 : kMxPiece / whole;  // columns: random bits have gaps
      for (int64_t c = 0; c < cols; c += at_once) {
        int64_t count = cols - c < at_once ? cols - c : at_once;
        quantize_groups<E, block>(rule, turned + c * whole, count * whole,
                                  element + c * ld_element, buffers, codes, scales);
        for (int64_t i = 0; i < count; ++i) {
          const uint8_t* from = codes + i * block_bytes(rule.format, whole);
          int64_t bytes = block_bytes(rule.format, rows);
          for (int64_t j = 0; j < bytes; j += 64) {
            uint64_t line = static_cast<uint64_t>(bytes - j < 64 ? bytes - j : 64);
            store_line(q_t + (c + i) * ld_q + j, from + j, line, stream);
          }
          __builtin_memcpy(scale_inv_t + (c + i) * ld_scale, scales + i * (whole / block),
                           static_cast<uint64_t>(blocks_of(rule.format, rows)));
        }
      }
      if (stream) end_stream();
    });
  });
}
