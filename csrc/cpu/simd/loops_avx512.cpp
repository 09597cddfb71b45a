// The loops for AVX-512 (F, BW, DQ, VL), and for AVX512-BF16 with VBMI, which only gemm and
// attention use. As in loops_avx2.cpp, std is not used.
#include "formulas.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2,prefer-vector-width=512")

namespace mixprec::cpu::avx512 {
namespace {

typedef __m512 Vec;
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
constexpr int MR = 14, NV = 2, NR = 32, kAttentionRows = 12;

typedef Indices<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> LaneIndices;

// Philox: counters side by side, the low halves' product, and how two vectors are interleaved.
typedef uint64_t Lanes __attribute__((vector_size(64)));
inline Lanes product(Lanes a, uint32_t b) {
  // The form without a mask warns of an uninitialized value (GCC 12).
  return (Lanes)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, _mm512_set1_epi64(b));
}
constexpr Lanes kIota = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr Lanes kFirstPairs = {0, 8, 1, 9, 2, 10, 3, 11}, kLastPairs = {4, 12, 5, 13, 6, 14, 7, 15};

// Vectors of 32 words, which are permuted as one. By intrinsics: GCC 12 widens and narrows halves.
// The forms without a mask warn, as above.
struct Registers {
  static constexpr bool of_32_words = true;
  static Words32 widen(Bytes32 x) { return (Words32)_mm512_maskz_cvtepu8_epi16(~0u, (__m256i)x); }
  static Uints16 widen(Bytes16 x) {
    return (Uints16)_mm512_maskz_cvtepu8_epi32(0xFFFF, (__m128i)x);
  }
  static Uints16 widen(Words16 x) {
    return (Uints16)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)x);
  }
  static Words16 narrow(Uints16 x) {
    return (Words16)_mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)x);
  }
  static Bytes32 narrow_bytes(Words32 x) {
    return (Bytes32)_mm512_maskz_cvtepi16_epi8(~0u, (__m512i)x);
  }
  static Bytes16 narrow_bytes(Uints16 x) {
    return (Bytes16)_mm512_maskz_cvtepi32_epi8(0xFFFF, (__m512i)x);
  }
  // The high halves of a and b, with the last bit set if any in the low half is.
  static Words32 cut(Uints16 a, Uints16 b) {
    constexpr Words32 even = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                              32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    Words32 low = __builtin_shuffle((Words32)a, (Words32)b, even);
    return __builtin_shuffle((Words32)a, (Words32)b, even + 1) | (low < 1 ? low : 1);
  }
  static Words32 lower(Words16 x) { return (Words32)_mm512_castsi256_si512((__m256i)x); }
  static Words32 look_up(Words32 table, Words32 index) {  // by the low 5 bits
    return (Words32)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)index, (__m512i)table);
  }
  static Vec look_up(Vec table, Uints16 index) {  // by the low 4 bits
    return _mm512_maskz_permutexvar_ps(0xFFFF, (__m512i)index, table);
  }
};

// clang-format off: the order is this one
#include "decode_f16c.h"
#include "all_loops.h"
// clang-format on

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512vbmi")

#include "gemm_bf16_loops.h"

namespace bf16_words {
constexpr int kPair = 2;
inline Vec multiply_add(Vec acc, Vec a, Vec b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
inline void store_numbers(uint32_t* words, const Vec* x, int) {
  store_words(words, in_bf16(x[0], x[1]));
}
#include "product_loops.h"
// Uses the one above.
#include "attention_bf16_loops.h"
}  // namespace bf16_words

template <int... width>
constexpr GemmKernel make_gemm_bf16(Indices<width...>) {
  return {MR,
          NR,
          2,
          1,
          1,
          pack_bf16<MR>,
          pack_bf16<NR>,
          {nullptr, bf16_words::panel_micro<width, NV>...}};
}
constexpr GemmKernel gemm_bf16 =
    make_gemm_bf16(Indices<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, MR>{});

#include "amx_tiles.h"
#include "gemm_amx_loops.h"

#pragma GCC pop_options

}  // namespace

constinit const Loops table =
    make_table("avx512", gemm_f32, store_tile, f32_words::attention_kernel);
constinit const Loops table_bf16 =
    make_table("avx512_bf16", gemm_bf16, store_tile_bf16, bf16_words::attention_kernel);
constinit const Loops table_amx =
    make_table("amx", make_gemm_amx<AmxTiles>(), store_tile_bf16, f32_words::attention_kernel);
constinit const Loops table_amx_model = make_table("amx_model", make_gemm_amx<AmxModel>(),
                                                   store_tile_bf16, f32_words::attention_kernel);

}  // namespace mixprec::cpu::avx512
#endif
