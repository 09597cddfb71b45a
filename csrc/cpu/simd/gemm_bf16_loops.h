// Loops of gemm in words of two bf16 numbers, for AVX512-BF16: rounding, packing (bf16 operands as
// they are, fp8 ones as the bf16 numbers with their values, from tables), and the store of a tile
// in bf16. Included by loops_avx512.cpp.
//
// A panel of a is one vector wide, one of b two: `step` rows a vector. Loads and stores are masked
// where rows or K end.

// low and high, rounded as Convert<Bf16> does. The processor's conversion reads subnormal numbers
// as zero and keeps the bits of NaN: vectors with such values are rounded by integer arithmetic.
inline Words32 in_bf16(Vec low, Vec high) {
  constexpr int quiet_nan = 0x01, subnormal = 0x20, signaling_nan = 0x80;
  constexpr int others = quiet_nan | subnormal | signaling_nan;
  if ((_mm512_fpclass_ps_mask(low, others) | _mm512_fpclass_ps_mask(high, others)) == 0) {
    return (Words32)_mm512_cvtne2ps_pbh(high, low);
  }
  float numbers[32];
  store(numbers, low);
  store(numbers + 16, high);
  Words32 rounded;
  for (int i = 0; i < 32; ++i) rounded[i] = Convert<Bf16>::encode(numbers[i]).bits;
  return rounded;
}

inline void store_words(void* out, Words32 numbers) { __builtin_memcpy(out, &numbers, 64); }

inline void scale_row(const float* x, float by, Bf16* out, int64_t n) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    store_words(out + i, in_bf16(load(x + i) * broadcast(by), load(x + i + 16) * broadcast(by)));
  }
  scale_row<Bf16>(x + i, by, out + i, n - i);
}

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
    bool special = F::mantissa == 3 ? code == 0x7F : code >= 0x7C;
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
// bytes: of a vector of their low bytes and one of their high bytes; halves: of two vectors
// of bf16.
template <int first, int row, int next>
struct Choice {
  alignas(64) uint8_t bytes[64];
  alignas(64) uint16_t halves[32];
  constexpr Choice() : bytes(), halves() {
    for (int i = 0; i < 32; ++i) {
      int number = first + i / 2 * row + i % 2 * next;
      bytes[2 * i] = static_cast<uint8_t>(number);
      bytes[2 * i + 1] = static_cast<uint8_t>(64 + number);
      halves[i] = static_cast<uint16_t>(number);
    }
  }
};
template <int first, int row, int next>
constexpr Choice<first, row, next> kChoice;

template <int first, int row, int next>
inline __m512i words_of_bytes(__m512i low, __m512i high) {
  __m512i index = _mm512_load_si512(kChoice<first, row, next>.bytes);
  return _mm512_permutex2var_epi8(low, index, high);
}

// Of all bf16 numbers seen: 2 * magnitude - 1, which is below 0xFF for subnormal ones and large for
// zeros. The bf16 dot product reads subnormal numbers as zero; fp8 numbers are normal in bf16.
struct Least {
  __m512i lanes;

  Least() : lanes(_mm512_set1_epi16(-1)) {}

  template <class T>
  void see(__m512i x) {
    if constexpr (sizeof(T) == 2) {
      __m512i doubled = _mm512_add_epi16(_mm512_add_epi16(x, x), _mm512_set1_epi16(-1));
      lanes = _mm512_min_epu16(lanes, doubled);
    }
  }
  bool any_subnormal() const {
    return _mm512_cmplt_epu16_mask(lanes, _mm512_set1_epi16(0xFF)) != 0;
  }
};

// The rows of a panel that one vector of words holds: all of a's, half of b's.
constexpr int64_t rows_of_vector(int64_t width) { return width == 2 * kLanes ? kLanes : width; }

inline void store_words(uint32_t* out, int64_t rows, __m512i words) {
  _mm512_mask_storeu_epi32(out, static_cast<__mmask16>((1 << rows) - 1), words);
}

// n numbers of a row, then zeros.
template <class T>
inline __m512i load_line(const T* x, int64_t stride, int64_t n) {
  alignas(64) T line[64 / sizeof(T)] = {};
  for (int64_t i = 0; i < n; ++i) line[i] = x[i * stride];
  return _mm512_load_si512(line);
}

// The words of `count` numbers, at most 64 bytes, of each of `rows` rows, as `step` rows of a
// panel. Inlined, because calls differ in what is constant.
template <class T>
__attribute__((always_inline)) inline void pack_lines(const T* x, int64_t stride_i,
                                                      int64_t stride_k, int64_t rows, int64_t count,
                                                      uint32_t* out, int64_t step, int64_t width,
                                                      Least& least) {
  Words v[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i >= rows) {
      v[i] = Words{};
    } else if (stride_k == 1 && count == 64 / sizeof(T)) {
      v[i] = (Words)_mm512_loadu_si512(x + i * stride_i);
    } else {
      v[i] = (Words)load_line(x + i * stride_i, stride_k, count);
    }
    if (i < rows) least.see<T>((__m512i)v[i]);
  }
  transpose_words(v);
  const int64_t words = (count + 1) / 2;
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) {
    if constexpr (sizeof(T) == 2) {
      if (j < words) store_words(out + j * width, step, (__m512i)v[j]);
    } else {
      __m512i low, high;
      decode_bytes<T>((__m512i)v[j], low, high);
      uint32_t* to = out + 2 * j * width;
      if (2 * j < words) store_words(to, step, words_of_bytes<0, 4, 1>(low, high));
      if (2 * j + 1 < words) store_words(to + width, step, words_of_bytes<2, 4, 1>(low, high));
    }
  }
}

// Rows that are contiguous along K (or with any strides, slowly).
template <int usual_width, class T>
bool pack_along_k(const T* src, int64_t stride_i, int64_t stride_k, int64_t rows, int64_t k,
                  uint32_t* out, int64_t words, int64_t width) {
  constexpr int64_t line = 64 / sizeof(T);
  constexpr int64_t usual_step = rows_of_vector(usual_width);
  const int64_t step = rows_of_vector(width);
  Least least;
  for (int64_t row = 0; row % width != 0 || row < rows; row += step) {
    const T* x = src + row * stride_i;
    uint32_t* to = out + row / width * width * words + row % width;
    int64_t first = 0, here = rows - row < step ? rows - row : step;
    if (here == usual_step && stride_k == 1) {
      for (; first + line <= k; first += line, to += line / 2 * usual_width) {
        pack_lines<T>(x + first, stride_i, 1, usual_step, line, to, usual_step, usual_width, least);
      }
    }
    for (; first < k; first += line, to += line / 2 * width) {
      int64_t count = k - first < line ? k - first : line;
      pack_lines<T>(x + first * stride_k, stride_i, stride_k, here, count, to, step, width, least);
    }
  }
  return least.any_subnormal();
}

constexpr int64_t kKAhead = 8;  // of K: the rows of memory that are fetched before they are read

// Two vectors of the pairs (low[i], high[i]) in words: i below `step` and the next `step`, zeros
// where the masks are not set.
inline void join_pairs(const Bf16* low, const Bf16* high, uint32_t low_mask, uint32_t high_mask,
                       int64_t step, Least& least, __m512i (&words)[2]) {
  __m512i x = _mm512_maskz_loadu_epi16(low_mask, low);
  __m512i y = _mm512_maskz_loadu_epi16(high_mask, high);
  __m512i index = _mm512_load_si512(kChoice<0, 1, 32>.halves);
  least.see<Bf16>(x);
  least.see<Bf16>(y);
  words[0] = _mm512_permutex2var_epi16(x, index, y);
  index = _mm512_add_epi16(index, _mm512_set1_epi16(static_cast<int16_t>(step)));
  words[1] = _mm512_permutex2var_epi16(x, index, y);
}
template <class E>
inline void join_pairs(const E* low, const E* high, uint32_t low_mask, uint32_t high_mask,
                       int64_t step, Least&, __m512i (&words)[2]) {
  __m512i x = _mm512_maskz_loadu_epi8(low_mask, low), low_bytes, high_bytes;
  __m256i y = _mm256_maskz_loadu_epi8(high_mask, high);
  __m512i index = _mm512_load_si512(kChoice<0, 1, 32>.bytes);
  decode_bytes<E>(_mm512_maskz_inserti64x4(0xFF, x, y, 1), low_bytes, high_bytes);
  words[0] = _mm512_permutex2var_epi8(low_bytes, index, high_bytes);
  index = _mm512_add_epi8(index, _mm512_set1_epi8(static_cast<int8_t>(step)));
  words[1] = _mm512_permutex2var_epi8(low_bytes, index, high_bytes);
}

// Rows that are adjacent in memory: two vectors of words at a time. Panels whose rows share lines
// of memory are written side by side.
template <class T>
bool pack_along_rows(const T* src, int64_t stride_k, int64_t rows, int64_t k, uint32_t* out,
                     int64_t words, int64_t width) {
  const int64_t step = rows_of_vector(width), stripe = 8 * step;
  // The second vector goes to the same panel of b, to the next one of a.
  const int64_t to_second = step < width ? step : step * words;
  Least least;
  for (int64_t begin = 0; begin < rows; begin += stripe) {
    int64_t end = begin + stripe < rows ? begin + stripe : rows;
    for (int64_t w = 0; w < (k + 1) / 2; ++w) {
      const T *low = src + 2 * w * stride_k, *high = low + stride_k;
      bool pair = 2 * w + 1 < k;
      uint32_t* to = out + begin * words + w * width;
      for (int64_t row = begin; row < end; row += 2 * step, to += 2 * step * words) {
        int64_t count = end - row < 2 * step ? end - row : 2 * step;
        uint32_t mask = static_cast<uint32_t>((uint64_t{1} << count) - 1);
        __builtin_prefetch(low + kKAhead * stride_k + row);
        __builtin_prefetch(high + kKAhead * stride_k + row);
        __m512i pairs[2];
        join_pairs(low + row, high + row, mask, pair ? mask : 0u, step, least, pairs);
        store_words(to, step, pairs[0]);
        if (step < width || count > step) store_words(to + to_second, step, pairs[1]);
      }
    }
  }
  return least.any_subnormal();
}

// usual_width: of most panels.
template <int usual_width>
bool pack_bf16(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
               int64_t k, uint32_t* out, int64_t words, int64_t width) {
  return with_low(dtype, [&]<class T>(Type<T>) {
    if constexpr (!__is_same(T, Fp16)) {
      const T* x = static_cast<const T*>(src);
      if (stride_i == 1 && stride_k != 1) {
        return pack_along_rows(x, stride_k, rows, k, out, words, width);
      }
      return pack_along_k<usual_width>(x, stride_i, stride_k, rows, k, out, words, width);
    }
    return false;
  });
}

// As store_tile; bf16 results of whole vectors are rounded in registers.
void store_tile_bf16(Dtype out_dtype, const SumTile& sums, const Epilogue& e, void* out,
                     int64_t ld) {
  if (out_dtype != Dtype::bf16 || sums.cols != NR) {
    return store_tile(out_dtype, sums, e, out, ld);
  }
  static_assert(NR == 32);
  Bf16* to = static_cast<Bf16*>(out);
  const float *sum = sums.data, *bias = e.bias;
  const Vec b_scale_inv[2] = {load(e.b_scale_inv), load(e.b_scale_inv + 16)};
  for (int64_t i = 0; i < sums.rows; ++i, sum += sums.ld, to += ld) {
    Vec a_scale_inv = broadcast(e.a_scale_inv[i]);
    Vec low = load(sum) * a_scale_inv * b_scale_inv[0];
    Vec high = load(sum + 16) * a_scale_inv * b_scale_inv[1];
    if (bias != nullptr) low += load(bias), high += load(bias + 16);
    store_words(to, in_bf16(low, high));
  }
}
