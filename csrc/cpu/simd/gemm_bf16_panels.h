// Packing for AVX512-BF16, in words of two bf16 numbers: bf16 operands as they are, fp8 ones as the
// bf16 numbers with their values, from tables. Included by loops_avx512.cpp.
//
// A panel of 14 rows is one vector wide, one of 32 rows two: `step` rows a vector. Loads and stores
// are masked where rows or K end.

// The bytes of the bf16 numbers of an fp8 format without their signs.
struct Bf16Bytes {
  alignas(64) uint8_t low[128], high[128];
};

template <class E>
constexpr Bf16Bytes bf16_bytes() {
  using F = Element<E>;
  constexpr int one = 1 << F::mantissa;
  Bf16Bytes bytes{};
  for (int code = 1; code < 128; ++code) {
    int exponent = code >> F::mantissa, fraction = code & (one - 1);
    if (exponent == 0) {
      for (exponent = 1; fraction < one; --exponent) fraction *= 2;
      fraction -= one;
    }
    bool special = F::bits == 8 && (F::mantissa == 3 ? code == 0x7F : code >= 0x7C);
    int biased = special ? 0xFF : exponent - F::bias + 127;
    int bits = biased << 7 | fraction << (7 - F::mantissa);
    if (F::mantissa == 3 && special) bits = 0x7FC0;
    bytes.low[code] = static_cast<uint8_t>(bits);
    bytes.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}
template <class E>
constexpr Bf16Bytes kBf16Bytes = bf16_bytes<E>();

// The low and the high bytes of 64 numbers; the permutes ignore the sign.
template <class E>
inline void decode_bytes(__m512i codes, __m512i& low, __m512i& high) {
  const Bf16Bytes& table = kBf16Bytes<E>;
  auto look_up = [&](const uint8_t* bytes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), codes, _mm512_load_si512(bytes + 64));
  };
  low = look_up(table.low);
  constexpr int or_and = 0xF8;  // a | (b & c)
  high = _mm512_ternarylogic_epi32(look_up(table.high), codes, _mm512_set1_epi8(-128), or_and);
}

// What words are made of: word i of the numbers first + i * row and first + i * row + next.
// of_bytes: of a vector of their low bytes and one of their high bytes; of_halves: of two vectors
// of bf16.
template <int first, int row, int next>
struct Choice {
  alignas(64) uint8_t of_bytes[64];
  alignas(64) uint16_t of_halves[32];
  constexpr Choice() : of_bytes(), of_halves() {
    for (int i = 0; i < 32; ++i) {
      int number = first + i / 2 * row + i % 2 * next;
      of_bytes[2 * i] = static_cast<uint8_t>(number);
      of_bytes[2 * i + 1] = static_cast<uint8_t>(64 + number);
      of_halves[i] = static_cast<uint16_t>(number);
    }
  }
};
template <int first, int row, int next>
constexpr Choice<first, row, next> kChoice;

template <int first, int row, int next>
inline __m512i words_of_bytes(__m512i low, __m512i high) {
  __m512i index = _mm512_load_si512(kChoice<first, row, next>.of_bytes);
  return _mm512_permutex2var_epi8(low, index, high);
}
template <int first, int row, int next>
inline __m512i words_of_halves(__m512i x, __m512i y) {
  __m512i index = _mm512_load_si512(kChoice<first, row, next>.of_halves);
  return _mm512_permutex2var_epi16(x, index, y);
}

// Of all bf16 numbers seen: 2 * magnitude - 1, which is below 0xFF for subnormal ones and large for
// zeros. The bf16 dot product reads subnormal numbers as zero; fp8 numbers are normal in bf16.
struct Least {
  __m512i of_lane;

  Least() : of_lane(_mm512_set1_epi16(-1)) {}

  template <class T>
  void see(__m512i x) {
    if constexpr (sizeof(T) == 2) {
      __m512i doubled = _mm512_add_epi16(_mm512_add_epi16(x, x), _mm512_set1_epi16(-1));
      of_lane = _mm512_min_epu16(of_lane, doubled);
    }
  }
  bool any_subnormal() const {
    return _mm512_cmplt_epu16_mask(of_lane, _mm512_set1_epi16(0xFF)) != 0;
  }
};

template <int step>
inline void store_words(uint32_t* out, __m512i words) {
  _mm512_mask_storeu_epi32(out, static_cast<__mmask16>((1 << step) - 1), words);
}

template <int step>
constexpr int kPanelWidth = step == 16 ? 32 : step;

// n numbers of a row, then zeros.
template <class T>
inline __m512i load_line(const T* x, int64_t stride, int64_t n) {
  alignas(64) T line[64 / sizeof(T)] = {};
  for (int64_t i = 0; i < n; ++i) line[i] = x[i * stride];
  return _mm512_load_si512(line);
}

// The words of 64 bytes of each of `step` rows, or of `count` numbers of each of `rows`.
template <class T, int step, bool whole>
inline void pack_lines(const T* x, int64_t stride_i, int64_t stride_k, int64_t rows, int64_t count,
                       uint32_t* out, Least& least) {
  constexpr int width = kPanelWidth<step>;
  Words v[kWords];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if constexpr (whole) {
      v[i] = i < step ? (Words)_mm512_loadu_si512(x + i * stride_i) : Words{};
    } else {
      v[i] = (Words)load_line(x + i * stride_i, stride_k, i < rows ? count : 0);
    }
    if (i < step) least.see<T>((__m512i)v[i]);
  }
  transpose_words(v);
  const int64_t words = whole ? 32 / sizeof(T) : (count + 1) / 2;
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) {
    if constexpr (sizeof(T) == 2) {
      if (j < words) store_words<step>(out + j * width, (__m512i)v[j]);
    } else {
      __m512i low, high;
      decode_bytes<T>((__m512i)v[j], low, high);
      uint32_t* to = out + 2 * j * width;
      if (2 * j < words) store_words<step>(to, words_of_bytes<0, 4, 1>(low, high));
      if (2 * j + 1 < words) store_words<step>(to + width, words_of_bytes<2, 4, 1>(low, high));
    }
  }
}

// Rows that are contiguous along K (or with any strides, slowly).
template <class T, int step>
bool pack_along_k(const T* src, int64_t stride_i, int64_t stride_k, int64_t rows, int64_t k,
                  uint32_t* out, int64_t words) {
  constexpr int width = kPanelWidth<step>, line = 64 / sizeof(T);
  Least least;
  for (int64_t row = 0; row % width != 0 || row < rows; row += step) {
    const T* x = src + row * stride_i;
    uint32_t* to = out + row / width * width * words + row % width;
    int64_t first = 0;
    if (rows - row >= step && stride_k == 1) {
      for (; first + line <= k; first += line, to += line / 2 * width) {
        pack_lines<T, step, true>(x + first, stride_i, 1, step, line, to, least);
      }
    }
    for (; first < k; first += line, to += line / 2 * width) {
      int64_t count = k - first < line ? k - first : line;
      pack_lines<T, step, false>(x + first * stride_k, stride_i, stride_k, rows - row, count, to,
                                 least);
    }
  }
  return least.any_subnormal();
}

constexpr int64_t kKAhead = 8;

// Two vectors of the pairs (low[i], high[i]) in words: i below `step` and the next `step`, zeros
// where the masks are not set.
template <int step>
inline void join_pairs(const Bf16* low, const Bf16* high, uint32_t low_mask, uint32_t high_mask,
                       Least& least, __m512i (&words)[2]) {
  __m512i x = _mm512_maskz_loadu_epi16(low_mask, low);
  __m512i y = _mm512_maskz_loadu_epi16(high_mask, high);
  least.see<Bf16>(x);
  least.see<Bf16>(y);
  words[0] = words_of_halves<0, 1, 32>(x, y);
  words[1] = words_of_halves<step, 1, 32>(x, y);
}
template <int step, class E>
inline void join_pairs(const E* low, const E* high, uint32_t low_mask, uint32_t high_mask, Least&,
                       __m512i (&words)[2]) {
  __m512i x = _mm512_maskz_loadu_epi8(low_mask, low), low_bytes, high_bytes;
  __m256i y = _mm256_maskz_loadu_epi8(high_mask, high);
  decode_bytes<E>(_mm512_maskz_inserti64x4(0xFF, x, y, 1), low_bytes, high_bytes);
  words[0] = words_of_bytes<0, 1, 32>(low_bytes, high_bytes);
  words[1] = words_of_bytes<step, 1, 32>(low_bytes, high_bytes);
}

// Rows that are adjacent in memory: pairs of two vectors of rows at a time. Panels whose rows share
// lines of memory are written side by side.
template <class T, int step>
bool pack_along_rows(const T* src, int64_t stride_k, int64_t rows, int64_t k, uint32_t* out,
                     int64_t words) {
  constexpr int width = kPanelWidth<step>;
  constexpr int64_t together = 8 * step;
  Least least;
  for (int64_t begin = 0; begin < rows; begin += together) {
    int64_t end = begin + together < rows ? begin + together : rows;
    for (int64_t w = 0; w < (k + 1) / 2; ++w) {
      const T *low = src + 2 * w * stride_k, *high = low + stride_k;
      bool pair = 2 * w + 1 < k;
      uint32_t* to = out + begin * words + w * width;
      for (int64_t row = begin; row < end; row += 2 * step, to += 2 * step * words) {
        int64_t count = end - row;
        uint32_t mask = count < 2 * step ? (1u << count) - 1u
                                         : static_cast<uint32_t>((uint64_t{1} << 2 * step) - 1);
        __builtin_prefetch(low + kKAhead * stride_k + row);
        __builtin_prefetch(high + kKAhead * stride_k + row);
        __m512i pairs[2];
        join_pairs<step>(low + row, high + row, mask, pair ? mask : 0u, least, pairs);
        store_words<step>(to, pairs[0]);
        if (step == 16) {
          store_words<step>(to + step, pairs[1]);
        } else if (count > step) {
          store_words<step>(to + step * words, pairs[1]);
        }
      }
    }
  }
  return least.any_subnormal();
}

template <int step>
bool pack_bf16(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
               int64_t k, uint32_t* out, int64_t words) {
  return with_low(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if constexpr (!__is_same(T, Fp16)) {
      const T* x = static_cast<const T*>(src);
      if (stride_i == 1 && stride_k != 1) {
        return pack_along_rows<T, step>(x, stride_k, rows, k, out, words);
      }
      return pack_along_k<T, step>(x, stride_i, stride_k, rows, k, out, words);
    }
    return false;
  });
}
