// The panels of gemm_simulated, the exponents of their products, and the rounding mode. Included
// once per instruction set, after gemm_panel_loops.h.

typedef int32_t Ints __attribute__((vector_size(sizeof(Vec))));

constexpr int kFloats = sizeof(Vec) / sizeof(float), kRows = 4, kWidth = NV * kFloats;

inline Ints all(int32_t x) { return x - Ints{}; }
inline Ints max_of(Ints a, Ints b) { return a > b ? a : b; }

// Rounds toward zero and keeps subnormal numbers while it exists, in functions that are not
// inlined: the compiler does not know that arithmetic depends on it.
class TowardZero {
 public:
  TowardZero(const TowardZero&) = delete;
  TowardZero& operator=(const TowardZero&) = delete;
#if defined(__x86_64__)
  TowardZero() : before_(_mm_getcsr()) { _mm_setcsr(0x7F80); }
  ~TowardZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  TowardZero() : before_(std::fegetround()) { std::fesetround(FE_TOWARDZERO); }
  ~TowardZero() { std::fesetround(before_); }

 private:
  int before_;
#endif
};

// The code of an exponent: 0 of the number 0, special of 2^31 and more (and of Inf and NaN), else
// the exponent + bias. Any sum of two codes is below 2 * bias + (the smallest exponent of a
// product) where a number is 0 and none special, and above 2 * bias + (the largest) where one is
// special. Codes of 8 bits are for FP8; their sums fit too.
template <class Code>
struct Codes {
  static constexpr int bits = 8 * sizeof(Code), in_word = 32 / bits;
  static constexpr int32_t bias = bits == 8 ? 44 : 2000, special = bits == 8 ? 124 : 10000;
  typedef Code Vector __attribute__((vector_size(sizeof(Vec))));

  static uint32_t of(uint32_t magnitude, int32_t least) {
    int32_t e = static_cast<int32_t>(magnitude >> 23) - 127;
    int32_t code = e > 30 ? special : (e > least ? e : least) + bias;
    return magnitude == 0 ? 0 : static_cast<uint32_t>(code);
  }
};

constexpr int64_t kPanelBlock = 32;  // of K, a multiple of the steps of all tensor cores

// Packs a panel into blocks of kPanelBlock of K: [values][k][width], then [k /
// in_word][codes][width]. A block has `words` for each of K, not all of them used. value(x, v,
// block): the v-th value of x.
template <class Code, int values, int words, int width, class Value>
void pack_blocks(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                 int64_t k, uint32_t* out, const Value& value) {
  // To the end of the panel first. Only the codes of the last block may get to its own place there.
  uint32_t* decoded = out + (words - 1) * k * width;
  pack<width>(dtype, src, stride_i, stride_k, rows, k, decoded, k, width);
  int32_t least = min_exponent(dtype);
  constexpr int in_word = Codes<Code>::in_word;
  for (int64_t at = 0; at < k; at += kPanelBlock) {
    int64_t block = k - at < kPanelBlock ? k - at : kPanelBlock, n = block * width;
    const uint32_t* from = decoded + at * width;
    uint32_t code[(kPanelBlock + in_word) * width];
    for (int64_t i = 0; i < n; ++i) code[i] = Codes<Code>::of(from[i] & 0x7FFFFFFFu, least);
    for (int64_t i = n; i < n + in_word * width; ++i) code[i] = 0;
    uint32_t* to = out + words * at * width;
    for (int v = 0; v < values; ++v, to += n) {
      const uint32_t* __restrict x = from;
      uint32_t* __restrict y = to;
      for (int64_t i = 0; i < n; ++i) y[i] = value(x[i], v, block);
    }
    for (int64_t w = 0; w * in_word < block; ++w, to += width) {
      for (int i = 0; i < width; ++i) {
        uint32_t word = 0;
        for (int j = 0; j < in_word; ++j) {
          word |= code[(w * in_word + j) * width + i] << j * Codes<Code>::bits;
        }
        to[i] = word;
      }
    }
  }
}

// All panels of rows, each of `words` words for each row.
template <class Code, int values, int words_of_k, int width, class Value>
bool pack_panels(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                 int64_t k, uint32_t* out, int64_t words, const Value& value) {
  const char* x = static_cast<const char*>(src);
  for (int64_t row = 0; row < rows; row += width) {
    pack_blocks<Code, values, words_of_k, width>(
        dtype, x + row * stride_i * element_size(dtype), stride_i, stride_k,
        rows - row < width ? rows - row : width, k, out + row * words, value);
  }
  return false;
}

inline Words largest_in_word(Codes<uint16_t>::Vector x) {
  Words low = (Words)x & 0xFFFF, high = (Words)x >> 16;
  return low > high ? low : high;
}
inline Words largest_in_word(Codes<uint8_t>::Vector x) {
  Codes<uint8_t>::Vector y = (Codes<uint8_t>::Vector)((Words)x >> 16);
  x = x > y ? x : y;
  y = (Codes<uint8_t>::Vector)((Words)x >> 8);
  return (Words)(x > y ? x : y) & 255;
}

// found <- the largest sum of two codes, over `words` words of both panels.
template <class Code>
inline void find_largest(int64_t words, const uint32_t* a, const uint32_t* b,
                         Words (&found)[kRows][NV]) {
  typedef typename Codes<Code>::Vector Vector;
  Vector most[kRows][NV] = {};
  for (int64_t w = 0; w < words; ++w, a += kRows, b += kWidth) {
    Vector y[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      y[j] = (Vector)load(reinterpret_cast<const float*>(b) + j * kFloats);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      Vector x = (Vector)all(static_cast<int32_t>(a[i]));
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        Vector sum = x + y[j];
        most[i][j] = most[i][j] > sum ? most[i][j] : sum;
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) found[i][j] = largest_in_word(most[i][j]);
  }
}

inline bool any(const Words (&x)[kRows][NV]) {
  Words some{};
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < NV; ++j) some |= x[i][j];
  }
  uint32_t found = 0;
  for (int lane = 0; lane < kFloats; ++lane) found |= some[lane];
  return found != 0;
}
