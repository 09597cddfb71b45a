// Loops of gemm_simulated: chained steps of a tensor core (math/tensor_core.h), a vector of sums at
// a time. Included once per instruction set, after gemm_loops.h.
//
// Products are exact in FP32, so that an addend is trunc(a * b * 2^(fraction_bits - top)), a
// conversion to int32. This holds while the operands are below 2^31 and top is -75 or more: the
// unit then is 2^-100 or more, and products that are not exact are far below it. Sums of other
// steps are computed one by one, by the scalar formula.

typedef int32_t Ints __attribute__((vector_size(sizeof(Vec))));

constexpr int kFloats = sizeof(Vec) / sizeof(float), kRows = 4;
// Exponents: of 0, and of values that take the scalar formula. Their sum is above the largest, too.
constexpr int32_t kNone = -10000, kSpecial = 1000000;
constexpr int32_t kLowest = -75, kHighest = 127;  // of top

inline Ints all(int32_t x) { return x - Ints{}; }
inline Ints max_of(Ints a, Ints b) { return a > b ? a : b; }
inline Ints to_ints(Vec x) { return __builtin_convertvector(x, Ints); }  // toward zero
inline Vec to_floats(Ints x) { return __builtin_convertvector(x, Vec); }
inline Vec two_to(Ints exponent) { return (Vec)((exponent + 127) << 23); }

inline int32_t exponent_of(uint32_t bits, int32_t least) {
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  int32_t e = static_cast<int32_t>(magnitude >> 23) - 127;
  e = e > 30 ? kSpecial : e;
  e = e > least ? e : least;
  return magnitude == 0 ? kNone : e;
}

template <int width>
bool pack_simulated(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                    int64_t k, uint32_t* out) {
  // Into the upper half first; row j moves to row 2j, at or below its place.
  pack<1, width>(dtype, src, stride_i, stride_k, rows, k, out + k * width);
  int32_t least = min_exponent(dtype);
  for (int64_t j = 0; j < k; ++j) {
    uint32_t row[width];
    __builtin_memcpy(row, out + (k + j) * width, sizeof row);
    uint32_t* __restrict to = out + 2 * j * width;
    for (int i = 0; i < width; ++i) to[i] = row[i];
    for (int i = 0; i < width; ++i) {
      to[width + i] = static_cast<uint32_t>(exponent_of(row[i], least));
    }
  }
  return false;
}

// low + high, |low| and |high| < 2^31, with 24 bits, toward zero.
inline Vec truncated_sum(Ints low, Ints high) {
  Vec upper = to_floats((low >> 8) + (high >> 8)) * broadcast(256.0f);
  Vec lower = to_floats((low & 255) + (high & 255));
  Vec nearest = upper + lower;
  Vec error = lower - (nearest - upper);  // exact: the sum is nearest + error
  // Where nearest is further from zero than the sum, the number next to it is meant.
  return (Vec)((Ints)nearest + (Ints)(error * nearest < broadcast(0.0f)));
}

// Sums of at most 21 bits, with 14.
inline Vec short_sum(Ints sum) { return (Vec)((Ints)to_floats(sum) & ~1023); }

// The sums of kRows x NV vectors over steps of `terms` products.
struct SimulatedTile {
  Vec sum[kRows][NV];
  Ints special[kRows][NV];  // not 0 where the scalar formula is needed
  Ints top[kRows][NV], addends[2][kRows][NV];
  Vec factor[kRows][NV];  // 1 / unit

  void find_top(int64_t terms, const uint32_t* a, const uint32_t* b) {
    Ints found[kRows][NV];
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < NV; ++j) found[i][j] = all(2 * kNone);
    }
    for (int64_t k = 0; k < terms; ++k, a += 2 * kRows, b += 2 * NV * kFloats) {
      Ints eb[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        eb[j] = (Ints)load(reinterpret_cast<const float*>(b) + (NV + j) * kFloats);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        Ints ea = all(static_cast<int32_t>(a[kRows + i]));
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) found[i][j] = max_of(found[i][j], ea + eb[j]);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < NV; ++j) top[i][j] = found[i][j];
    }
  }

  void add(int64_t terms, const uint32_t* a, const uint32_t* b, Ints (*to)[NV]) {
    Ints total[kRows][NV] = {};
    for (int64_t k = 0; k < terms; ++k, a += 2 * kRows, b += 2 * NV * kFloats) {
      Vec y[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) y[j] = load(reinterpret_cast<const float*>(b) + j * kFloats);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        Vec x = broadcast(bits_float(a[i]));
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) total[i][j] += to_ints(x * y[j] * factor[i][j]);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < NV; ++j) to[i][j] = total[i][j];
    }
  }

  // terms: of this step; a step of all K may be shorter than the tensor core's.
  void step(const TensorCore& core, int64_t terms, const uint32_t* a, const uint32_t* b) {
    find_top(terms, a, b);
    Ints none[kRows][NV];
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < NV; ++j) {
        none[i][j] = top[i][j] < kNone / 2;
        Ints largest = max_of(top[i][j], (((Ints)sum[i][j] >> 23) & 255) - 127);
        special[i][j] |= (largest > kHighest) | ((largest < kLowest) & ~none[i][j]);
        top[i][j] = max_of(largest, all(kLowest));
        factor[i][j] = two_to(core.fraction_bits - top[i][j]);
      }
    }
    // Two sums, since all addends together may not fit int32.
    bool is_short = core.significant_bits == 14;
    int64_t half = is_short ? terms : terms / 2;
    add(half, a, b, addends[0]);
    if (!is_short) {
      add(terms - half, a + half * 2 * kRows, b + half * 2 * NV * kFloats, addends[1]);
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < NV; ++j) {
        Ints kept = to_ints(sum[i][j] * factor[i][j]) + addends[0][i][j];
        Vec next = is_short ? short_sum(kept) : truncated_sum(kept, addends[1][i][j]);
        next = next * two_to(top[i][j] - core.fraction_bits);
        // Nothing is added to a sum that has been cut before.
        sum[i][j] = none[i][j] ? sum[i][j] : next;
      }
    }
  }
};

void simulate(const TensorCore& core, int least_a, int least_b, int64_t k, const uint32_t* a,
              const uint32_t* b, float* c, int64_t ldc, bool accumulate) {
  constexpr int64_t step_a = 2 * kRows, step_b = 2 * NV * kFloats;
  SimulatedTile tile;
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < NV; ++j) {
      tile.sum[i][j] = accumulate ? load(c + i * ldc + j * kFloats) : Vec{};
      tile.special[i][j] = Ints{};
    }
  }
  for (int64_t at = 0; at < k; at += core.terms) {
    int64_t terms = k - at < core.terms ? k - at : core.terms;
    tile.step(core, terms, a + at * step_a, b + at * step_b);
  }
  const float* x = reinterpret_cast<const float*>(a);
  const float* y = reinterpret_cast<const float*>(b);
  for (int i = 0; i < kRows; ++i) {
    for (int col = 0; col < NV * kFloats; ++col) {
      float* to = c + i * ldc + col;
      if (tile.special[i][col / kFloats][col % kFloats] == 0) {
        *to = tile.sum[i][col / kFloats][col % kFloats];
        continue;
      }
      float sum = accumulate ? *to : 0.0f;
      for (int64_t at = 0; at < k; at += core.terms) {
        int terms = static_cast<int>(k - at < core.terms ? k - at : core.terms);
        sum = tensor_core_step(core, x + at * step_a + i, step_a, least_a, y + at * step_b + col,
                               step_b, least_b, terms, sum);
      }
      *to = sum;
    }
  }
}
