// All loops, each after those it uses, and their table. Included once per instruction set, which
// defines Vec, its operations, Registers and the sizes of tiles.
constexpr int kLanes = sizeof(Vec) / sizeof(float);
typedef int32_t Ints __attribute__((vector_size(sizeof(Vec))));
typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));

// clang-format off: the order is this one
#include "gemm_loops.h"
#include "quantize_loops.h"
#include "pack_loops.h"
#include "step_loops.h"
#include "activation_loops.h"
#include "cross_entropy_loops.h"
#include "norm_loops.h"
#include "grad_loops.h"
#include "tensor_core_loops.h"
#include "tensor_core_block_loops.h"
#include "dequantize_mx_loops.h"
#include "quantize_mx_codes.h"
#include "quantize_mx_loops.h"
// clang-format on

namespace f32_words {
constexpr int kPair = 1;
inline Vec multiply_add(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
inline void store_numbers(uint32_t* words, const Vec* x, int count) {
#pragma GCC unroll 4
  for (int j = 0; j < count; ++j) store(reinterpret_cast<float*>(words) + j * kLanes, x[j]);
}
#include "product_loops.h"

constexpr AttentionKernel attention_kernel{
    kPair,       pack,    pack_by_rows,     transpose, product,
    mask_scores, softmax, softmax_backward, row_dots,  store_rows,
};
}  // namespace f32_words

constexpr GemmKernel make_gemm_f32() {
  GemmKernel kernel{MR, NR, 1, 1, MR, pack<MR>, pack<NR>, {}};
  kernel.micros[MR] = f32_words::panel_micro<MR, NV>;
  return kernel;
}
constexpr GemmKernel gemm_f32 = make_gemm_f32();

// gemm: the kernel for bf16 and fp8 operands. attention: that for bf16 operands.
constexpr Loops make_table(const char* isa, GemmKernel gemm, decltype(Loops::store_tile) store,
                           AttentionKernel attention) {
  return {
      .isa = isa,
      .amax = amax,
      .quantize = quantize,
      .quantize_transpose = quantize_transpose,
      .amax_columns = amax_columns,
      .quantize_columns = quantize_columns,
      .dequantize = dequantize,
      .act = act,
      .act_backward = act_backward,
      .wide_row = wide_row,
      .add_residual = add_residual,
      .row_statistics = row_statistics,
      .normalize = normalize,
      .norm_backward_row = norm_backward_row,
      .pack = pack,
      .unpack = unpack,
      .quantize_mx = quantize_mx,
      .quantize_mx_columns = quantize_mx_columns,
      .dequantize_mx = dequantize_mx<Registers>,
      .unscale = unscale,
      .grad_stats = grad_stats,
      .adamw = step_loop<AdamW>,
      .sgd = step_loop<Sgd>,
      .lion = step_loop<Lion>,
      .muon_direction = step_loop<MuonDirection>,
      .store_tile = store,
      .accumulate_tile = accumulate_tile,
      .gemm_f32 = gemm_f32,
      .gemm_bf16 = gemm,
      .attention_f32 = f32_words::attention_kernel,
      .attention_bf16 = attention,
      .rotary = rotary,
      .cross_entropy = cross_entropy,
      .cross_entropy_backward = cross_entropy_backward,
      .simulated = simulated,
  };
}
