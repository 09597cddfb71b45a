// Loops of quantize_nf4 and dequantize_nf4. Included once per instruction set.

constexpr Nf4Midpoints kMidpoints = nf4_midpoints();

// The codes of a block, one a byte, and its scale; whole: it has all of its elements, else what
// lacks is 0.
inline float nf4_block(const float* __restrict w, bool whole, uint8_t* __restrict codes) {
  uint32_t largest = 0;
  for (int i = 0; i < kNf4Block; ++i) {
    uint32_t u = float_bits(w[i]) & 0x7FFFFFFFu;
    largest = u > largest ? u : largest;
  }
  if (is_nonfinite_bits(largest)) {
    __builtin_memset(codes, kNf4Zero, kNf4Block);
    return bits_float(0x7FC00000u);
  }
  float absmax = bits_float(largest);
  float scale = absmax > kNf4MinScale ? absmax : kNf4MinScale;
  alignas(64) float scaled[kNf4Block];
  alignas(64) int32_t above[kNf4Block] = {};
  float inverse = 1.0f / scale;
  for (int i = 0; i < kNf4Block; ++i) scaled[i] = whole ? w[i] * inverse : w[i] / scale;
  for (int k = 0; k < 15; ++k) {
    for (int i = 0; i < kNf4Block; ++i) above[i] += scaled[i] > kMidpoints.of[k];
  }
  for (int i = 0; i < kNf4Block; ++i) codes[i] = static_cast<uint8_t>(above[i]);
  return whole ? absmax : scale;
}

template <class T>
void quantize_nf4(const T* w, int64_t n, uint8_t* out, float* absmax) {
  alignas(64) float block[kNf4Block];
  alignas(64) uint8_t codes[kNf4Block];
  for (int64_t begin = 0; begin < n; begin += kNf4Block) {
    int64_t count = n - begin < kNf4Block ? n - begin : kNf4Block;
    for (int64_t i = 0; i < count; ++i) block[i] = decode(w[begin + i]);
    for (int64_t i = count; i < kNf4Block; ++i) block[i] = 0.0f;
    *absmax++ = nf4_block(block, count == kNf4Block, codes);
    for (int64_t i = 0; i < nf4_bytes(count); ++i) {
      *out++ = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
    }
  }
}

void quantize_nf4(Dtype dtype, const void* w, int64_t n, uint8_t* codes, float* absmax) {
  with_float(dtype, [&](auto t) {
    quantize_nf4(static_cast<const typename decltype(t)::type*>(w), n, codes, absmax);
  });
}

// The codes of 32 elements in words, those of the upper halves of bytes first.
template <class R>
Words32 nf4_codes(const uint8_t* q) {
  Bytes16 bytes;
  __builtin_memcpy(&bytes, q, sizeof bytes);
  Uints16 both = R::widen(bytes);
  return (Words32)(both >> 4 | (both & 15) << 16);
}

// A block of values where vectors of 16 floats and of 32 words are permuted.
template <class R>
void nf4_by_words(const uint8_t* q, float scale, float* out) {
  Floats16 table;
  __builtin_memcpy(&table, kNf4Values, sizeof table);
  table *= scale;
  for (int i = 0; i < kNf4Block / 32; ++i) {
    Words32 codes = nf4_codes<R>(q + 16 * i);
    Words16 half[2];
    __builtin_memcpy(half, &codes, sizeof half);
    Floats16 y[2] = {R::look_up(table, R::widen(half[0])), R::look_up(table, R::widen(half[1]))};
    __builtin_memcpy(out + 32 * i, y, sizeof y);
  }
}
template <class R, class O>
void nf4_by_words(const uint8_t* q, float scale, O* out) {
  Floats16 products;
  __builtin_memcpy(&products, kNf4Values, sizeof products);
  Words32 table = R::lower(R::round(products * scale, O{}));
  for (int i = 0; i < kNf4Block / 32; ++i) {
    Words32 y = R::look_up(table, nf4_codes<R>(q + 16 * i));
    __builtin_memcpy(out + 32 * i, &y, sizeof y);
  }
}

constexpr Bytes16 kAlternating = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};

// A block of values where vectors of 8 floats and of 16 bytes are permuted.
template <class R>
void nf4_by_bytes(const uint8_t* q, float scale, float* out) {
  Floats8 table[2];
  __builtin_memcpy(table, kNf4Values, sizeof table);
  table[0] *= scale, table[1] *= scale;
  for (int i = 0; i < kNf4Block / 32; ++i) {
    Bytes16 pairs;
    __builtin_memcpy(&pairs, q + 16 * i, sizeof pairs);
    Bytes16 codes[2] = {__builtin_shuffle(pairs >> 4, pairs & 15, kAlternating),
                        __builtin_shuffle(pairs >> 4, pairs & 15, kAlternating + 8)};
    for (int k = 0; k < 4; ++k) {
      Floats8 y = R::look_up(table, reinterpret_cast<const uint8_t*>(codes) + 8 * k);
      __builtin_memcpy(out + 32 * i + 8 * k, &y, sizeof y);
    }
  }
}
// The low and the high bytes of results are looked up one after the other.
template <class R, class O>
void nf4_by_bytes(const uint8_t* q, float scale, O* out) {
  constexpr Bytes16 even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  constexpr Words8 words = {0, 8, 1, 9, 2, 10, 3, 11};
  Floats8 products[2];
  __builtin_memcpy(products, kNf4Values, sizeof products);
  Words8 rounded[2] = {R::round(products[0] * scale, O{}), R::round(products[1] * scale, O{})};
  Bytes16 low = __builtin_shuffle((Bytes16)rounded[0], (Bytes16)rounded[1], even);
  Bytes16 high = __builtin_shuffle((Bytes16)rounded[0], (Bytes16)rounded[1], even + 1);
  for (int i = 0; i < kNf4Block / 32; ++i) {
    Bytes16 pairs;
    __builtin_memcpy(&pairs, q + 16 * i, sizeof pairs);
    Bytes16 first[2] = {__builtin_shuffle(low, pairs >> 4), __builtin_shuffle(high, pairs >> 4)};
    Bytes16 second[2] = {__builtin_shuffle(low, pairs & 15), __builtin_shuffle(high, pairs & 15)};
    Words8 a = (Words8)__builtin_shuffle(first[0], first[1], kAlternating);
    Words8 b = (Words8)__builtin_shuffle(second[0], second[1], kAlternating);
    Words8 c = (Words8)__builtin_shuffle(first[0], first[1], kAlternating + 8);
    Words8 d = (Words8)__builtin_shuffle(second[0], second[1], kAlternating + 8);
    Words8 y[4] = {__builtin_shuffle(a, b, words), __builtin_shuffle(a, b, words + 4),
                   __builtin_shuffle(c, d, words), __builtin_shuffle(c, d, words + 4)};
    __builtin_memcpy(out + 32 * i, y, sizeof y);
  }
}

template <class R, class O>
void dequantize_nf4(const uint8_t* q, const float* absmax, O* out, int64_t n) {
  for (; n > 0; n -= kNf4Block, q += kNf4Block / 2, out += kNf4Block) {
    float scale = *absmax++;
    if constexpr (R::of_32_words || R::of_8_floats) {
      if (n >= kNf4Block && !is_nonfinite(scale)) {
        if constexpr (R::of_32_words) nf4_by_words<R>(q, scale, out);
        if constexpr (R::of_8_floats) nf4_by_bytes<R>(q, scale, out);
        continue;
      }
    }
    alignas(64) O table[16];
    for (int i = 0; i < 16; ++i) table[i] = Convert<O>::encode(kNf4Values[i] * scale);
    int64_t pairs = n < kNf4Block ? n / 2 : kNf4Block / 2;
    for (int64_t i = 0; i < pairs; ++i) {
      out[2 * i] = table[q[i] >> 4];
      out[2 * i + 1] = table[q[i] & 15];
    }
    if (n < kNf4Block && n % 2 == 1) out[n - 1] = table[q[pairs] >> 4];
  }
}

template <class R>
void dequantize_nf4(Dtype dtype, const uint8_t* codes, const float* absmax, void* out, int64_t n) {
  with_float(dtype, [&](auto t) {
    dequantize_nf4<R>(codes, absmax, static_cast<typename decltype(t)::type*>(out), n);
  });
}
