// Loops of gemm_simulated: chained steps of a tensor core (math/tensor_core.h), a vector of sums at
// a time. Included once per instruction set, after gemm_loops.h.
//
// Products are exact in FP32, so that an addend is trunc(a * b * 2^(fraction_bits - top)), a
// conversion to int32. This holds while the operands are below 2^31 and top is -75 or more: the
// unit then is 2^-100 or more, and products that are not exact are far below it. Sums of other
// steps are computed one by one, by the scalar formula.

constexpr int kRows = 4, kWidth = NV * kLanes;

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

// The code of an exponent: 0 of the number 0, kSpecial of 2^31 and more (and of Inf and NaN), else
// the exponent + kBias. Any sum of two codes is below 2 * kBias + (the smallest exponent of a
// product) where a number is 0 and none special, and above 2 * kBias + (the largest) where one is
// special.
constexpr int32_t kBias = 2000, kSpecial = 10000, kTwoBiases = 2 * kBias;
typedef uint16_t Codes __attribute__((vector_size(sizeof(Vec))));

inline uint32_t exponent_code(uint32_t magnitude, int32_t least) {
  int32_t e = static_cast<int32_t>(magnitude >> 23) - 127;
  int32_t code = e > 30 ? kSpecial : (e > least ? e : least) + kBias;
  return magnitude == 0 ? 0 : static_cast<uint32_t>(code);
}

// Panels have 64 words of each row for each 32 of K, a multiple of the steps of most tensor cores:
// the numbers, from kCodes on their codes, two in a word, and of both halves, from kExponents on,
// the exponent of the block and, from kThere on, a bit for each number that is not 0.
constexpr int64_t kPanelBlock = 32, kCodes = 32, kExponents = 48, kThere = 50;

// Of pairs of words in rows `stride` words apart: an fp32 number, and the smallest exponent of its
// block or, with FP4, the exponent of its scale.
template <int width>
bool pack_simulated(Dtype, const void* src, int64_t stride, int64_t /*2*/, int64_t rows, int64_t k,
                    uint32_t* out, int64_t words, int64_t /*width*/) {
  for (int64_t row = 0; row < rows; row += width, out += width * words) {
    __builtin_memset(out, 0, static_cast<size_t>(width * words) * sizeof *out);
    for (int64_t i = 0; i < width && row + i < rows; ++i) {
      const uint32_t* pair = static_cast<const uint32_t*>(src) + (row + i) * stride;
      for (int64_t at = 0; at < k; ++at, pair += 2) {
        uint32_t *block = out + at / kPanelBlock * 64 * width + i, magnitude = pair[0] & 0x7FFFFFFF;
        int64_t j = at % kPanelBlock, half = j / 16;
        uint32_t code = exponent_code(magnitude, static_cast<int32_t>(pair[1]));
        block[j * width] = pair[0];
        block[(kCodes + j / 2) * width] |= code << j % 2 * 16;
        block[(kExponents + half) * width] = pair[1];
        block[(kThere + half) * width] |= static_cast<uint32_t>(magnitude != 0) << j % 16;
      }
    }
  }
  return false;
}

// f(row, vector) for all sums of a tile.
template <class F>
inline void each_sum(const F& f) {
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) f(i, j);
  }
}

// largest <- the largest sum of two codes, over `words` words of both panels.
inline void find_largest(int64_t words, const uint32_t* a, const uint32_t* b,
                         Words (&largest)[kRows][NV]) {
  Codes most[kRows][NV] = {};
  for (int64_t w = 0; w < words; ++w, a += kRows, b += kWidth) {
    each_sum([&](int i, int j) {
      Codes y = (Codes)load(reinterpret_cast<const float*>(b) + j * kLanes);
      Codes sum = (Codes)all(static_cast<int32_t>(a[i])) + y;
      most[i][j] = most[i][j] > sum ? most[i][j] : sum;
    });
  }
  each_sum([&](int i, int j) {
    Words low = (Words)most[i][j] & 0xFFFF, high = (Words)most[i][j] >> 16;
    largest[i][j] = low > high ? low : high;
  });
}

inline bool any(const Words (&x)[kRows][NV]) {
  Words some{};
  each_sum([&](int i, int j) { some |= x[i][j]; });
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= some[lane];
  return bits != 0;
}

constexpr int32_t kLowest = -75, kHighest = 127;  // of top

inline Ints to_ints(Vec x) { return __builtin_convertvector(x, Ints); }   // toward zero
inline Vec to_floats(Ints x) { return __builtin_convertvector(x, Vec); }  // as TowardZero says
inline Vec two_to(Ints exponent) { return (Vec)((exponent + 127) << 23); }

// low + high, |low| and |high| < 2^31, with 24 bits, toward zero.
inline Vec truncated_sum(Ints low, Ints high) {
  Vec upper = to_floats((low >> 8) + (high >> 8)), lower = to_floats((low & 255) + (high & 255));
  return fma(upper, broadcast(256.0f), lower);
}

// The sums of kRows x NV vectors over steps of `terms` products.
struct SimulatedTile {
  Vec sum[kRows][NV];
  Words special[kRows][NV];  // not 0 where the scalar formula is needed
  Words code[kRows][NV];
  Ints top[kRows][NV], addends[2][kRows][NV];
  Vec factor[kRows][NV];  // 1 / unit

  void add(int64_t terms, const float* a, const float* b, Ints (*to)[NV]) {
    Ints total[kRows][NV] = {};
    for (int64_t k = 0; k < terms; ++k, a += kRows, b += kWidth) {
      Vec y[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) y[j] = load(b + j * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        Vec x = broadcast(a[i]);
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) total[i][j] += to_ints(x * y[j] * factor[i][j]);
      }
    }
    each_sum([&](int i, int j) { to[i][j] = total[i][j]; });
  }

  // After find_largest. terms: of this step; the last one may be shorter than the tensor core's.
  void step(const TensorCore& core, int64_t terms, const float* a, const float* b) {
    Ints none[kRows][NV];
    each_sum([&](int i, int j) {
      none[i][j] = (Ints)code[i][j] < kTwoBiases - 300;
      Ints largest = max_of((Ints)code[i][j] - kTwoBiases, (((Ints)sum[i][j] >> 23) & 255) - 127);
      special[i][j] |= (Words)((largest > kHighest) | ((largest < kLowest) & ~none[i][j]));
      top[i][j] = max_of(largest, all(kLowest));
      factor[i][j] = two_to(core.fraction_bits - top[i][j]);
    });
    // Two sums where all addends together may not fit int32.
    bool is_long = core.fraction_bits > 24;
    int64_t half = is_long ? terms / 2 : terms;
    add(half, a, b, addends[0]);
    if (is_long) add(terms - half, a + half * kRows, b + half * kWidth, addends[1]);
    each_sum([&](int i, int j) {
      Ints kept = to_ints(sum[i][j] * factor[i][j]) + addends[0][i][j];
      Vec next = is_long ? truncated_sum(kept, addends[1][i][j]) : to_floats(kept);
      // Of 24 bits, those of the result.
      next = (Vec)((Ints)next & -(1 << (24 - core.significant_bits)));
      next = next * two_to(top[i][j] - core.fraction_bits);
      // Nothing is added to a sum that has been cut before.
      sum[i][j] = none[i][j] ? sum[i][j] : next;
    });
  }

  void add_block(const TensorCore& core, const uint32_t* a, const uint32_t* b) {
    for (int64_t at = 0; at < kPanelBlock; at += core.terms) {
      find_largest(core.terms / 2, a + (kCodes + at / 2) * kRows, b + (kCodes + at / 2) * kWidth,
                   code);
      step(core, core.terms, reinterpret_cast<const float*>(a + at * kRows),
           reinterpret_cast<const float*>(b + at * kWidth));
    }
  }
};

// Every sum by the scalar formula.
struct ScalarTile : SimulatedTile {
  void add_block(const TensorCore&, const uint32_t*, const uint32_t*) {
    each_sum([&](int i, int j) { special[i][j] = (Words)all(-1); });
  }
};

// One sum by the scalar formula.
inline float chain(const TensorCore& core, int64_t k, const uint32_t* a, const uint32_t* b,
                   float c) {
  for (int64_t at = 0; at < k; at += core.terms) {
    int64_t block = at / kPanelBlock * 64, j = at % kPanelBlock;
    const uint32_t *x = a + block * kRows, *y = b + block * kWidth;
    c = tensor_core_step(core, reinterpret_cast<const float*>(x + j * kRows), kRows,
                         static_cast<int>(x[kExponents * kRows]),
                         reinterpret_cast<const float*>(y + j * kWidth), kWidth,
                         static_cast<int>(y[kExponents * kWidth]), core.terms, c);
  }
  return c;
}

template <class Tile>
[[gnu::noinline]] void chain_blocks(const TensorCore& core, int64_t k, const uint32_t* a,
                                    const uint32_t* b, float* c, int64_t ldc, bool accumulate) {
  Tile tile;
  each_sum([&](int i, int j) {
    Vec before = accumulate ? load(c + i * ldc + j * kLanes) : Vec{};
    tile.sum[i][j] = before;
    tile.special[i][j] = (Words)(((Ints)before & 0x7F800000) == 0x7F800000);
  });
  for (int64_t at = 0; at < k; at += kPanelBlock) {
    tile.add_block(core, a + 2 * at * kRows, b + 2 * at * kWidth);
  }
  bool some = any(tile.special);
  each_sum([&](int i, int j) {
    Vec sum = tile.sum[i][j];
    for (int lane = 0; some && lane < kLanes; ++lane) {
      if (tile.special[i][j][lane] == 0) continue;
      int col = j * kLanes + lane;
      sum[lane] = chain(core, k, a + i, b + col, accumulate ? c[i * ldc + col] : 0.0f);
    }
    store(c + i * ldc + j * kLanes, sum);
  });
}
