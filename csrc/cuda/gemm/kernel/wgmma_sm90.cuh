// wgmma: d [64, n] += a [64, k] @ b [k, n] by the 128 threads of a warpgroup, both operands in
// shared memory, given by descriptors. k is 32 bytes of elements.
#pragma once

#include "cuda/gemm/config/tile_configs.h"
#include "cuda/gemm/kernel/ptx_sm90.cuh"
#include "math/convert.h"

namespace mixprec::cuda::sm90 {

// d in thread t of the warpgroup: d[4 * j + 2 * h + e] is row 16 * (t / 32) + 8 * h + t % 32 / 4,
// column 8 * j + 2 * (t % 4) + e. accumulate = false: d is overwritten.
template <class A, class B, int n, Major a_major, Major b_major>
struct Wgmma;

// An asm statement is a literal that lists all operands, so a template cannot generate it.
#define MIXPREC_D8(d, i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define MIXPREC_D32(d, i) \
  MIXPREC_D8(d, i), MIXPREC_D8(d, i + 8), MIXPREC_D8(d, i + 16), MIXPREC_D8(d, i + 24)
#define MIXPREC_D64(d) MIXPREC_D32(d, 0)
#define MIXPREC_D128(d) MIXPREC_D32(d, 0), MIXPREC_D32(d, 32)
#define MIXPREC_D192(d) MIXPREC_D128(d), MIXPREC_D32(d, 64)
#define MIXPREC_D256(d) MIXPREC_D192(d), MIXPREC_D32(d, 96)
#define MIXPREC_R64                                                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define MIXPREC_R128                                                              \
  MIXPREC_R64                                                                     \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50," \
  "%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MIXPREC_R192                                                              \
  MIXPREC_R128                                                                    \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82," \
  "%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define MIXPREC_R256                                                                   \
  MIXPREC_R192                                                                         \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
  "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MIXPREC_WGMMA_16(n, type, name, a, b, c, p, q)                                    \
  template <Major a_major, Major b_major>                                                 \
  struct Wgmma<type, type, n, a_major, b_major> {                                         \
    static __device__ __forceinline__ void run(float (&d)[n / 2], uint64_t desc_a,        \
                                               uint64_t desc_b, bool accumulate) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                \
                   ", 0;\n"                                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name "." name        \
                   " {" MIXPREC_R##n "}, %" #a ", %" #b ", p, 1, 1, %" #p ", %" #q ";\n}" \
                   : MIXPREC_D##n(d)                                                      \
                   : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)),         \
                     "n"(a_major == Major::mn), "n"(b_major == Major::mn));               \
    }                                                                                     \
  };
#define MIXPREC_WGMMA_8(n, type_a, type_b, names, a, b, c)                                   \
  template <>                                                                                \
  struct Wgmma<type_a, type_b, n, Major::k, Major::k> {                                      \
    static __device__ __forceinline__ void run(float (&d)[n / 2], uint64_t desc_a,           \
                                               uint64_t desc_b, bool accumulate) {           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                   \
                   ", 0;\n"                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." names " {" MIXPREC_R##n \
                   "}, %" #a ", %" #b ", p, 1, 1;\n}"                                        \
                   : MIXPREC_D##n(d)                                                         \
                   : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)));           \
    }                                                                                        \
  };
#define MIXPREC_WGMMA(n, a, b, c, p, q)                \
  MIXPREC_WGMMA_16(n, Bf16, "bf16", a, b, c, p, q)     \
  MIXPREC_WGMMA_16(n, Fp16, "f16", a, b, c, p, q)      \
  MIXPREC_WGMMA_8(n, E4m3, E4m3, "e4m3.e4m3", a, b, c) \
  MIXPREC_WGMMA_8(n, E4m3, E5m2, "e4m3.e5m2", a, b, c) \
  MIXPREC_WGMMA_8(n, E5m2, E4m3, "e5m2.e4m3", a, b, c) \
  MIXPREC_WGMMA_8(n, E5m2, E5m2, "e5m2.e5m2", a, b, c)

MIXPREC_WGMMA(64, 32, 33, 34, 35, 36)
MIXPREC_WGMMA(128, 64, 65, 66, 67, 68)
MIXPREC_WGMMA(192, 96, 97, 98, 99, 100)
MIXPREC_WGMMA(256, 128, 129, 130, 131, 132)

#undef MIXPREC_WGMMA
#undef MIXPREC_WGMMA_8
#undef MIXPREC_WGMMA_16
#undef MIXPREC_R256
#undef MIXPREC_R192
#undef MIXPREC_R128
#undef MIXPREC_R64
#undef MIXPREC_D256
#undef MIXPREC_D192
#undef MIXPREC_D128
#undef MIXPREC_D64
#undef MIXPREC_D32
#undef MIXPREC_D8

}  // namespace mixprec::cuda::sm90
