// The micro-kernel over pairs of bf16, and the store of a tile in bf16, for AVX512-BF16. Included
// by loops_avx512.cpp.

// As micro_f32, over pairs of bf16: acc += a0 * b0 + a1 * b1 in fp32.
template <int mr, int nv>
void micro_bf16(int64_t words, const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
                bool accumulate) {
  __m512 acc[mr][nv];
#pragma GCC unroll 16
  for (int i = 0; i < mr; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) {
      acc[i][j] = accumulate ? _mm512_loadu_ps(c + i * ldc + j * 16) : _mm512_setzero_ps();
    }
  }
  for (int64_t w = 0; w < words; ++w, a += mr, b += nv * 16) {
    prefetch<mr, nv>(a, b);
    __m512bh row[nv];
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) row[j] = (__m512bh)_mm512_loadu_si512(b + j * 16);
#pragma GCC unroll 16
    for (int i = 0; i < mr; ++i) {
      __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(a[i]));
#pragma GCC unroll 4
      for (int j = 0; j < nv; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x, row[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < mr; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) _mm512_storeu_ps(c + i * ldc + j * 16, acc[i][j]);
  }
}

template <int... width>
constexpr GemmKernel make_gemm_bf16(Indices<width...>) {
  return {MR, NR, 2, true, pack_bf16<MR>, pack_bf16<NR>, {nullptr, micro_bf16<width, NV>...}};
}
constexpr GemmKernel gemm_bf16 =
    make_gemm_bf16(Indices<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, MR>{});

// As store_tile; bf16 results of whole vectors are rounded in registers.
void store_tile_bf16(Dtype out_dtype, const SumTile& sums, const Epilogue& e, void* out,
                     int64_t ld) {
  if (out_dtype != Dtype::bf16 || sums.cols != NR) {
    return store_tile(out_dtype, sums, e, out, ld);
  }
  static_assert(NR == 32);
  Bf16* to = static_cast<Bf16*>(out);
  const float *sum = sums.data, *bias = e.bias;
  const Vec b_scale_inv[2] = {load(e.b_scale_inv), load(e.b_scale_inv + 16)};
  for (int64_t i = 0; i < sums.rows; ++i, sum += sums.ld, to += ld) {
    Vec a_scale_inv = broadcast(e.a_scale_inv[i]);
    Vec low = load(sum) * a_scale_inv * b_scale_inv[0];
    Vec high = load(sum + 16) * a_scale_inv * b_scale_inv[1];
    if (bias != nullptr) low += load(bias), high += load(bias + 16);
    Words32 rounded = in_bf16(low, high);
    __builtin_memcpy(to, &rounded, sizeof rounded);
  }
}
