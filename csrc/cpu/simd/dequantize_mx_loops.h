// Loops of dequantize_mx. Included once per instruction set, after those of unpack and
// dequantize_mx_words.h, which decodes where vectors of 32 words are permuted as one; else, and for
// what bf16 does not hold, codes are decoded by formulas.

constexpr int64_t kMxPiece = 1024;  // elements

template <class O>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<Bf16> = true;
template <class O>
constexpr bool kIsFp16 = false;
template <>
constexpr bool kIsFp16<Fp16> = true;

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
  if constexpr (kIsBf16<O>) {
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
  return R::of_32_words && !kIsFp16<O> && scale_inv < 240 ? MxResults::normal : MxResults::exact;
}

// Up to the first block whose results are not `normal`; returns how many blocks. Not inlined, so
// that constants stay in registers.
template <class R, class E, class O>
__attribute__((noinline)) int64_t mx_normal(const uint8_t* q, const uint8_t* scale_inv,
                                            const MxTable& t, O* out, int64_t blocks) {
  constexpr int64_t bytes = Element<E>::bits == 4 ? 16 : 32;
  MxTable table = t;
  int64_t b = 0;
  for (; b < blocks && mx_results<R, O>(scale_inv[b]) == MxResults::normal; ++b) {
    uint16_t exponent = static_cast<uint16_t>((scale_inv[b] - 127) << 7);
    store_words<R>(mx_words<R, E>(q + b * bytes, table, exponent), out + b * 32);
  }
  return b;
}

// At most kMxPiece elements in whole groups.
template <class R, class E, class O>
void dequantize_groups(const uint8_t* q, const uint8_t* scale_inv, const MxTable& table, O* out,
                       int64_t n) {
  constexpr int64_t bytes = Element<E>::bits == 4 ? 16 : 32;
  alignas(64) float scales[kMxPiece / 32];
  int64_t blocks = n / 32;
  for (int64_t i = 0, end; i < blocks; i = end) {
    if constexpr (R::of_32_words && !kIsFp16<O>) {
      i += mx_normal<R, E>(q + i * bytes, scale_inv + i, table, out + i * 32, blocks - i);
      if (i == blocks) return;
    }
    MxResults results = mx_results<R, O>(scale_inv[i]);
    for (end = i; end < blocks && mx_results<R, O>(scale_inv[end]) == results; ++end) {
      scales[end] = e8m0_value(scale_inv[end]);
    }
    decode_groups<E, 32>(q + i * bytes, scales + i, results == MxResults::exact, out + i * 32,
                         (end - i) * 32);
  }
}

template <class R, class O>
__attribute__((noinline)) void nvfp4_finite(const uint8_t* q, const float* scales, O* out,
                                            int64_t n) {
  for (int64_t i = 0; i < n; i += 32) nvfp4_words<R>(q + i / 2, scales + i / 16, out + i);
}

// The same of NVFP4.
template <class R, class O>
void dequantize_groups(const uint8_t* q, const uint8_t* scale_inv, const float* tensor_scale_inv,
                       O* out, int64_t n) {
  alignas(64) float scales[kMxPiece / 16];
  bool exact = tensor_scale_inv == nullptr;  // products of 4 bits and 2 bits
  float tensor = exact ? 1.0f : *tensor_scale_inv;
  uint32_t largest = 0;
  for (int64_t i = 0; i < n / 16; ++i) {
    float own = decode(E4m3{scale_inv[i]});
    scales[i] = own != own ? own : own * tensor;  // of two NaN, always the same one
    uint32_t u = float_bits(scales[i]) & 0x7FFFFFFFu;
    largest = u > largest ? u : largest;
  }
  if constexpr (R::of_32_words && !kIsFp16<O>) {
    if (!is_nonfinite_bits(largest)) return nvfp4_finite<R>(q, scales, out, n);
  }
  decode_groups<E2m1, 16>(q, scales, exact, out, n);
}

// n elements by groups(codes, scales, results, elements) of whole groups; the last one in copies.
template <int bits, int block, class O, class F>
void for_groups(const uint8_t* q, const uint8_t* scale_inv, O* out, int64_t n, const F& groups) {
  constexpr int64_t bytes = bits == 4 ? kMxGroup / 2 : kMxGroup, count = kMxGroup / block;
  int64_t last = n % kMxGroup, whole = n - last;
  for (int64_t i = 0; i < whole; i += kMxPiece) {
    groups(q + i / kMxGroup * bytes, scale_inv + i / block, out + i,
           whole - i < kMxPiece ? whole - i : kMxPiece);
  }
  if (last == 0) return;
  uint8_t codes[bytes] = {}, scales[count] = {};
  O results[kMxGroup];
  uint64_t size = static_cast<uint64_t>(bits == 4 ? (last + 1) / 2 : last);
  __builtin_memcpy(codes, q + whole / kMxGroup * bytes, size);
  for (int64_t i = 0; i * block < last; ++i) scales[i] = scale_inv[whole / block + i];
  groups(codes, scales, results, kMxGroup);
  __builtin_memcpy(out + whole, results, static_cast<uint64_t>(last) * sizeof(O));
}

template <class R>
void dequantize_mx(BlockFormat format, Dtype out_dtype, const uint8_t* q, const uint8_t* scale_inv,
                   const float* tensor_scale_inv, void* out, int64_t n) {
  with_float(out_dtype, [&](auto t) {
    using O = typename decltype(t)::type;
    O* result = static_cast<O*>(out);
    if (format == BlockFormat::nvfp4) {
      return for_groups<4, 16>(q, scale_inv, result, n,
                               [=](const uint8_t* codes, const uint8_t* s, O* y, int64_t count) {
                                 dequantize_groups<R>(codes, s, tensor_scale_inv, y, count);
                               });
    }
    with_element(format, [&](auto e) {
      using E = decltype(e);
      MxTable table = {};
      if constexpr (R::of_32_words) table = mx_table<E>();
      for_groups<Element<E>::bits, 32>(
          q, scale_inv, result, n,
          [&](const uint8_t* codes, const uint8_t* s, O* y, int64_t count) {
            dequantize_groups<R, E>(codes, s, table, y, count);
          });
    });
  });
}
