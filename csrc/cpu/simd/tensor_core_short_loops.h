// Loops of gemm_simulated for FP8 whose sums have 14 bits (Ada, Hopper). Included once per
// instruction set, after tensor_core_loops.h.
//
// With rounding toward zero, the FP32 number 2^23 * unit + x is 2^23 * unit + floor(x / unit) *
// unit for x >= 0: one multiply-add cuts a product, which is exact, and adds it. Both signs are cut
// toward zero, so that positive and negative products have sums of their own, of magnitudes. b is
// packed as max(b, 0) and max(-b, 0); a as |a| and as the place, 0 or 1, of the values of b whose
// products are positive, times their number. A sum and the c before it are below 2^20 units.

template <int width, bool is_b>
bool pack_short(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                int64_t k, uint32_t* out, int64_t words, int64_t /*width*/) {
  return pack_panels<uint8_t, 2, 4, width>(
      dtype, src, stride_i, stride_k, rows, k, out, words, [](uint32_t x, int v, int64_t block) {
        uint32_t magnitude = x & 0x7FFFFFFFu;
        bool negative = x != magnitude;
        if (is_b) return negative == (v == 1) ? magnitude : 0;
        return v == 0 ? magnitude : negative ? static_cast<uint32_t>(block) * kWidth : 0;
      });
}

struct ShortTile {
  Vec sum[kRows][NV];
  Words special[kRows][NV];  // not 0 where the scalar formula is needed
  Words code[kRows][NV];     // the largest of this step

  static constexpr int32_t kTwoBiases = 2 * Codes<uint8_t>::bias;

  // Rows first and first + 1, after find_largest.
  void add(int first, int64_t block, int64_t terms, const float* a, const float* b) {
    Vec plus[2][NV], minus[2][NV];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        Vec c = sum[first + i][j];
        Ints largest = (Ints)code[first + i][j];
        special[first + i][j] |= (Words)(largest > kTwoBiases + 30);
        // As FP32 bits. Where all products are 0 it is above e(c) or not, but at most -29: every
        // sum is a multiple of the unit of -28, the smallest exponent of a product.
        Ints top = (largest + (127 - kTwoBiases)) << 23;
        top = max_of(top, (Ints)c & 0x7F800000);
        Vec start = (Vec)(top + (10 << 23));                // 2^23 * 2^(top - 13)
        plus[i][j] = start + (Vec)max_of((Ints)c, Ints{});  // max(c, 0)
        minus[i][j] = start + (Vec)max_of((Ints)-c, Ints{});
      }
    }
    for (int64_t k = 0; k < terms; ++k, a += kRows, b += kWidth) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        Vec x = broadcast(a[first + i]);
        int32_t place;
        __builtin_memcpy(&place, a + block * kRows + first + i, sizeof place);
        const float *b_plus = b + place, *b_minus = b + block * kWidth - place;
#if defined(__x86_64__)
        // Pointers without an index: an operand with one takes a micro-operation more.
        asm("" : "+r"(b_plus), "+r"(b_minus));
#endif
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) {
          plus[i][j] = fma(x, load(b_plus + j * kLanes), plus[i][j]);
          minus[i][j] = fma(x, load(b_minus + j * kLanes), minus[i][j]);
        }
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        // The difference is exact; its upper 14 bits.
        sum[first + i][j] = (Vec)((Ints)(plus[i][j] - minus[i][j]) & ~1023);
      }
    }
  }

  void add_block(const TensorCore& core, int64_t block, const uint32_t* a, const uint32_t* b) {
    for (int64_t at = 0; at < block; at += core.terms) {
      int64_t terms = block - at < core.terms ? block - at : core.terms;
      find_largest<uint8_t>((terms + 3) / 4, a + (2 * block + at / 4) * kRows,
                            b + (2 * block + at / 4) * kWidth, code);
      for (int i = 0; i < kRows; i += 2) {
        add(i, block, terms, reinterpret_cast<const float*>(a + at * kRows),
            reinterpret_cast<const float*>(b + at * kWidth));
      }
    }
  }

  // One sum of a block by the scalar formula.
  static float exactly(const TensorCore& core, int least_a, int least_b, int64_t block,
                       const uint32_t* a, const uint32_t* b, float c) {
    float x[kPanelBlock], y[kPanelBlock];
    for (int64_t k = 0; k < block; ++k) {
      const uint32_t *a_k = a + k * kRows, *b_k = b + k * kWidth;
      uint32_t minus = b_k[block * kWidth];
      x[k] = bits_float(a_k[0] | (a_k[block * kRows] != 0 ? 0x80000000u : 0));
      y[k] = bits_float(minus != 0 ? minus | 0x80000000u : b_k[0]);
    }
    return chain(core, least_a, least_b, block, x, 1, y, 1, c);
  }
};

constexpr SimulatedKernel simulated_short{
    kRows, kWidth, 4, pack_short<kRows, false>, pack_short<kWidth, true>, simulate<ShortTile, 4>};
