// The softmax of attention with words of one fp32 number, and the table of its loops. Included
// after attention_loops.h.

constexpr int kSide = 32 / kLanes < 4 ? 32 / kLanes : 4;  // vectors at a time

// x <- e^(scores - shift)
inline void shifted_exponentials(const float* scores, Vec shift, Vec (&x)[kSide]) {
#pragma GCC unroll 4
  for (int j = 0; j < kSide; ++j) x[j] = load(scores + j * kLanes) - shift;
  exponentials(x);
}

void softmax(const TileShape& tile, float* scores, float* maximum, float* sum, float* factor,
             uint32_t*) {
  float shift[kTileSide];
  subtrahends(tile, scores, maximum, factor, shift);
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* row = scores + r * kTileLd;
    int64_t padded = (tile.seen(r) + 31) / 32 * 32;
    const Vec of_row = broadcast(shift[r]);
    Vec total = {};
    for (int64_t i = 0; i < padded; i += kSide * kLanes) {
      Vec x[kSide];
      shifted_exponentials(row + i, of_row, x);
#pragma GCC unroll 4
      for (int j = 0; j < kSide; ++j) {
        store(row + i + j * kLanes, x[j]);
        total = total + x[j];
      }
    }
    for (int64_t i = padded; i < kTileSide; ++i) row[i] = 0.0f;
    sum[r] = sum[r] * factor[r] + total_of(total);
  }
}

void softmax_backward(const TileShape& tile, float* scores, float* of_weights,
                      const float* logsumexp, const float* shared, float scale, float*, uint32_t*,
                      uint32_t*, uint32_t*) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float *weight = scores + r * kTileLd, *grad = of_weights + r * kTileLd;
    int64_t seen = tile.seen(r);
    const Vec lse = broadcast(logsumexp[r]), of_row = broadcast(shared[r]), by = broadcast(scale);
    for (int64_t i = 0; i < seen; i += kSide * kLanes) {
      Vec x[kSide];
      shifted_exponentials(weight + i, lse, x);
#pragma GCC unroll 4
      for (int j = 0; j < kSide; ++j) {
        int64_t at = i + j * kLanes;
        store(weight + at, x[j]);
        store(grad + at, x[j] * (load(grad + at) - of_row) * by);
      }
    }
    for (int64_t i = seen; i < kTileSide; ++i) weight[i] = grad[i] = 0.0f;
  }
}

constexpr AttentionKernel attention_kernel{
    kPair, pack, pack_by_rows, transpose, product, softmax, softmax_backward, row_dots, store_rows,
};
