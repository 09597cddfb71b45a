// quantize in tiles of 128 x 128 with a scale per row, column or tile: a tile is read once and kept
// in registers until the scales are known; it then gives q and q^T.
#pragma once

#include "cuda/quantize/tile.cuh"

namespace mixprec::cuda {

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
  lines,    // one for each row of the tile, and each column for q^T, which there is
  squares,  // one for the tile
};

struct TilesOut {
  void *q, *q_t;                   // q_t: null without transpose
  const float* row_scale;          // [rows]
  const float* col_scale;          // [cols]
  const float* amax;               // where the scales are known, of all x
  float *scale_inv, *scale_inv_t;  // [rows or tiles down, tiles across], [cols or ..., tiles down]
  uint32_t* partials;              // [blocks of this output]
};

// Blocks an SM, if the registers of two do not spill: on Hopper only those of kLong sources for
// scales of lines do, and those of three do not for elements of 16 bits. Elsewhere those for scales
// of lines do, those of fused sources unless one scale is for all of the tile and FP8 has
// instructions, and then those of FP32.
template <class Source, TileScales scales>
constexpr int tile_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  if constexpr (Source::kFused) return scales == TileScales::lines && Source::kLong ? 1 : 2;
  return sizeof(typename Source::Element) == 2 ? 3 : 2;
#else
  constexpr bool squares = scales == TileScales::squares, known = scales == TileScales::known;
  constexpr bool halves = sizeof(typename Source::Element) == 2;
  bool fits = Source::kFused ? squares && ptx::kConvertsFp8 : known || (squares && halves);
  return fits ? 2 : 1;
#endif
}

template <class Source, class Q, TileScales scales>
__global__ void __launch_bounds__(kThreads, (tile_blocks<Source, scales>()))
    quantize_tiles_kernel(const Source source, const CastByParts by,
                          const __grid_constant__ PerOutput<Source, TilesOut> outputs) {
  using Held = HeldTile<Source>;
  const int64_t rows = by.rows, cols = by.cols;
  constexpr bool squares = scales == TileScales::squares;
  static_assert(QuantizeTile<Q>::kSide == kTile && kThreads == 2 * kTile);
  __shared__ QuantizeTile<Q> tile;
  __shared__ uint32_t maxima[squares ? 1 : kThreads];   // of the tile's rows, then of its columns
  __shared__ float line_scale[squares ? 1 : kThreads];  // likewise
  const BlockOfOutput block(source);
  const TilesOut& out = outputs.of[block.output];
  Q *q = static_cast<Q*>(out.q), *q_t = static_cast<Q*>(out.q_t);
  bool vectors = source.aligned(Held::n) && cols % Held::n == 0;
  int64_t across = (cols + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
  uint32_t largest = 0;
  if constexpr (scales == TileScales::lines) {
    maxima[threadIdx.x] = 0;
    __syncthreads();
  }

  for (int64_t t = block.index; t < across * down; t += block.count) {
    int64_t tile_row = t / across, tile_col = t % across;
    TileAt at = {rows, cols, tile_row * kTile, tile_col * kTile};
    // Where scales are by lines, a thread has that of a row or of a column.
    bool is_row = threadIdx.x < kTile;
    int own = threadIdx.x % kTile;
    auto line = [&] { return (is_row ? at.row0 : at.col0) + own; };
    auto inside = [&] { return own < (is_row ? at.height() : at.width()); };
    if constexpr (scales == TileScales::known) {
      const float* of_lines = is_row ? out.row_scale : out.col_scale;
      line_scale[threadIdx.x] = inside() ? of_lines[line()] : 1.0f;
    }
    Held held;
    held.load(at, only(source, block.output), vectors);

    uint32_t amax = 0;  // of this thread's elements, or of more
    if constexpr (squares) {
      amax = block_max(held.largest());
      float s = by.scale(amax);
      if (threadIdx.x == 0) {
        out.scale_inv[t] = 1.0f / s;
        if (q_t != nullptr) out.scale_inv_t[tile_col * down + tile_row] = 1.0f / s;
      }
      held.encode(tile, amax, [&](int, int) { return s; });
    } else {
      if constexpr (scales == TileScales::lines) {
#pragma unroll
        for (int i = 0; i < Held::kRounds; ++i) {
          uint32_t of_row = held.row_max(i);
          amax = Max::apply(amax, of_row);
          if (held.col == 0) maxima[held.row + i * Held::kStep] = of_row;
        }
        held.raise_column_maxima(maxima + kTile);
        __syncthreads();
        uint32_t& of_line = maxima[is_row ? own : kTile + Held::place(own)];
        float s = by.scale(of_line);
        of_line = 0;  // for the next tile
        float* inverse = is_row ? out.scale_inv + line() * across + tile_col
                                : out.scale_inv_t + line() * down + tile_row;
        if (inside()) *inverse = 1.0f / s;
        line_scale[threadIdx.x] = s;
      } else {
        amax = float_bits(*out.amax);
      }
      __syncthreads();  // the scales are there, and the tile before has been read
      held.encode(tile, amax,
                  [&](int round, int) { return line_scale[held.row + round * Held::kStep]; });
    }
    largest = Max::apply(largest, amax);
    __syncthreads();
    at.store_rows(tile, q);
    if (q_t == nullptr) continue;
    if constexpr (!squares) {
      __syncthreads();  // q has been read
      held.encode(tile, amax, [&](int, int j) { return line_scale[kTile + held.col + j]; });
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
    // By the threads that have read them.
    if (threadIdx.x < kTile) maxima[Held::place(threadIdx.x)] = 0;
    __syncthreads();
    held.raise_column_maxima(maxima);
    __syncthreads();
    int64_t col = at.col0 + threadIdx.x;
    if (threadIdx.x < kTile && col < cols) {
      out.cols[tile_row * cols + col] = maxima[Held::place(threadIdx.x)];
    }
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
    line_scales_kernel(const __grid_constant__ LineScales scales, int outputs, const CastByParts by,
                       int partials) {
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
    float s = by.scale(largest);
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
