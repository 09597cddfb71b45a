// 8 numbers as words of fp32, for gemm_loops.h; those of fp16 and fp8 by the conversion of fp16
// that processors with AVX2 have, fp8 numbers made fp16 first. NaN is any NaN. Included by
// loops_avx2.cpp and loops_avx512.cpp before all loops: a call sees what stands before it.

template <class T>
inline void decode_8(const T* __restrict x, uint32_t* __restrict out) {
  for (int i = 0; i < 8; ++i) out[i] = float_bits(decode(x[i]));
}

inline void decode_halves(__m128i halves, float by, uint32_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      (__m256i)(_mm256_cvtph_ps(halves) * _mm256_set1_ps(by)));
}

inline void decode_8(const Fp16* x, uint32_t* out) {
  decode_halves(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)), 1.0f, out);
}

// E5M2 is the high byte of fp16.
inline void decode_8(const E5m2* x, uint32_t* out) {
  __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
  decode_halves(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8), 1.0f, out);
}

// E4M3 has a bit less of exponent than fp16, whose numbers with these bits are 2^8 times smaller.
inline void decode_8(const E4m3* x, uint32_t* out) {
  __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi16(0x7F));
  __m128i sign = _mm_slli_epi16(_mm_andnot_si128(_mm_set1_epi16(0x7F), codes), 8);
  __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F));
  __m128i halves = _mm_or_si128(_mm_slli_epi16(magnitude, 7), sign);
  halves = _mm_or_si128(halves, _mm_and_si128(is_nan, _mm_set1_epi16(0x7E00)));
  decode_halves(halves, 256.0f, out);
}
