// The hot loops of the CPU ops, one table of them per instruction set. Each loop runs on one thread
// over contiguous memory; the ops in csrc/cpu split the work into pieces and choose the table.
#pragma once

#include <cstdint>

#include "dispatch.h"

// What a formula is given is only named here: who includes this is not compiled again when a
// formula changes. Who calls a loop includes the header of its formula.
namespace mixprec {
enum class Activation : int32_t;
enum class BlockFormat : int32_t;
struct AdamW;
struct BlockCastRule;
struct CrossEntropyRow;
struct Lion;
struct MuonDirection;
struct Sgd;
struct Softcap;
struct TensorCore;
template <class Rule>
struct StepConstants;
}  // namespace mixprec

namespace mixprec::cpu {

template <int...>
struct Indices {};

// A GEMM micro-kernel and its packed layout. Operands are packed into panels of 4-byte words: one
// fp32 or a pair of bf16 (k, k + 1). A panel of `width` rows (of a) or columns (of b) is
// [words of k][width].
constexpr int kMaxRows = 32, kMaxCols = 32;  // of a panel of a, of b

struct GemmKernel {
  int64_t mr, nr;  // the largest width of a panel of a; the width of those of b
  int64_t k_per_word;
  int64_t word_step, row_step;  // of which the words and the rows of a panel of a are multiples
  int64_t words(int64_t k) const {
    int64_t step = k_per_word * word_step;
    return (k + step - 1) / step * word_step;
  }
  // The width of the panels of a block of a, which are as few as can be and alike.
  int64_t width_a(int64_t rows) const {
    int64_t panels = rows > mr ? (rows + mr - 1) / mr : 1, step = panels * row_step;
    return rows == 0 ? mr : (rows + step - 1) / step * row_step;
  }
  // Panels of `width` rows and `words` words of K, one after the other <- element (i, k) at
  // src[i * stride_i + k * stride_k], zeros beyond rows, k. Returns true if `micro` would not
  // multiply all elements exactly: bf16 pairs with a subnormal number.
  bool (*pack_a)(Dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                 int64_t k, uint32_t* out, int64_t words, int64_t width);
  bool (*pack_b)(Dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                 int64_t k, uint32_t* out, int64_t words, int64_t width);
  // c[rows][nr] (row stride ldc) = or += a_panel * b_panel over `words`, for each width of a panel.
  using Micro = void (*)(int64_t words, const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
                         bool accumulate);
  Micro micros[kMaxRows + 1];
  void micro(int64_t width, int64_t words, const uint32_t* a, const uint32_t* b, float* c,
             int64_t ldc, bool accumulate) const {
    micros[width](words, a, b, c, ldc, accumulate);
  }
};

// The same for products as a tensor core computes them, with two words for each of K
// (tensor_core_loops.h).
struct SimulatedKernel {
  int64_t mr, nr;
  decltype(GemmKernel::pack_a) pack_a, pack_b;
  // c = or += chained steps over `k`.
  void (*steps)(const TensorCore&, int64_t k, const uint32_t* a, const uint32_t* b, float* c,
                int64_t ldc, bool accumulate);
  const TensorCore* core = nullptr;  // of the op that multiplies

  int64_t words(int64_t k) const { return 2 * k; }
  int64_t width_a(int64_t /*rows*/) const { return mr; }
  void micro(int64_t /*width*/, int64_t words, const uint32_t* a, const uint32_t* b, float* c,
             int64_t ldc, bool accumulate) const {
    steps(*core, words / 2, a, b, c, ldc, accumulate);
  }
};

// A tile of a GEMM's fp32 sums.
struct SumTile {
  const float* data;  // row-major
  int64_t ld, rows, cols;
};

// What becomes of them: sum * a_scale_inv * b_scale_inv + bias.
struct Epilogue {
  const float* a_scale_inv;  // [rows]
  const float* b_scale_inv;  // [cols]
  const float* bias;         // [cols], or null
};

// One param and the arrays updated with it, all in one memory order.
struct StepArrays {
  Dtype param_dtype, grad_dtype, state_dtype[2];
  Dtype master_dtype;  // none; i16, i8: a remainder, beside a bf16 param
  bool stochastic;     // stochastic rounding of the param
  void* param;
  const void* grad;
  void* state[2];             // null where there is none; u8: of signed and of unsigned codes
  float* scale[2];            // of a state in u8, one per 256 elements
  void* master;               // null if there is none
  int64_t seed, step, index;  // of the random bits
};

// Elements [begin, end) of one param; begin is a multiple of 8.
template <class Rule>
using StepLoop = void (*)(const StepArrays&, int64_t begin, int64_t end, int variant,
                          const StepConstants<Rule>&);

// A tensor and its packed form.
struct PackArrays {
  Dtype dtype;
  int64_t bits;
  uint64_t seed, counter;
  const void* x;  // of pack
  void* y;        // of unpack
  bool streams;   // y is too large to stay in the caches
  uint8_t* codes;
  Bf16* ranges;  // minimum and step of each group
};

struct RowStatistics {
  float mean, rstd;
};

// What the rows of a call of norm_backward share.
struct NormGrads {
  Dtype dtype, g_dtype, total_dtype;
  const float* weight;  // [n]
  bool subtract_mean;
  int64_t n;
};

constexpr int64_t kTileSide =
    96;  // queries or keys of a tile: a multiple of every micro-kernel's sizes
// Row strides are an odd number of cache lines, so that a column of a tile lies in many cache sets.
constexpr int64_t kTileLd = 112;
constexpr int64_t odd_lines(int64_t words) { return (words + 15) / 16 * 16 | 16; }

// Where the tile crosses the diagonal, row i sees column j only if j <= i + shift. masked: scores
// that a mask hides are -inf.
struct TileShape {
  int64_t rows, keys;
  bool causal;
  int64_t shift;
  bool masked = false;

  int64_t seen(int64_t row) const {
    int64_t all = row + shift + 1;
    return causal && all < keys ? all : keys;
  }
};

// How a causal tile restricts a product: only the columns that a row sees; only the words (keys)
// that a row sees; only the words (queries) that see a row (key).
enum class Seen { all, columns, until, from };

// c = a b * alpha, or c * factor[row] + a b * alpha. A word is an fp32 number, or two bf16 numbers
// adjacent along the sum. a: (row, word) at a[row * lda + word], or transposed. b: (word, col) at
// b[word * ldb + col]. Rows and columns are computed up to multiples of the micro-kernel's sizes:
// there must be memory.
struct TileProduct {
  int64_t rows, cols, words;
  const uint32_t* a;
  int64_t lda;
  bool transposed;
  const uint32_t* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  const float* factor;
  float alpha;
  Seen seen;
  int64_t shift;
  bool chained = false;  // c += each term in turn, whatever tile it is of; alpha and factor: none
};

struct AttentionKernel {
  int64_t pair;  // numbers in a word
  // out[row][ld] <- words along each row of src [rows][d], rows `stride` elements apart; zeros up
  // to `padded` rows and to a multiple of 16 words.
  void (*pack)(Dtype, const void* src, int64_t stride, int64_t rows, int64_t d, uint32_t* out,
               int64_t ld, int64_t padded);
  // The same with words of adjacent rows: out[row / pair][ld].
  void (*pack_by_rows)(Dtype, const void* src, int64_t stride, int64_t rows, int64_t d,
                       uint32_t* out, int64_t ld, int64_t padded);
  // out[word][kTileLd] <- in[row][ld] of kTileSide rows.
  void (*transpose)(const uint32_t* in, int64_t ld, int64_t words, uint32_t* out);
  void (*product)(const TileProduct&);
  // scores[row][kTileLd] <- -inf where `mask`, of rows `stride` elements apart, is 0 (u8); else, of
  // fp32, bf16 and fp16, -inf where it is at most `least`, and score + mask. Where lowest[row], if
  // not null, is set: 0, and -inf where the mask is.
  void (*mask_scores)(Dtype, const void* mask, int64_t stride, float least, const uint8_t* lowest,
                      const TileShape&, float* scores);
  // Scores [kTileSide][kTileLd] to weights, in words along the rows: in place for pair = 1. Updates
  // the maximum and the sum of each row; factor: of what was summed with the old maximum.
  void (*softmax)(const TileShape&, float* scores, float* maximum, float* sum, float* factor,
                  uint32_t* weights);
  // Scores to weights and weight_grads to the gradients of the scores: in place for pair = 1, else
  // in words: of adjacent rows (weights_t, grads_t) and along the rows (grads). carried: by how
  // much the rounded weights of each key add up to too little so far; read and written for pair
  // = 2.
  void (*softmax_backward)(const TileShape&, float* scores, float* weight_grads,
                           const float* logsumexp, const float* shared, float scale, float* carried,
                           uint32_t* weights_t, uint32_t* grads, uint32_t* grads_t);
  // out[row] += sum of x * y of kTileSide rows, both as `transpose` left them: the bits of that
  // element of a product of the two.
  void (*row_dots)(const uint32_t* x, const uint32_t* y, int64_t words, float* out);
  // out[row] <- x[row][ld] * factor[row]; null: 1. remainder: null, or what rounding has cut off,
  // in rows `stride` elements apart.
  void (*store_rows)(Dtype, const float* x, int64_t ld, const float* factor, int64_t rows,
                     int64_t d, void* out, int64_t stride, Bf16* remainder);
};

// Of one position and each pair of features, `step` apart; sign: of both sines.
struct RotaryFactors {
  const float *cos1, *cos2, *sin1, *sin2;
  int64_t step;
  float sign;
};

struct Loops {
  const char* isa;
  // max |x| as fp32 bits without the sign: NaN > Inf > finite.
  uint32_t (*amax)(Dtype x_dtype, const void* x, int64_t n);
  // q <- cast(x * scale); returns the amax of x as above.
  uint32_t (*quantize)(Dtype x_dtype, Dtype q_dtype, const void* x, float scale, void* q,
                       int64_t n);
  // The same for `rows` x `cols` of x (row stride ld in x and q), also into q_t (row stride ld_t),
  // q_t pointing at column `first row` of the transpose. At most 64 rows.
  uint32_t (*quantize_transpose)(Dtype x_dtype, Dtype q_dtype, const void* x, float scale, void* q,
                                 void* q_t, int64_t rows, int64_t cols, int64_t ld, int64_t ld_t);
  // largest[c] <- max(largest[c], |x| of column c), as bits, over rows x cols of x (row stride ld).
  void (*amax_columns)(Dtype x_dtype, const void* x, int64_t rows, int64_t cols, int64_t ld,
                       uint32_t* largest);
  // q_t alone, of at most 64 rows and 128 columns of x, column c with scale[c]; known_finite: x is.
  void (*quantize_columns)(Dtype x_dtype, Dtype q_dtype, const void* x, const float* scale,
                           void* q_t, int64_t rows, int64_t cols, int64_t ld, int64_t ld_t,
                           bool known_finite);
  void (*dequantize)(Dtype q_dtype, Dtype out_dtype, const void* q, float scale_inv, void* out,
                     int64_t n);
  // y = act(x) [* up], up being null without.
  void (*act)(Activation, Dtype, const void* x, const void* up, float* y, int64_t n);
  // dx = (g [* up]) * act'(x) and, with up, dup = g * act(x).
  void (*act_backward)(Activation, Dtype g_dtype, Dtype, const void* g, const void* x,
                       const void* up, float* dx, float* dup, int64_t n);
  // x in fp32: x itself, or the buffer with its n values.
  const float* (*wide_row)(Dtype, const void* x, float* buffer, int64_t n);
  // total = x + residual, rounded; wide: total in fp32.
  void (*add_residual)(Dtype, const void* x, const void* residual, void* total, float* wide,
                       int64_t n);
  // Of a row of n elements; a mean of 0 without subtract_mean.
  RowStatistics (*row_statistics)(const float* x, int64_t n, float eps, bool subtract_mean);
  void (*normalize)(const float* x, RowStatistics, const float* weight, const float* bias, float* y,
                    int64_t n);
  // dx of a row; dweight += g * xhat, dbias += g. g_total, dbias: or null. buffer: 4 rows.
  void (*norm_backward_row)(const NormGrads&, const void* g, const void* x, const void* g_total,
                            RowStatistics, void* dx, float* dweight, float* dbias, float* buffer);
  // Elements [begin, end); begin is a multiple of 128, end too or the number of elements.
  void (*pack)(const PackArrays&, int64_t begin, int64_t end);
  void (*unpack)(const PackArrays&, int64_t begin, int64_t end);
  // The codes and the scales of n elements of a row, from the start of a block on; element: the
  // index of the first one in whole blocks, for its random bits. Returns the amax as above.
  uint32_t (*quantize_mx)(Dtype x_dtype, const BlockCastRule&, const void* x, int64_t n,
                          int64_t element, uint8_t* q, uint8_t* scale_inv);
  // The same of the transpose of at most 128 rows (from the start of a block on) and 128 columns of
  // x (row stride ld); in rows of the transpose with these strides, also of their elements.
  void (*quantize_mx_columns)(Dtype x_dtype, const BlockCastRule&, const void* x, int64_t ld,
                              int64_t rows, int64_t cols, int64_t element, int64_t ld_element,
                              uint8_t* q_t, int64_t ld_q, uint8_t* scale_inv_t, int64_t ld_scale);
  // n elements of a row from the start of a block on. tensor_scale_inv: null, or one number.
  void (*dequantize_mx)(BlockFormat, Dtype out_dtype, const uint8_t* q, const uint8_t* scale_inv,
                        const float* tensor_scale_inv, void* out, int64_t n);
  // g <- g * inv_scale; true if a value is not finite before or after. counts: null, or how many
  // are of each of the four GradKinds.
  bool (*unscale)(Dtype, void* g, float inv_scale, int64_t n, uint32_t* counts);
  // The sum of (g * inv_scale)^2 in fp64, in an order that depends only on n; the rest as above.
  bool (*grad_stats)(Dtype, const void* g, float inv_scale, int64_t n, double* sum_sq,
                     uint32_t* counts);
  StepLoop<AdamW> adamw;
  StepLoop<Sgd> sgd;
  StepLoop<Lion> lion;
  StepLoop<MuonDirection> muon_direction;
  // out (row stride ld) <- the epilogue of a tile of sums
  void (*store_tile)(Dtype out_dtype, const SumTile&, const Epilogue&, void* out, int64_t ld);
  // out[i * stride_i + j * stride_j] += sums * scales
  void (*accumulate_tile)(const SumTile&, const Epilogue&, float* out, int64_t stride_i,
                          int64_t stride_j);
  GemmKernel gemm_f32;   // any operand format, decoded to fp32
  GemmKernel gemm_bf16;  // bf16 and fp8 operands as exact bf16 pairs; gemm_f32 if not supported
  AttentionKernel attention_f32;   // operands decoded to fp32
  AttentionKernel attention_bf16;  // bf16 operands; attention_f32 if not supported
  // y <- the row x of d features rotated by the angles of its position
  void (*rotary)(Dtype, bool interleaved, const void* x, const RotaryFactors&, void* y, int64_t d);
  // Of n logits of a row: its statistics with those before (see mixprec/ops/cross_entropy.py), and
  // the gradients; target: the column of its target, if that is in [0, n).
  void (*cross_entropy)(const float* logits, int64_t n, int64_t target, Softcap, float* row);
  void (*cross_entropy_backward)(const float* logits, int64_t n, int64_t target, float label,
                                 const CrossEntropyRow&, Softcap, Dtype, void* g);
  SimulatedKernel simulated;
};

// The table of each level.
namespace base {
extern const Loops table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Loops table;
}
namespace avx512 {
extern const Loops table, table_bf16, table_amx, table_amx_model;
}
#endif

// The table for this processor, or for the level that MIXPREC_ISA names.
const Loops& loops();

}  // namespace mixprec::cpu
