// Loops of gemm_simulated: chained steps of a tensor core (math/tensor_core.h), a vector of sums at
// a time. Included once per instruction set, after tensor_core_panels.h.
//
// Products are exact in FP32, so that an addend is trunc(a * b * 2^(fraction_bits - top)), a
// conversion to int32. This holds while the operands are below 2^31 and top is -75 or more: the
// unit then is 2^-100 or more, and products that are not exact are far below it. Sums of other
// steps are computed one by one, by the scalar formula.

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
      for (int j = 0; j < NV; ++j) y[j] = load(b + j * kFloats);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        Vec x = broadcast(a[i]);
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) total[i][j] += to_ints(x * y[j] * factor[i][j]);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < NV; ++j) to[i][j] = total[i][j];
    }
  }

  // After find_largest. terms: of this step; the last one may be shorter than the tensor core's.
  void step(const TensorCore& core, int64_t terms, const float* a, const float* b) {
    Ints none[kRows][NV];
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < NV; ++j) {
        none[i][j] = (Ints)code[i][j] < kTwoBiases - 252;
        Ints largest = max_of((Ints)code[i][j] - kTwoBiases, (((Ints)sum[i][j] >> 23) & 255) - 127);
        special[i][j] |= (Words)((largest > kHighest) | ((largest < kLowest) & ~none[i][j]));
        top[i][j] = max_of(largest, all(kLowest));
        factor[i][j] = two_to(core.fraction_bits - top[i][j]);
      }
    }
    // Two sums where all addends together may not fit int32.
    bool is_long = core.fraction_bits > 24;
    int64_t half = is_long ? terms / 2 : terms;
    add(half, a, b, addends[0]);
    if (is_long) add(terms - half, a + half * kRows, b + half * kWidth, addends[1]);
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < NV; ++j) {
        Ints kept = to_ints(sum[i][j] * factor[i][j]) + addends[0][i][j];
        Vec next = is_long ? truncated_sum(kept, addends[1][i][j]) : to_floats(kept);
        next = next * two_to(top[i][j] - core.fraction_bits);
        // Nothing is added to a sum that has been cut before.
        sum[i][j] = none[i][j] ? sum[i][j] : next;
      }
    }
  }

  void of_block(const TensorCore& core, int64_t block, const uint32_t* a, const uint32_t* b) {
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
    const float* x = reinterpret_cast<const float*>(a);
    const float* y = reinterpret_cast<const float*>(b);
    for (int64_t at = 0; at < block; at += core.terms) {
      int terms = static_cast<int>(block - at < core.terms ? block - at : core.terms);
      c = tensor_core_step(core, x + at * kRows, kRows, least_a, y + at * kWidth, kWidth, least_b,
                           terms, c);
    }
    return c;
  }
};

// Of a panel with `words` for each of K.
template <class Tile, int words>
[[gnu::noinline]] void chain_blocks(const TensorCore& core, int least_a, int least_b, int64_t k,
                                    const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
                                    bool accumulate) {
  Tile tile;
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < NV; ++j) {
      Vec before = accumulate ? load(c + i * ldc + j * kFloats) : Vec{};
      tile.sum[i][j] = before;
      tile.special[i][j] = (Words)(((Ints)before & 0x7F800000) == 0x7F800000);
    }
  }
  for (int64_t at = 0; at < k; at += kPanelBlock) {
    tile.of_block(core, k - at < kPanelBlock ? k - at : kPanelBlock, a + words * at * kRows,
                  b + words * at * kWidth);
  }
  bool some = any(tile.special);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < NV; ++j) {
      Vec sum = tile.sum[i][j];
      for (int lane = 0; some && lane < kFloats; ++lane) {
        if (tile.special[i][j][lane] == 0) continue;
        int col = j * kFloats + lane;
        float one = accumulate ? c[i * ldc + col] : 0.0f;
        for (int64_t at = 0; at < k; at += kPanelBlock) {
          one = Tile::exactly(core, least_a, least_b, k - at < kPanelBlock ? k - at : kPanelBlock,
                              a + words * at * kRows + i, b + words * at * kWidth + col, one);
        }
        sum[lane] = one;
      }
      store(c + i * ldc + j * kFloats, sum);
    }
  }
}

template <class Tile, int words>
void simulate(const TensorCore& core, int least_a, int least_b, int64_t k, const uint32_t* a,
              const uint32_t* b, float* c, int64_t ldc, bool accumulate) {
  TowardZero rounding;
  chain_blocks<Tile, words>(core, least_a, least_b, k, a, b, c, ldc, accumulate);
}

constexpr SimulatedKernel simulated{
    kRows, kWidth, 2, pack_simulated<kRows>, pack_simulated<kWidth>, simulate<SimulatedTile, 2>};
