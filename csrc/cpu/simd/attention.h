// The loops of attention: products and softmax of tiles of queries x keys. One table of them per
// instruction set.
#pragma once

#include <cstdint>

#include "dispatch.h"

namespace mixprec::cpu {

constexpr int64_t kTileSide =
    96;  // queries or keys of a tile: a multiple of every micro-kernel's sizes
// Row strides are an odd number of cache lines, so that a column of a tile lies in many cache sets.
constexpr int64_t kTileLd = 112;
constexpr int64_t odd_lines(int64_t words) { return (words + 15) / 16 * 16 | 16; }

// Where the tile crosses the diagonal, row i sees column j only if j <= i + shift.
struct TileShape {
  int64_t rows, keys;
  bool causal;
  int64_t shift;

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
  // Scores [kTileSide][kTileLd] to weights, in words along the rows: in place for pair = 1. Updates
  // the maximum and the sum of each row; factor: of what was summed with the old maximum.
  void (*softmax)(const TileShape&, float* scores, float* maximum, float* sum, float* factor,
                  uint32_t* weights);
  // Scores to weights and of_weights to the gradients of the scores: in place for pair = 1, else
  // in words: of adjacent rows (weights_t, grads_t) and along the rows (grads). carried: by how
  // much the rounded weights of each key add up to too little so far; read and written for pair
  // = 2.
  void (*softmax_backward)(const TileShape&, float* scores, float* of_weights,
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

}  // namespace mixprec::cpu
