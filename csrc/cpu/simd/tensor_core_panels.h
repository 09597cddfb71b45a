// The panels of gemm_simulated, the exponents of their products, and the rounding mode. Included
// once per instruction set, after gemm_loops.h.

typedef int32_t Ints __attribute__((vector_size(sizeof(Vec))));
typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));

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

// The code of an exponent: 0 of the number 0, else exponent + bias, special of 2^31 and more. A sum
// of two codes is largest where both numbers are not 0, or one is special. Of 8 bits, for FP8, it
// is 248 at most.
template <class Code>
struct Codes {
  static constexpr int bits = 8 * sizeof(Code), in_word = 32 / bits;
  static constexpr uint32_t bias = bits == 8 ? 44 : 2000, special = bits == 8 ? 124 : 10000;
  // The sum where both numbers are not 0 is between these if none is special.
  static constexpr uint32_t lowest = 2 * bias - (bits == 8 ? 28 : 252);
  static constexpr uint32_t highest = 2 * bias + (bits == 8 ? 30 : 60);
  typedef Code Vector __attribute__((vector_size(sizeof(Vec))));

  static uint32_t of(uint32_t magnitude, int32_t least) {
    int32_t e = static_cast<int32_t>(magnitude >> 23) - 127;
    uint32_t code = static_cast<uint32_t>(e > least ? e : least) + bias;
    code = e > 30 ? special : code;
    return magnitude == 0 ? 0 : code;
  }
};

constexpr int64_t kPanelBlock = 32;  // of K, a multiple of the steps of all tensor cores

// Packs into blocks of kPanelBlock of K: [k][values][width], then [k / in_word][codes][width]. A
// block has `words` for each of K, not all of them used. write(x, to) stores the values of one
// element, `width` apart.
template <class Code, int values, int words, int width, class Write>
void pack_blocks(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                 int64_t k, uint32_t* out, const Write& write) {
  // To the end of the panel first: a row is read before its place is written.
  const uint32_t* from = out + (words - 1) * k * width;
  pack<1, width>(dtype, src, stride_i, stride_k, rows, k, out + (words - 1) * k * width);
  int32_t least = min_exponent(dtype);
  for (int64_t at = 0; at < k; at += kPanelBlock) {
    int64_t block = k - at < kPanelBlock ? k - at : kPanelBlock;
    uint32_t *to = out + words * at * width, *codes = to + values * block * width;
    uint32_t code[width] = {};
    for (int64_t j = 0; j < block; ++j, from += width, to += values * width) {
      uint32_t row[width];
      __builtin_memcpy(row, from, sizeof row);
      int place = static_cast<int>(j) % Codes<Code>::in_word;
      for (int i = 0; i < width; ++i) {
        uint32_t before = place == 0 ? 0 : code[i];
        code[i] = before | Codes<Code>::of(row[i] & 0x7FFFFFFFu, least)
                               << place * Codes<Code>::bits;
        write(row[i], to + i);
      }
      if (place == Codes<Code>::in_word - 1 || j == block - 1) {
        __builtin_memcpy(codes, code, sizeof code);
        codes += width;
      }
    }
  }
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
