// Loops of dequantize_mx. Included once per instruction set, after those of unpack. In vectors of
// 32 words, where they are permuted as one (R: the Registers that have them), codes select from a
// table of bf16 values; else, and for what bf16 does not hold, codes are decoded by formulas.

constexpr int64_t kMxGroup = 32;  // elements that are processed together: one block or two
template <class E>
constexpr int64_t kGroupBytes = Element<E>::bits == 4 ? 16 : 32;  // of their codes

template <class R>
void store_words(Words32 bf16, Bf16* out) {
  __builtin_memcpy(out, &bf16, sizeof bf16);
}
template <class R>
void store_words(Words32 bf16, float* out) {
  Words16 half[2];
  __builtin_memcpy(half, &bf16, sizeof half);
  Uints16 wide[2] = {R::widen(half[0]) << 16, R::widen(half[1]) << 16};
  __builtin_memcpy(out, wide, sizeof wide);
}

// The bf16 values of the codes that are not those of normal numbers of 8 bits; of fewer bits, of
// all codes. By the low 5 bits of a code.
struct MxTable {
  Words32 values, scaled;  // scaled: all ones where a change of scale adds to the exponent
};

template <class E>
MxTable mx_table() {
  alignas(64) uint16_t values[32];
  for (int i = 0; i < 32; ++i) {
    int code = Element<E>::bits == 8 && i >= 16 ? 96 + i : i;
    uint32_t u = float_bits(decode_element(E{static_cast<uint8_t>(code)}));
    u |= (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x00400000u : 0u;  // as a product with NaN
    values[i] = static_cast<uint16_t>(u >> 16);
  }
  MxTable table;
  __builtin_memcpy(&table.values, values, sizeof values);
  Words32 magnitude = table.values & 0x7FFF;
  table.scaled = (Words32)((magnitude != 0) & (magnitude < 0x7F80));
  return table;
}

// 32 codes of 4 bits in the low bits of words, with others above them.
template <class R>
Words32 load_fp4(const uint8_t* q) {
  Bytes16 pairs;
  __builtin_memcpy(&pairs, q, sizeof pairs);
  Uints16 both = R::widen(pairs);
  return (Words32)(both | both << 12);
}

// The bf16 values of a block, of which none is subnormal or overflows. exponent: of the scale, in
// its place in a bf16 number.
template <class R, class E>
MIXPREC_HD Words32 mx_words(const uint8_t* q, const MxTable& t, uint16_t exponent) {
  using F = Element<E>;
  Words32 table = t.values + (t.scaled & exponent);
  if constexpr (F::bits == 4) {
    return R::look_up(table, load_fp4<R>(q));
  } else {
    Bytes32 bytes;
    __builtin_memcpy(&bytes, q, sizeof bytes);
    Words32 codes = R::widen(bytes), values = R::look_up(table, codes);
    if constexpr (F::bits == 6) return values | (codes & 0x20) << 10;
    constexpr uint16_t offset = (127 - F::bias) << F::mantissa;
    constexpr uint16_t first = 1 << F::mantissa;
    constexpr uint16_t span = (F::max_bits >> (23 - F::mantissa)) - offset - first;
    Words32 magnitude = codes & 0x7F;
    uint16_t add = static_cast<uint16_t>(exponent + (offset << (7 - F::mantissa)));
    Words32 normal = (magnitude << (7 - F::mantissa)) + add;
    return (magnitude - first <= span ? normal : values) | (codes & 0x80) << 8;
  }
}

// Two blocks of NVFP4 whose scales are finite: the table has the rounded products of the 8
// magnitudes with both.
template <class R>
void nvfp4_words(const uint8_t* q, const float* scale, Bf16* out) {
  constexpr Floats16 magnitudes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  constexpr Uints16 is_second = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  constexpr Words32 place = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                             8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8};
  Uints16 first = Uints16{} + float_bits(scale[0]), second = Uints16{} + float_bits(scale[1]);
  Uints16 u = (Uints16)(magnitudes * (Floats16)(is_second != 0 ? second : first));
  Words16 rounded = R::narrow((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
  Words32 codes = load_fp4<R>(q);
  Words32 values = R::look_up(R::lower(rounded), (codes & 7) | place);
  store_words<R>(values ^ (codes & 8) << 12, out);
}
template <class R>
void nvfp4_words(const uint8_t* q, const float* scale, float* out) {
  constexpr Floats16 values = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                               -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  Words32 codes = load_fp4<R>(q);
  Words16 half[2];
  __builtin_memcpy(half, &codes, sizeof half);
  Floats16 y[2] = {R::look_up(values, R::widen(half[0])) * scale[0],
                   R::look_up(values, R::widen(half[1])) * scale[1]};
  __builtin_memcpy(out, y, sizeof y);
}

constexpr int64_t kMxPiece = 1024;  // elements

// n elements in whole groups with these scales, by loops that do one thing each. exact: Bf16 holds
// all products, or they overflow or are NaN, which needs no rounding either.
template <class E, int block, class O>
void decode_groups(const uint8_t* q, const float* scales, bool exact, O* __restrict out,
                   int64_t n) {
  alignas(64) uint8_t split[kMxPiece];
  alignas(64) float buffer[kMxPiece];
  if constexpr (Element<E>::bits == 4) {
    split_codes<4>(q, split, n / 2);
    q = split;
  }
  float* values = buffer;
  if constexpr (sizeof(O) == 4) values = out;
  for (int64_t i = 0; i < n; i += block) {
    const uint8_t* __restrict codes = q + i;
    float* __restrict products = values + i;
    float scale = scales[i / block];
    if (scale != scale) {  // the product of two NaN may be either of them
      for (int j = 0; j < block; ++j) products[j] = scale;
      continue;
    }
#pragma GCC unroll 1  // 16 elements would be unrolled before they could be vectorised
    for (int j = 0; j < block; ++j) products[j] = decode_element(E{codes[j]}) * scale;
  }
  if constexpr (__is_same(O, Bf16)) {
    for (int64_t i = 0; exact && i < n; ++i) {
      out[i].bits = static_cast<uint16_t>(float_bits(values[i]) >> 16);
    }
    if (exact) return;
  }
  if constexpr (sizeof(O) == 2) {
    for (int64_t i = 0; i < n; ++i) out[i] = Convert<O>::encode(values[i]);
  }
}

enum class MxResults { normal, exact, rounded };  // exact, rounded: of decode_groups

// What the results of a block can be. The smallest elements are 2^-16; normal: none overflows.
template <class R, class O>
MxResults mx_results(uint8_t scale_inv) {
  if (scale_inv < 17) return MxResults::rounded;
  return R::of_32_words && !__is_same(O, Fp16) && scale_inv < 240 ? MxResults::normal
                                                                  : MxResults::exact;
}

// Up to the first block whose results are not `normal`; returns how many blocks. Not inlined, so
// that constants stay in registers.
template <class R, class E, class O>
__attribute__((noinline)) int64_t mx_normal(const uint8_t* q, const uint8_t* scale_inv,
                                            const MxTable& t, O* out, int64_t blocks) {
  MxTable table = t;
  int64_t b = 0;
  for (; b < blocks && mx_results<R, O>(scale_inv[b]) == MxResults::normal; ++b) {
    uint16_t exponent = static_cast<uint16_t>((scale_inv[b] - 127) << 7);
    store_words<R>(mx_words<R, E>(q + b * kGroupBytes<E>, table, exponent), out + b * 32);
  }
  return b;
}

// At most kMxPiece elements in whole groups.
template <class R, class E, class O>
void dequantize_groups(const uint8_t* q, const uint8_t* scale_inv, O* out, int64_t n,
                       const MxTable& table) {
  alignas(64) float scales[kMxPiece / 32];
  int64_t blocks = n / 32;
  for (int64_t i = 0, end; i < blocks; i = end) {
    if constexpr (R::of_32_words && !__is_same(O, Fp16)) {
      i += mx_normal<R, E>(q + i * kGroupBytes<E>, scale_inv + i, table, out + i * 32, blocks - i);
      if (i == blocks) return;
    }
    MxResults results = mx_results<R, O>(scale_inv[i]);
    for (end = i; end < blocks && mx_results<R, O>(scale_inv[end]) == results; ++end) {
      scales[end] = e8m0_value(scale_inv[end]);
    }
    decode_groups<E, 32>(q + i * kGroupBytes<E>, scales + i, results == MxResults::exact,
                         out + i * 32, (end - i) * 32);
  }
}

template <class R, class O>
__attribute__((noinline)) void nvfp4_finite(const uint8_t* q, const float* scales, O* out,
                                            int64_t n) {
  for (int64_t i = 0; i < n; i += 32) nvfp4_words<R>(q + i / 2, scales + i / 16, out + i);
}

// The same of NVFP4.
template <class R, class O>
void dequantize_groups(const uint8_t* q, const uint8_t* scale_inv, O* out, int64_t n,
                       const float* tensor_scale_inv) {
  alignas(64) float scales[kMxPiece / 16];
  bool exact = tensor_scale_inv == nullptr;  // products of 4 bits and 2 bits
  float tensor = exact ? 1.0f : *tensor_scale_inv;
  uint32_t largest = 0;
  for (int64_t i = 0; i < n / 16; ++i) {
    float block = decode(E4m3{scale_inv[i]});
    scales[i] = block != block ? block : block * tensor;  // of two NaN, always the same one
    uint32_t u = float_bits(scales[i]) & 0x7FFFFFFFu;
    largest = u > largest ? u : largest;
  }
  if constexpr (R::of_32_words && !__is_same(O, Fp16)) {
    if (!is_nonfinite_bits(largest)) return nvfp4_finite<R>(q, scales, out, n);
  }
  decode_groups<E2m1, 16>(q, scales, exact, out, n);
}

// n elements by groups(codes, scales, results, elements) of whole groups; the last one in copies.
template <class E, int block, class O, class F>
void for_groups(const uint8_t* q, const uint8_t* scale_inv, O* out, int64_t n, const F& groups) {
  constexpr int64_t bytes = kGroupBytes<E>, count = kMxGroup / block;
  int64_t last = n % kMxGroup, full = n - last;
  for (int64_t i = 0; i < full; i += kMxPiece) {
    groups(q + i / kMxGroup * bytes, scale_inv + i / block, out + i,
           full - i < kMxPiece ? full - i : kMxPiece);
  }
  if (last == 0) return;
  uint8_t codes[bytes] = {}, scales[count] = {};
  O results[kMxGroup];
  uint64_t size = static_cast<uint64_t>(bytes == 16 ? (last + 1) / 2 : last);
  __builtin_memcpy(codes, q + full / kMxGroup * bytes, size);
  for (int64_t i = 0; i * block < last; ++i) scales[i] = scale_inv[full / block + i];
  groups(codes, scales, results, kMxGroup);
  __builtin_memcpy(out + full, results, static_cast<uint64_t>(last) * sizeof(O));
}

template <class R>
void dequantize_mx(BlockFormat format, Dtype out_dtype, const uint8_t* q, const uint8_t* scale_inv,
                   const float* tensor_scale_inv, void* out, int64_t n) {
  with_float(out_dtype, [&]<class O>(Type<O>) {
    O* result = static_cast<O*>(out);
    if (format == BlockFormat::nvfp4) {
      return for_groups<E2m1, 16>(q, scale_inv, result, n, [&](auto... group) {
        dequantize_groups<R>(group..., tensor_scale_inv);
      });
    }
    with_element(format, [&]<class E>(E) {
      MxTable table = {};
      if constexpr (R::of_32_words) table = mx_table<E>();
      for_groups<E, 32>(q, scale_inv, result, n,
                        [&](auto... group) { dequantize_groups<R, E>(group..., table); });
    });
  });
}
