// Loops of gemm_simulated for block formats (Blackwell). Included once per instruction set, after
// tensor_core_loops.h.
//
// Operands are pairs of fp32 words, a number and the exponent of its block, K a multiple of 64. For
// each 32 of K a panel has the words [32][width] of numbers, [16] of codes of exponents, and of
// both halves [2] the block's exponent and [2] which numbers are not 0.

template <int width>
bool pack_blocks(Dtype, const void* src, int64_t stride_i, int64_t /*stride_k: 2*/, int64_t rows,
                 int64_t k, uint32_t* out, int64_t words, int64_t /*width*/) {
  for (int64_t row = 0; row < rows; row += width, out += width * words) {
    __builtin_memset(out, 0, static_cast<size_t>(width * words) * sizeof *out);
    for (int64_t i = 0; i < width && row + i < rows; ++i) {
      const uint32_t* pairs = static_cast<const uint32_t*>(src) + (row + i) * stride_i;
      for (int64_t at = 0; at < k; ++at, pairs += 2) {
        uint32_t* block = out + at / 32 * 64 * width + i;
        int64_t j = at % 32, half = j / 16;
        block[j * width] = pairs[0];
        int32_t exponent = static_cast<int32_t>(pairs[1]);
        block[(32 + j / 2) * width] |= Codes<uint16_t>::of(pairs[0] & 0x7FFFFFFFu, exponent)
                                       << (j % 2 * 16);
        block[(48 + half) * width] = pairs[1];
        block[(50 + half) * width] |= static_cast<uint32_t>(pairs[0] << 1 != 0) << j % 16;
      }
    }
  }
  return false;
}

struct BlockTile : SimulatedTile {
  static float exactly(const TensorCore& core, int, int, int64_t block, const uint32_t* a,
                       const uint32_t* b, float c) {
    return SimulatedTile::exactly(core, static_cast<int>(a[48 * kRows]),
                                  static_cast<int>(b[48 * kWidth]), block, a, b, c);
  }
};

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
  y = e > 254 ? (Vec)(sign | 0x7F800000) : y;
  y = ((Ints)check & 0x7F800000) == 0x7F800000 ? check : y;
  return check != check ? (Vec)all(INT32_MAX) : y;
}

struct Fp4Tile {
  Vec sum[kRows][NV];
  Words special[kRows][NV];  // none is
  Vec groups[kRows][NV][4];
  Ints exponents[kRows][NV][4];
  int group = 0;  // of the next 16

  void add_block(const TensorCore& core, int64_t /*32*/, const uint32_t* a, const uint32_t* b) {
    for (int half = 0; half < 2; ++half, ++group) {
      Vec total[kRows][NV] = {};
      for (int k = 16 * half; k < 16 * half + 16; ++k) {
        const float* y = reinterpret_cast<const float*>(b) + k * kWidth;
        each_sum([&](int i, int j) {
          Vec x = broadcast(bits_float(a[k * kRows + i]));
          total[i][j] = fma(x, load(y + j * kLanes), total[i][j]);
        });
      }
      const float* y = reinterpret_cast<const float*>(b) + (48 + half) * kWidth;
      const int32_t* x = reinterpret_cast<const int32_t*>(a) + (48 + half) * kRows;
      each_sum([&](int i, int j) {
        Ints both = (Ints)load(y + 2 * kWidth + j * kLanes) & x[2 * kRows + i];
        groups[i][j][group] = total[i][j];
        exponents[i][j][group] = both == 0 ? all(kNone) : (Ints)load(y + j * kLanes) + x[i];
      });
    }
    if (group < 4) return;
    group = 0;
    each_sum([&](int i, int j) {
      sum[i][j] = fp4_step(core, sum[i][j], groups[i][j], exponents[i][j]);
      special[i][j] = Words{};
    });
  }

  static float exactly(const TensorCore&, int, int, int64_t, const uint32_t*, const uint32_t*,
                       float c) {
    return c;
  }
};

constexpr SimulatedKernel simulated_mx{
    kRows, kWidth, 2, pack_blocks<kRows>, pack_blocks<kWidth>, simulate<BlockTile, 2>};
constexpr SimulatedKernel simulated_fp4{
    kRows, kWidth, 2, pack_blocks<kRows>, pack_blocks<kWidth>, simulate<Fp4Tile, 2>};
