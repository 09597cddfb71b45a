// Iterates over rows and blocks; the loops within a block are in quantize_loops.h.
#include "cpu/quantize_blocks.h"

#include "cpu/simd/loops.h"
#include "math/scale.h"

namespace mixprec::cpu {

namespace {

constexpr int64_t kHalf = 64;  // rows per call of the loops with a transpose

int64_t blocks_in(int64_t n) { return (n + kBlock - 1) / kBlock; }

float scale_of(const BlockCast& c, uint32_t amax) {
  return scale_from_amax(bits_float(amax), format_max(c.to), 1.0f, c.power_of_two, 1.0f);
}

// f(band) for bands of 128 rows or columns on all threads.
template <class F>
void for_bands(int64_t length, int64_t breadth, const F& f) {
  int64_t grain = std::max<int64_t>(1, kPiece / (kBlock * std::max<int64_t>(1, breadth)));
  torch::stable::parallel_for(0, blocks_in(length), grain, [&](int64_t first, int64_t last) {
    for (int64_t band = first; band < last; ++band) f(band);
  });
}

// Each row in pieces of `width` elements, each with its own scale.
uint32_t by_rows(const BlockCast& c, int64_t width, void* q, float* scale_inv) {
  std::atomic<uint32_t> largest{0};
  // An empty row still has a scale.
  int64_t across = width == c.cols ? 1 : (c.cols + width - 1) / width;
  for_bands(c.rows, c.cols, [&](int64_t band) {
    uint32_t most = 0;
    for (int64_t r = band * kBlock; r < std::min(c.rows, (band + 1) * kBlock); ++r) {
      for (int64_t piece = 0; piece < across; ++piece) {
        int64_t i = r * c.cols + piece * width, n = std::min(width, c.cols - piece * width);
        uint32_t amax = loops().amax(c.from, at(c.x, c.from, i), n);
        float scale = scale_of(c, amax);
        loops().quantize(c.from, c.to, at(c.x, c.from, i), scale, at(q, c.to, i), n);
        scale_inv[r * across + piece] = 1.0f / scale;
        most = std::max(most, amax);
      }
    }
    raise_to(largest, most);
  });
  return largest;
}

uint32_t by_squares(const BlockCast& c, void* q, float* scale_inv, void* q_t, float* scale_inv_t) {
  std::atomic<uint32_t> largest{0};
  int64_t down = blocks_in(c.rows), across = blocks_in(c.cols);
  for_bands(c.rows, c.cols, [&](int64_t band) {
    uint32_t most = 0;
    int64_t row = band * kBlock, height = std::min(kBlock, c.rows - row);
    for (int64_t b = 0; b < across; ++b) {
      int64_t col = b * kBlock, n = std::min(kBlock, c.cols - col);
      uint32_t columns[kBlock] = {}, amax = 0;
      loops().amax_columns(c.from, at(c.x, c.from, row * c.cols + col), height, n, c.cols, columns);
      for (uint32_t u : columns) amax = std::max(amax, u);
      float scale = scale_of(c, amax);
      scale_inv[band * across + b] = 1.0f / scale;
      if (c.transpose) scale_inv_t[b * down + band] = 1.0f / scale;
      int64_t step = c.transpose ? kHalf : 1;
      for (int64_t r = row; r < row + height; r += step) {
        int64_t i = r * c.cols + col;
        if (c.transpose) {
          loops().quantize_transpose(c.from, c.to, at(c.x, c.from, i), scale, at(q, c.to, i),
                                     at(q_t, c.to, col * c.rows + r),
                                     std::min(kHalf, row + height - r), n, c.cols, c.rows);
        } else {
          loops().quantize(c.from, c.to, at(c.x, c.from, i), scale, at(q, c.to, i), n);
        }
      }
      most = std::max(most, amax);
    }
    raise_to(largest, most);
  });
  return largest;
}

// q_t of x's rows [row, row + height) and columns [col, col + n), with one scale per column from
// its amax. The inverse scales go to scale_inv_t[i * step].
void cast_columns(const BlockCast& c, const uint32_t* amax, void* q_t, float* scale_inv_t,
                  int64_t step, int64_t row, int64_t height, int64_t col, int64_t n) {
  float scale[kBlock];
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    scale[i] = scale_of(c, amax[i]);
    scale_inv_t[i * step] = 1.0f / scale[i];
    most = std::max(most, amax[i]);
  }
  for (int64_t r = row; r < row + height; r += kHalf) {
    loops().quantize_columns(c.from, c.to, at(c.x, c.from, r * c.cols + col), scale,
                             at(q_t, c.to, col * c.rows + r), std::min(kHalf, row + height - r), n,
                             c.cols, c.rows, !is_nonfinite_bits(most));
  }
}

// x^T with a scale per row, which is a column of x.
void by_columns(const BlockCast& c, void* q_t, float* scale_inv_t) {
  for_bands(c.cols, c.rows, [&](int64_t band) {
    int64_t col = band * kBlock, n = std::min(kBlock, c.cols - col);
    uint32_t amax[kBlock] = {};
    loops().amax_columns(c.from, at(c.x, c.from, col), c.rows, n, c.cols, amax);
    cast_columns(c, amax, q_t, scale_inv_t + col, 1, 0, c.rows, col, n);
  });
}

// x^T with a scale per 128 elements of a row, which are 128 rows of one column of x. Processed down
// the columns, so that each row of q_t is written from left to right.
void by_column_pieces(const BlockCast& c, void* q_t, float* scale_inv_t) {
  int64_t down = blocks_in(c.rows);
  for_bands(c.cols, c.rows, [&](int64_t band) {
    int64_t col = band * kBlock, n = std::min(kBlock, c.cols - col);
    for (int64_t b = 0; b < down; ++b) {
      int64_t row = b * kBlock, height = std::min(kBlock, c.rows - row);
      uint32_t amax[kBlock] = {};
      loops().amax_columns(c.from, at(c.x, c.from, row * c.cols + col), height, n, c.cols, amax);
      cast_columns(c, amax, q_t, scale_inv_t + col * down + b, down, row, height, col, n);
    }
  });
}

}  // namespace

uint32_t quantize_by_blocks(const BlockCast& cast, const Blocks& blocks, void* q, float* scale_inv,
                            void* q_t, float* scale_inv_t) {
  if (blocks.rows == kBlock) return by_squares(cast, q, scale_inv, q_t, scale_inv_t);
  bool whole = blocks.cols == 0;
  if (cast.transpose && whole) by_columns(cast, q_t, scale_inv_t);
  if (cast.transpose && !whole) by_column_pieces(cast, q_t, scale_inv_t);
  return by_rows(cast, whole ? cast.cols : kBlock, q, scale_inv);
}

}  // namespace mixprec::cpu
