// Loops of gemm_simulated for FP8 whose sums have 14 bits (Ada, Hopper). Included once per
// instruction set, after tensor_core_loops.h.
//
// With rounding toward zero, 2^23 * unit + x is 2^23 * unit + floor(x / unit) * unit for x >= 0:
// one fused multiply-add cuts a product and adds it. (The products are exact; it need not be
// fused.) Both signs are cut toward zero, so that positive and negative products have sums of their
// own, of magnitudes: b is packed as max(b, 0) and max(-b, 0), a as |a| and as the place where the
// values of b begin whose products are positive. A sum and the c before it are below 2^20 units.

template <int width, bool is_b>
bool pack_short(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                int64_t k, uint32_t* out) {
  pack_blocks<uint8_t, 2, 4, width>(dtype, src, stride_i, stride_k, rows, k, out,
                                    [](uint32_t x, uint32_t* to) {
                                      uint32_t magnitude = x & 0x7FFFFFFFu;
                                      bool negative = x != magnitude;
                                      to[0] = is_b && negative ? 0 : magnitude;
                                      to[width] = !negative ? 0 : is_b ? magnitude : kWidth;
                                    });
  return false;
}

struct ShortTile {
  Vec sum[kRows][NV];
  Words special[kRows][NV];  // not 0 where the scalar formula is needed
  Words code[kRows][NV];     // the largest of this step

  // Rows first and first + 1, after find_largest.
  void add(int first, int64_t terms, const float* a, const float* b) {
    Vec plus[2][NV], minus[2][NV];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        Vec c = sum[first + i][j];
        Words found = code[first + i][j];
        special[first + i][j] |= (Words)(found > Codes<uint8_t>::highest);
        // As FP32 bits; c = 0 and products that are all 0 leave a power of two that is small
        // enough.
        Ints top = (Ints)((found + (127 - 2 * Codes<uint8_t>::bias)) << 23);
        top = max_of(top, (Ints)c & 0x7F800000);
        Vec start = (Vec)(top + (10 << 23));                // 2^23 * 2^(top - 13)
        plus[i][j] = start + (Vec)max_of((Ints)c, Ints{});  // max(c, 0)
        minus[i][j] = start + (Vec)max_of((Ints)-c, Ints{});
      }
    }
    for (int64_t k = 0; k < terms; ++k, a += 2 * kRows, b += 2 * kWidth) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        Vec x = broadcast(a[first + i]);
        int32_t place;
        __builtin_memcpy(&place, a + kRows + first + i, sizeof place);
        const float *of_plus = b + place, *of_minus = b + kWidth - place;
#if defined(__x86_64__)
        // Pointers without an index: an operand with one takes a micro-operation more.
        asm("" : "+r"(of_plus), "+r"(of_minus));
#endif
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) {
          plus[i][j] = fma(x, load(of_plus + j * kFloats), plus[i][j]);
          minus[i][j] = fma(x, load(of_minus + j * kFloats), minus[i][j]);
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

  void of_block(const TensorCore& core, int64_t block, const uint32_t* a, const uint32_t* b) {
    for (int64_t at = 0; at < block; at += core.terms) {
      int64_t terms = block - at < core.terms ? block - at : core.terms;
      find_largest<uint8_t>((terms + 3) / 4, a + (2 * block + at / 4) * kRows,
                            b + (2 * block + at / 4) * kWidth, code);
      for (int i = 0; i < kRows; i += 2) {
        add(i, terms, reinterpret_cast<const float*>(a + 2 * at * kRows),
            reinterpret_cast<const float*>(b + 2 * at * kWidth));
      }
    }
  }

  // One sum of a block by the scalar formula.
  static float exactly(const TensorCore& core, int least_a, int least_b, int64_t block,
                       const uint32_t* a, const uint32_t* b, float c) {
    float x[kPanelBlock], y[kPanelBlock];
    for (int64_t k = 0; k < block; ++k, a += 2 * kRows, b += 2 * kWidth) {
      x[k] = bits_float(a[0] | (a[kRows] != 0 ? 0x80000000u : 0));
      y[k] = bits_float(b[kWidth] != 0 ? b[kWidth] | 0x80000000u : b[0]);
    }
    for (int64_t at = 0; at < block; at += core.terms) {
      int terms = static_cast<int>(block - at < core.terms ? block - at : core.terms);
      c = tensor_core_step(core, x + at, 1, least_a, y + at, 1, least_b, terms, c);
    }
    return c;
  }
};

constexpr SimulatedKernel simulated_short{
    kRows, kWidth, 4, pack_short<kRows, false>, pack_short<kWidth, true>, simulate<ShortTile, 4>};
