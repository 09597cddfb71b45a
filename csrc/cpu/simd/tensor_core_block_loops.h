// Loops of gemm_simulated for FP4 in groups (Blackwell), and the choice between all loops. Included
// once per instruction set, after tensor_core_loops.h.

// x * 2^n, |n| <= 252, of which a part below 1 may be lost.
inline Vec scaled(Vec x, Ints n) { return x * two_to(n >> 1) * two_to(n - (n >> 1)); }

// Toward zero.
inline Vec whole(Vec x) {
  Vec magnitude = (Vec)((Ints)x & 0x7FFFFFFF);
  return magnitude < 0x1p24f ? to_floats(to_ints(x)) : x;
}

// The sum of integers below 2^50 in magnitude, with 24 bits, as TowardZero says.
template <int n>
inline Vec sum_of(const Vec (&x)[n]) {
  typedef float Half __attribute__((vector_size(sizeof(Vec) / 2)));
  typedef double Doubles __attribute__((vector_size(sizeof(Vec))));
  Half parts[n][2], rounded[2];
  __builtin_memcpy(parts, x, sizeof parts);
  for (int half = 0; half < 2; ++half) {
    Doubles sum = {};
    for (int i = 0; i < n; ++i) sum += __builtin_convertvector(parts[i][half], Doubles);
    rounded[half] = __builtin_convertvector(sum, Half);
  }
  Vec y;
  __builtin_memcpy(&y, rounded, sizeof y);
  return y;
}

// c and the sums of four groups, whose products are scaled by 2^exponent; kNone: all are 0.
constexpr int32_t kNone = -1000;
inline Vec fp4_step(const TensorCore& core, Vec c, const Vec (&sums)[4],
                    const Ints (&exponents)[4]) {
  Ints biased = ((Ints)c >> 23) & 255;
  Ints top = max_of(all(core.min_exponent), (c == 0) ? all(kNone) : max_of(biased, all(1)) - 127);
  for (int g = 0; g < 4; ++g) top = max_of(top, exponents[g]);
  Ints unit = top - core.fraction_bits;
  Vec addends[5] = {whole(scaled(c, -unit))}, check = c;
  for (int g = 0; g < 4; ++g) {
    addends[1 + g] = whole(scaled(sums[g], max_of(exponents[g] - unit, all(-252))));
    check += sums[g];
  }
  Vec sum = sum_of(addends);
  Vec y = scaled(sum, unit);
  Ints sign = (Ints)sum & INT32_MIN, e = (((Ints)sum >> 23) & 255) + unit;
  y = y + 0;  // not -0
  y = e > 254 ? (Vec)(sign | 0x7F800000) : y;
  y = ((Ints)check & 0x7F800000) == 0x7F800000 ? check : y;
  return check != check ? (Vec)all(INT32_MAX) : y;
}

// Numbers are given without the exponents of their scales: products and sums of 16 are exact.
struct Fp4Tile : SimulatedTile {
  Vec groups[kRows][NV][4];
  Ints exponents[kRows][NV][4];
  int group = 0;  // of the next 16

  void add_block(const TensorCore& core, const uint32_t* a, const uint32_t* b) {
    for (int half = 0; half < 2; ++half, ++group) {
      Vec total[kRows][NV] = {};
      for (int k = 16 * half; k < 16 * half + 16; ++k) {
        const float* y = reinterpret_cast<const float*>(b) + k * kWidth;
        each_sum([&](int i, int j) {
          Vec x = broadcast(bits_float(a[k * kRows + i]));
          total[i][j] = fma(x, load(y + j * kLanes), total[i][j]);
        });
      }
      const float* y = reinterpret_cast<const float*>(b) + half * kWidth;
      const int32_t* x = reinterpret_cast<const int32_t*>(a) + half * kRows;
      each_sum([&](int i, int j) {
        Ints both = (Ints)load(y + kThere * kWidth + j * kLanes) & x[kThere * kRows + i];
        Ints exponent =
            (Ints)load(y + kExponents * kWidth + j * kLanes) + x[kExponents * kRows + i];
        exponents[i][j][group] = both == 0 ? all(kNone) : exponent;
        groups[i][j][group] = total[i][j];
      });
    }
    if (group < 4) return;
    group = 0;
    each_sum([&](int i, int j) {
      sum[i][j] = fp4_step(core, sum[i][j], groups[i][j], exponents[i][j]);
      special[i][j] = Words{};
    });
  }
};

void simulate(const TensorCore& core, int64_t k, const uint32_t* a, const uint32_t* b, float* c,
              int64_t ldc, bool accumulate) {
  TowardZero rounding;
  auto* chain = core.parts > 0    ? chain_blocks<ScalarTile>
                : core.terms > 32 ? chain_blocks<Fp4Tile>
                                  : chain_blocks<SimulatedTile>;
  chain(core, k, a, b, c, ldc, accumulate);
}

constexpr SimulatedKernel simulated{kRows, kWidth, pack_simulated<kRows>, pack_simulated<kWidth>,
                                    simulate};
