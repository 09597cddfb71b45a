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

  // source: of one output
  template <class One>
  __device__ __forceinline__ void load(const TileAt& tile, const One& source, bool vectors) {
    if constexpr (Source::kFused) {  // the code of a load is long: once, and the rows move up
#pragma unroll 1
      for (int i = 0; i < kRounds; ++i) {
#pragma unroll
        for (int k = 0; k < (kRounds - 1) * n; ++k) at[k / n][k % n] = at[k / n + 1][k % n];
        tile.load<n>(source, row + i * kStep, col, at[kRounds - 1], vectors);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) tile.load<n>(source, row + i * kStep, col, at[i], vectors);
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

// Each block is of one output, because registers hold the values of one. Neighbours have the same
// tile of another: they run at the same time, and the second one reads from the L2 cache.
struct BlockOfOutput {
  int output, index, count;

  template <class Source>
  __device__ __forceinline__ explicit BlockOfOutput(const Source& source) {
    int outputs = source.outputs(), block = static_cast<int>(blockIdx.x);
    output = block % outputs, index = block / outputs;
    count = static_cast<int>(gridDim.x) / outputs;
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
  uint32_t* partials;              // [blocks of this output]
};

// Blocks an SM, if the registers of two do not spill: none do on Hopper. Elsewhere those for scales
// of lines do, and those of fused sources unless one scale is for all of the tile.
template <class Source, TileScales scales>
constexpr int tile_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return 2;
#else
  bool fits = scales == TileScales::squares || (scales == TileScales::known && !Source::kFused);
  return fits ? 2 : 1;
#endif
}

template <class Source, class Q, TileScales scales>
__global__ void __launch_bounds__(kThreads, (tile_blocks<Source, scales>()))
    quantize_tiles_kernel(const Source source, int64_t rows, int64_t cols, float fmt_max,
                          bool power_of_two,
                          const __grid_constant__ PerOutput<Source, TilesOut> outputs) {
  using Held = HeldTile<Source>;
  static_assert(QuantizeTile<Q>::kSide == kTile);
  __shared__ QuantizeTile<Q> tile;
  __shared__ uint32_t col_max[kTile];
  __shared__ float col_scale[kTile];
  auto scale_of = [&](uint32_t amax) {
    return scale_from_amax(bits_float(amax), fmt_max, 1.0f, power_of_two, 1.0f);
  };
  const BlockOfOutput block(source);
  const TilesOut& out = outputs.of[block.output];
  Q *q = static_cast<Q*>(out.q), *q_t = static_cast<Q*>(out.q_t);
  bool vectors = source.aligned(Held::n) && cols % Held::n == 0;
  int64_t across = (cols + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
  uint32_t largest = 0;

  for (int64_t t = block.index; t < across * down; t += block.count) {
    int64_t tile_row = t / across, tile_col = t % across;
    TileAt at = {rows, cols, tile_row * kTile, tile_col * kTile};
    Held held;
    held.load(at, only(source, block.output), vectors);

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
    if (threadIdx.x == 0) out.partials[block.index] = largest;
  }
}

struct TileMaxima {
  uint32_t* rows;      // [tiles across, rows]
  uint32_t* cols;      // [tiles down, cols]
  uint32_t* partials;  // [blocks of this output]
};

template <class Source>
__global__ void __launch_bounds__(kThreads, 1)
    tile_maxima_kernel(const Source source, int64_t rows, int64_t cols,
                       const __grid_constant__ PerOutput<Source, TileMaxima> outputs) {
  using Held = HeldTile<Source>;
  __shared__ uint32_t maxima[kTile];
  bool vectors = source.aligned(Held::n) && cols % Held::n == 0;
  int64_t across = (cols + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
  uint32_t largest = 0;
  const BlockOfOutput block(source);
  const TileMaxima& out = outputs.of[block.output];
  for (int64_t t = block.index; t < across * down; t += block.count) {
    int64_t tile_row = t / across, tile_col = t % across;
    TileAt at = {rows, cols, tile_row * kTile, tile_col * kTile};
    Held held;
    held.load(at, only(source, block.output), vectors);
#pragma unroll
    for (int i = 0; i < Held::kRounds; ++i) {
      int64_t row = at.row0 + held.row + i * Held::kStep;
      uint32_t amax = held.row_max(i);
      largest = Max::apply(largest, amax);
      if (held.col == 0 && row < rows) out.rows[tile_col * rows + row] = amax;
    }
    if (threadIdx.x < kTile) maxima[threadIdx.x] = 0;
    __syncthreads();
    held.raise_column_maxima(maxima);
    __syncthreads();
    int64_t col = at.col0 + threadIdx.x;
    if (threadIdx.x < kTile && col < cols) out.cols[tile_row * cols + col] = maxima[threadIdx.x];
  }
  largest = block_reduce<kThreads, Max>(largest);
  if (threadIdx.x == 0) out.partials[block.index] = largest;
}

// Rows or columns: maxima [tiles, count] -> scale, scale_inv [count]
struct Lines {
  const uint32_t* maxima;
  int64_t tiles, count;
  float *scale, *scale_inv;
};

// Of each output.
struct LineScales {
  Lines rows[kMaxOutputs], cols[kMaxOutputs];
  AmaxOfPartials amax;
};

// As many blocks for each output, of a thread per row or column; the first of them also reduces the
// maxima of `partials` blocks to amax.
static __global__ void __launch_bounds__(kThreads)
    line_scales_kernel(const __grid_constant__ LineScales scales, int outputs, float fmt_max,
                       bool power_of_two, int partials) {
  int output = static_cast<int>(blockIdx.x) % outputs;
  int64_t block = static_cast<int>(blockIdx.x) / outputs;
  if (block == 0) {
    uint32_t largest = max_of_partials(scales.amax.partials[output], partials);
    if (threadIdx.x == 0) *scales.amax.amax[output] = bits_float(largest);
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
  int64_t i = block * kThreads + threadIdx.x, rows = scales.rows[output].count;
  if (i < rows) {
    find(scales.rows[output], i);
  } else {
    find(scales.cols[output], i - rows);
  }
}

}  // namespace mixprec::cuda
