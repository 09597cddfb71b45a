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

// Packs panels of rows, each of `words` words for each row, into blocks of kPanelBlock of K:
// [values][k][width], then [k / in_word][codes][width]. A block has `words_of_k` for each of K, not
// all of them used. value(x, v, block): the v-th value of x.
template <class Code, int values, int words_of_k, int width, class Value>
bool pack_panels(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                 int64_t k, uint32_t* out, int64_t words, const Value& value) {
  int32_t least = min_exponent(dtype);
  constexpr int in_word = Codes<Code>::in_word;
  for (int64_t row = 0; row < rows; row += width, out += width * words) {
    // To the end of the panel first. Only the codes of the last block may get to its own place
    // there.
    uint32_t* decoded = out + (words_of_k - 1) * k * width;
    const char* x = static_cast<const char*>(src) + row * stride_i * element_size(dtype);
    pack<width>(dtype, x, stride_i, stride_k, rows - row < width ? rows - row : width, k, decoded,
                k, width);
    for (int64_t at = 0; at < k; at += kPanelBlock) {
      int64_t block = k - at < kPanelBlock ? k - at : kPanelBlock, n = block * width;
      const uint32_t* from = decoded + at * width;
      uint32_t code[(kPanelBlock + in_word) * width];
      for (int64_t i = 0; i < n; ++i) code[i] = Codes<Code>::of(from[i] & 0x7FFFFFFFu, least);
      for (int64_t i = n; i < n + in_word * width; ++i) code[i] = 0;
      uint32_t* to = out + words_of_k * at * width;
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
template <class Code>
inline void find_largest(int64_t words, const uint32_t* a, const uint32_t* b,
                         Words (&largest)[kRows][NV]) {
  typedef typename Codes<Code>::Vector Vector;
  Vector most[kRows][NV] = {};
  for (int64_t w = 0; w < words; ++w, a += kRows, b += kWidth) {
    Vector y[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      y[j] = (Vector)load(reinterpret_cast<const float*>(b) + j * kLanes);
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
  each_sum([&](int i, int j) { largest[i][j] = largest_in_word(most[i][j]); });
}

inline bool any(const Words (&x)[kRows][NV]) {
  Words some{};
  each_sum([&](int i, int j) { some |= x[i][j]; });
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= some[lane];
  return bits != 0;
}

constexpr int32_t kLowest = -75, kHighest = 127;  // of top
constexpr int32_t kTwoBiases = 2 * Codes<uint16_t>::bias;

inline Ints to_ints(Vec x) { return __builtin_convertvector(x, Ints); }   // toward zero
inline Vec to_floats(Ints x) { return __builtin_convertvector(x, Vec); }  // as TowardZero says
inline Vec two_to(Ints exponent) { return (Vec)((exponent + 127) << 23); }

template <int width>
bool pack_simulated(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                    int64_t k, uint32_t* out, int64_t words, int64_t /*width*/) {
  return pack_panels<uint16_t, 1, 2, width>(dtype, src, stride_i, stride_k, rows, k, out, words,
                                            [](uint32_t x, int, int64_t) { return x; });
}

// low + high, |low| and |high| < 2^31, with 24 bits, toward zero.
inline Vec truncated_sum(Ints low, Ints high) {
  Vec upper = to_floats((low >> 8) + (high >> 8)), lower = to_floats((low & 255) + (high & 255));
  return fma(upper, broadcast(256.0f), lower);
}

// c and the products of a block, step by step.
inline float chain(const TensorCore& core, int least_a, int least_b, int64_t block, const float* a,
                   int64_t stride_a, const float* b, int64_t stride_b, float c) {
  for (int64_t k = 0; k < block; k += core.terms) {
    int terms = static_cast<int>(block - k < core.terms ? block - k : core.terms);
    c = tensor_core_step(core, a + k * stride_a, stride_a, least_a, b + k * stride_b, stride_b,
                         least_b, terms, c);
  }
  return c;
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
      next = next * two_to(top[i][j] - core.fraction_bits);
      // Nothing is added to a sum that has been cut before.
      sum[i][j] = none[i][j] ? sum[i][j] : next;
    });
  }

  void add_block(const TensorCore& core, int64_t block, const uint32_t* a, const uint32_t* b) {
    for (int64_t at = 0; at < block; at += core.terms) {
      int64_t terms = block - at < core.terms ? block - at : core.terms;
      find_largest<uint16_t>((terms + 1) / 2, a + (block + at / 2) * kRows,
                             b + (block + at / 2) * kWidth, code);
      step(core, terms, reinterpret_cast<const float*>(a + at * kRows),
           reinterpret_cast<const float*>(b + at * kWidth));
    }
  }

  // One sum of a block by the scalar formula.
  static float exactly(const TensorCore& core, int least_a, int least_b, int64_t block,
                       const uint32_t* a, const uint32_t* b, float c) {
    return chain(core, least_a, least_b, block, reinterpret_cast<const float*>(a), kRows,
                 reinterpret_cast<const float*>(b), kWidth, c);
  }
};

// Of a panel with `words` for each of K.
template <class Tile, int words>
[[gnu::noinline]] void chain_blocks(const TensorCore& core, int least_a, int least_b, int64_t k,
                                    const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
                                    bool accumulate) {
  Tile tile;
  each_sum([&](int i, int j) {
    Vec before = accumulate ? load(c + i * ldc + j * kLanes) : Vec{};
    tile.sum[i][j] = before;
    tile.special[i][j] = (Words)(((Ints)before & 0x7F800000) == 0x7F800000);
  });
  for (int64_t at = 0; at < k; at += kPanelBlock) {
    tile.add_block(core, k - at < kPanelBlock ? k - at : kPanelBlock, a + words * at * kRows,
                   b + words * at * kWidth);
  }
  bool some = any(tile.special);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < NV; ++j) {
      Vec sum = tile.sum[i][j];
      for (int lane = 0; some && lane < kLanes; ++lane) {
        if (tile.special[i][j][lane] == 0) continue;
        int col = j * kLanes + lane;
        float one = accumulate ? c[i * ldc + col] : 0.0f;
        for (int64_t at = 0; at < k; at += kPanelBlock) {
          one = Tile::exactly(core, least_a, least_b, k - at < kPanelBlock ? k - at : kPanelBlock,
                              a + words * at * kRows + i, b + words * at * kWidth + col, one);
        }
        sum[lane] = one;
      }
      store(c + i * ldc + j * kLanes, sum);
    }
  }
}

template <class Tile, int words>
void simulate(const TensorCore& core, int least_a, int least_b, int64_t k, const uint32_t* a,
              const uint32_t* b, float* c, int64_t ldc, bool accumulate) {
  TowardZero rounding;
  chain_blocks<Tile, words>(core, least_a, least_b, k, a, b, c, ldc, accumulate);
}

// Every sum by the scalar formula.
struct ScalarTile : SimulatedTile {
  void add_block(const TensorCore&, int64_t, const uint32_t*, const uint32_t*) {
    each_sum([&](int i, int j) { special[i][j] = (Words)all(-1); });
  }
};

constexpr SimulatedKernel simulated_amd{
    kRows, kWidth, 2, pack_simulated<kRows>, pack_simulated<kWidth>, simulate<ScalarTile, 2>};
constexpr SimulatedKernel simulated{
    kRows, kWidth, 2, pack_simulated<kRows>, pack_simulated<kWidth>, simulate<SimulatedTile, 2>};
