// quantize in tiles of 128 x 128 with a scale per row, column or tile: a tile is read once and kept
// in registers until the scales are known; it then gives q and q^T.
#pragma once

#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/transpose.cuh"
#include "math/scale.h"

namespace mixprec::cuda {

constexpr int kTile = 128;

// A thread's part of a tile: n columns from `col` on, of the rows row, row + kStep, ...
template <class Source>
struct HeldTile {
  static constexpr int n = Source::kRun, kLanes = kTile / n;  // threads per row
  static constexpr int kStep = kThreads / kLanes, kRounds = kTile / kStep;

  typename Source::Element at[kRounds][n];
  int row = threadIdx.x / kLanes, col = threadIdx.x % kLanes * n;

  __device__ __forceinline__ void load(const TileAt& tile, const Source& source, bool vectors) {
    if constexpr (Source::kFused) {  // the code of a load is long: once, and the rows move up
#pragma unroll 1
      for (int i = 0; i < kRounds; ++i) {
#pragma unroll
        for (int k = 0; k < (kRounds - 1) * n; ++k) at[k / n][k % n] = at[k / n + 1][k % n];
        tile.load(source, row + i * kStep, col, at[kRounds - 1], vectors);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) tile.load(source, row + i * kStep, col, at[i], vectors);
    }
  }

  // The value of row + i * kStep, the same for all threads that hold a part of it.
  __device__ __forceinline__ uint32_t row_max(int i) const {
    return warp_reduce<Max>(largest_of(at[i], 0u), kLanes);
  }

  // maxima [kTile] in shared memory, initially zero
  __device__ __forceinline__ void raise_column_maxima(uint32_t* maxima) const {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        largest = Max::apply(largest, magnitude_bits(to_float(at[i][j])));
      }
      atomicMax(&maxima[col + j], largest);
    }
  }

  // tile <- cast(x * scale(i, j)) for element j of round i
  template <class Q, class Scale>
  __device__ __forceinline__ void encode(QuantizeTile<Q>& tile, const Scale& scale) const {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      Q rounded[n];
      encode_run(at[i], rounded, [&](int j) { return scale(i, j); });
      store(&tile.at[tile.offset(row + i * kStep, col)], rounded);
    }
  }
};

enum class TileScales {
  known,    // of rows and columns, in row_scale and col_scale
  lines,    // one for each row of the tile, and each column for q^T
  squares,  // one for the tile
};

struct TilesOut {
  void *q, *q_t;                   // q_t: null without transpose
  const float* row_scale;          // [rows]
  const float* col_scale;          // [cols]
  float *scale_inv, *scale_inv_t;  // [rows or tiles down, tiles across], [cols or ..., tiles down]
  float fmt_max;
  bool power_of_two;
  uint32_t* partials;  // [gridDim.x]
};

template <class Source, class Q, TileScales scales>
__global__ void __launch_bounds__(kThreads, scales == TileScales::squares ? 2 : 1)
    quantize_tiles_kernel(const Source source, int64_t rows, int64_t cols, const TilesOut out) {
  using Held = HeldTile<Source>;
  static_assert(QuantizeTile<Q>::kSide == kTile);
  __shared__ QuantizeTile<Q> tile;
  __shared__ uint32_t col_max[kTile];
  __shared__ float col_scale[kTile];
  auto scale_of = [&](uint32_t amax) {
    return scale_from_amax(bits_float(amax), out.fmt_max, 1.0f, out.power_of_two, 1.0f);
  };
  Q *q = static_cast<Q*>(out.q), *q_t = static_cast<Q*>(out.q_t);
  bool vectors = source.aligned(Held::n) && cols % Held::n == 0;
  int64_t across = (cols + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
  uint32_t largest = 0;

  for (int64_t t = blockIdx.x; t < across * down; t += gridDim.x) {
    int64_t tile_row = t / across, tile_col = t % across;
    TileAt at = {rows, cols, tile_row * kTile, tile_col * kTile};
    Held held;
    held.load(at, source, vectors);

    float row_scale[Held::kRounds];
    if constexpr (scales == TileScales::squares) {
      uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < Held::kRounds; ++i) amax = largest_of(held.at[i], amax);
      amax = block_max(amax);
      largest = Max::apply(largest, amax);
      float s = scale_of(amax);
#pragma unroll
      for (float& of_row : row_scale) of_row = s;
      if (threadIdx.x == 0) {
        out.scale_inv[t] = 1.0f / s;
        if (q_t != nullptr) out.scale_inv_t[tile_col * down + tile_row] = 1.0f / s;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Held::kRounds; ++i) {
        int64_t row = at.row0 + held.row + i * Held::kStep;
        if constexpr (scales == TileScales::known) {
          row_scale[i] = row < rows ? out.row_scale[row] : 1.0f;
        } else {
          uint32_t amax = held.row_max(i);
          largest = Max::apply(largest, amax);
          row_scale[i] = scale_of(amax);
          if (held.col == 0 && row < rows) {
            out.scale_inv[row * across + tile_col] = 1.0f / row_scale[i];
          }
        }
      }
      if (threadIdx.x < kTile) col_max[threadIdx.x] = 0;
    }
    __syncthreads();  // the tile before has been read, and the column maxima are cleared
    if constexpr (scales == TileScales::lines) {
      if (q_t != nullptr) held.raise_column_maxima(col_max);
    }
    held.encode(tile, [&](int i, int) { return row_scale[i]; });
    __syncthreads();
    at.store_rows(tile, q);
    if (q_t == nullptr) continue;
    if constexpr (scales != TileScales::squares) {
      int64_t col = at.col0 + threadIdx.x;
      if (threadIdx.x < kTile && col < cols) {
        float s = scales == TileScales::known ? out.col_scale[col] : scale_of(col_max[threadIdx.x]);
        col_scale[threadIdx.x] = s;
        if (scales == TileScales::lines) out.scale_inv_t[col * down + tile_row] = 1.0f / s;
      } else if (threadIdx.x < kTile) {
        col_scale[threadIdx.x] = 1.0f;
      }
      __syncthreads();  // q has been read
      held.encode(tile, [&](int, int j) { return col_scale[held.col + j]; });
      __syncthreads();
    }
    at.store_columns(tile, q_t);
  }
  if constexpr (scales != TileScales::known) {
    largest = block_reduce<kThreads, Max>(largest);
    if (threadIdx.x == 0) out.partials[blockIdx.x] = largest;
  }
}

// row_max [tiles across, rows], col_max [tiles down, cols], partials [gridDim.x]
template <class Source>
__global__ void __launch_bounds__(kThreads, 1)
    tile_maxima_kernel(const Source source, int64_t rows, int64_t cols, uint32_t* row_max,
                       uint32_t* col_max, uint32_t* partials) {
  using Held = HeldTile<Source>;
  __shared__ uint32_t maxima[kTile];
  bool vectors = source.aligned(Held::n) && cols % Held::n == 0;
  int64_t across = (cols + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
  uint32_t largest = 0;
  for (int64_t t = blockIdx.x; t < across * down; t += gridDim.x) {
    int64_t tile_row = t / across, tile_col = t % across;
    TileAt at = {rows, cols, tile_row * kTile, tile_col * kTile};
    Held held;
    held.load(at, source, vectors);
#pragma unroll
    for (int i = 0; i < Held::kRounds; ++i) {
      int64_t row = at.row0 + held.row + i * Held::kStep;
      uint32_t amax = held.row_max(i);
      largest = Max::apply(largest, amax);
      if (held.col == 0 && row < rows) row_max[tile_col * rows + row] = amax;
    }
    if (threadIdx.x < kTile) maxima[threadIdx.x] = 0;
    __syncthreads();
    held.raise_column_maxima(maxima);
    __syncthreads();
    int64_t col = at.col0 + threadIdx.x;
    if (threadIdx.x < kTile && col < cols) col_max[tile_row * cols + col] = maxima[threadIdx.x];
  }
  largest = block_reduce<kThreads, Max>(largest);
  if (threadIdx.x == 0) partials[blockIdx.x] = largest;
}

// Rows or columns: maxima [tiles, count] -> scale, scale_inv [count]
struct Lines {
  const uint32_t* maxima;
  int64_t tiles, count;
  float *scale, *scale_inv;
};

// One thread per row or column; the first block also reduces the maxima of `blocks` blocks to amax.
static __global__ void __launch_bounds__(kThreads)
    line_scales_kernel(const Lines row_lines, const Lines col_lines, float fmt_max,
                       bool power_of_two, const uint32_t* partials, int blocks, float* amax) {
  if (blockIdx.x == 0) {
    uint32_t largest = max_of_partials(partials, blocks);
    if (threadIdx.x == 0) *amax = bits_float(largest);
  }
  auto find = [&](const Lines& lines, int64_t i) {
    if (i >= lines.count) return;
    uint32_t largest = 0;
#pragma unroll 4
    for (int64_t t = 0; t < lines.tiles; ++t) {
      largest = Max::apply(largest, lines.maxima[t * lines.count + i]);
    }
    float s = scale_from_amax(bits_float(largest), fmt_max, 1.0f, power_of_two, 1.0f);
    lines.scale[i] = s;
    lines.scale_inv[i] = 1.0f / s;
  };
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < row_lines.count) {
    find(row_lines, i);
  } else {
    find(col_lines, i - row_lines.count);
  }
}

}  // namespace mixprec::cuda
