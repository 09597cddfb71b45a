// quantize with a scale for each row, each 128 elements of a row, or each square of 128 x 128; x^T
// by its own rows and blocks in the same pass. FP8 only.
#pragma once

#include "cuda/amax.cuh"
#include "cuda/transpose.cuh"

namespace mixprec::cuda {

constexpr int kScaleBlock = 128;  // and the side of a tile: QuantizeTile<Q>::kSide for FP8

struct Blocks {
  Dtype x_dtype, q_dtype;
  const void* x;  // [rows, cols], row-major
  void *q, *q_t;  // [rows, cols], [cols, rows]
  int64_t rows, cols;
  bool transpose, power_of_two;
  float *scale_inv, *scale_inv_t;
  // Scratch, zeroed: rows' and then columns' largest magnitudes, for rows with a transpose.
  uint32_t* maxima;
  AmaxState* state;  // scratch, zeroed
  float* amax;
};

template <class X, class Q>
struct BlockArgs {
  const X* x;
  Q *q, *q_t;
  int64_t rows, cols;
  bool transpose, power_of_two;
  float *scale_inv, *scale_inv_t;
  uint32_t *row_maxima, *col_maxima;
  AmaxState* state;
  float* amax;

  __device__ float scale_of(uint32_t largest) const {
    constexpr float max = format_max(std::is_same_v<Q, E4m3> ? Dtype::e4m3 : Dtype::e5m2);
    return scale_from_amax(bits_float(largest), max, 1.0f, power_of_two, 1.0f);
  }
};

// What a pass over the 128 x 128 tiles of x does.
enum class Pass {
  maxima,   // of rows and columns, for `cast`
  cast,     // rows and columns by the maxima that are known
  pieces,   // 1 x 128: find and cast
  squares,  // 128 x 128: find and cast
};

// The part of a tile that one thread holds: vectors of n elements in column `col`, in rows
// row + i * kRowStep.
template <class X>
struct Share {
  static constexpr int n = kVector<X>, kLanes = kScaleBlock / n;  // threads in a row
  static constexpr int kRowStep = kThreads / kLanes, kRows = kScaleBlock / kRowStep;
  int row = static_cast<int>(threadIdx.x) / kLanes,
      col = static_cast<int>(threadIdx.x) % kLanes * n;
};

template <class X, class Q>
__device__ __forceinline__ void load_share(X (&x)[Share<X>::kRows][Share<X>::n],
                                           const BlockArgs<X, Q>& a, int64_t row0, int64_t col0,
                                           bool vectors) {
  constexpr int n = Share<X>::n;
  Share<X> at;
  int64_t col = col0 + at.col;
#pragma unroll
  for (int i = 0; i < Share<X>::kRows; ++i) {
    int64_t row = row0 + at.row + i * Share<X>::kRowStep;
    const X* from = a.x + row * a.cols + col;
    if (row < a.rows && vectors && col < a.cols) {
      load(from, x[i]);
    } else {
#pragma unroll
      for (int j = 0; j < n; ++j) x[i][j] = row < a.rows && col + j < a.cols ? from[j] : X{};
    }
  }
}

// tile <- x * scale, scale(i, j) being that of element j of vector i.
template <class X, class Q, class Scale>
__device__ __forceinline__ void cast_share(QuantizeTile<Q>& tile,
                                           const X (&x)[Share<X>::kRows][Share<X>::n],
                                           const Scale& scale) {
  constexpr int n = Share<X>::n;
  Share<X> at;
#pragma unroll
  for (int i = 0; i < Share<X>::kRows; ++i) {
    Q rounded[n];
#pragma unroll
    for (int j = 0; j < n; ++j) rounded[j] = Convert<Q>::encode(decode(x[i][j]), scale(i, j));
    store(&tile.at[tile.offset(at.row + i * Share<X>::kRowStep, at.col)], rounded);
  }
}

// The tile to q, along rows, or to q_t, along columns, in 16-byte vectors where they fit.
template <class X, class Q>
__device__ __forceinline__ void write_rows(const QuantizeTile<Q>& tile, const BlockArgs<X, Q>& a,
                                           int64_t row0, int64_t col0, bool vectors) {
  constexpr int run = QuantizeTile<Q>::kRun, side = QuantizeTile<Q>::kSide;
  for (int i = threadIdx.x; i < side * side / run; i += kThreads) {
    int64_t row = row0 + i / 8, col = col0 + i % 8 * run;
    if (row >= a.rows || col >= a.cols) continue;
    Q line[run];
    load(&tile.at[tile.offset(i / 8, i % 8 * run)], line);
    int64_t left = a.cols - col;
    store_run(a.q + row * a.cols + col, line, left < run ? static_cast<int>(left) : run, vectors);
  }
}

template <class X, class Q>
__device__ __forceinline__ void write_columns(const QuantizeTile<Q>& tile, const BlockArgs<X, Q>& a,
                                              int64_t row0, int64_t col0, bool vectors) {
  constexpr int run = QuantizeTile<Q>::kRun, side = QuantizeTile<Q>::kSide;
  for (int i = threadIdx.x; i < side * side / run; i += kThreads) {
    int64_t col = col0 + i / 8, row = row0 + i % 8 * run;
    if (row >= a.rows || col >= a.cols) continue;
    Q line[run];
    tile.gather(i % 8 * run, i / 8, line);
    int64_t left = a.rows - row;
    store_run(a.q_t + col * a.rows + row, line, left < run ? static_cast<int>(left) : run, vectors);
  }
}

template <Pass pass, class X, class Q>
__global__ void __launch_bounds__(kThreads) quantize_tiles_kernel(const BlockArgs<X, Q> a) {
  using At = Share<X>;
  constexpr int side = kScaleBlock, n = At::n;
  static_assert(QuantizeTile<Q>::kSide == side);
  constexpr bool own_columns = pass == Pass::cast || pass == Pass::pieces;
  __shared__ QuantizeTile<Q> tile;
  __shared__ uint32_t columns[side];
  __shared__ uint32_t square;
  At at;
  int t = static_cast<int>(threadIdx.x);
  bool x_vectors = is_aligned(a.x) && a.cols % n == 0;
  bool q_vectors = is_aligned(a.q) && a.cols % QuantizeTile<Q>::kRun == 0;
  bool q_t_vectors = is_aligned(a.q_t) && a.rows % QuantizeTile<Q>::kRun == 0;
  int64_t across = (a.cols + side - 1) / side, down = (a.rows + side - 1) / side;
  uint32_t largest = 0;

  for (int64_t i = blockIdx.x; i < across * down; i += gridDim.x) {
    int64_t row0 = i / across * side, col0 = i % across * side;
    X x[At::kRows][n];
    uint32_t row_largest[At::kRows];
    load_share(x, a, row0, col0, x_vectors);

    if (pass != Pass::cast) {
      if (t < side) columns[t] = 0;
      __syncthreads();
      uint32_t col_largest[n] = {};
#pragma unroll
      for (int r = 0; r < At::kRows; ++r) {
        uint32_t most = 0;
#pragma unroll
        for (int j = 0; j < n; ++j) {
          uint32_t u = magnitude_bits(decode(x[r][j]));
          most = Max::apply(most, u);
          col_largest[j] = Max::apply(col_largest[j], u);
        }
        row_largest[r] = warp_reduce<Max>(most, At::kLanes);  // in all threads of the row
        largest = Max::apply(largest, most);
      }
#pragma unroll
      for (int j = 0; j < n; ++j) atomicMax(&columns[at.col + j], col_largest[j]);
      __syncthreads();
    }

    if (pass == Pass::maxima) {
#pragma unroll
      for (int r = 0; r < At::kRows; ++r) {
        int64_t row = row0 + at.row + r * At::kRowStep;
        if (at.col == 0 && row < a.rows) atomicMax(&a.row_maxima[row], row_largest[r]);
      }
      if (t < side && col0 + t < a.cols) atomicMax(&a.col_maxima[col0 + t], columns[t]);
      __syncthreads();  // the columns are read before they are cleared
      continue;
    }

    if (pass == Pass::squares) {
      if (t < kWarp) {
        uint32_t most = 0;
        for (int c = t; c < side; c += kWarp) most = Max::apply(most, columns[c]);
        most = warp_reduce<Max>(most, kWarp);
        if (t == 0) square = most;
      }
      __syncthreads();
      float scale = a.scale_of(square);
      cast_share(tile, x, [&](int, int) { return scale; });
      if (t == 0) {
        a.scale_inv[i] = 1.0f / scale;
        if (a.transpose) a.scale_inv_t[i % across * down + i / across] = 1.0f / scale;
      }
    } else {
      float scale[At::kRows];
#pragma unroll
      for (int r = 0; r < At::kRows; ++r) {
        int64_t row = row0 + at.row + r * At::kRowStep;
        if (pass == Pass::cast) row_largest[r] = row < a.rows ? a.row_maxima[row] : 0;
        scale[r] = a.scale_of(row_largest[r]);
        bool mine = at.col == 0 && row < a.rows && (pass == Pass::pieces || col0 == 0);
        if (mine)
          a.scale_inv[pass == Pass::pieces ? row * across + i % across : row] = 1.0f / scale[r];
      }
      cast_share(tile, x, [&](int r, int) { return scale[r]; });
    }
    __syncthreads();
    write_rows(tile, a, row0, col0, q_vectors);
    if (a.transpose && own_columns) {
      float scale[n];
#pragma unroll
      for (int j = 0; j < n; ++j) {
        int64_t col = col0 + at.col + j;
        uint32_t most = pass == Pass::pieces ? columns[at.col + j]
                        : col < a.cols       ? a.col_maxima[col]
                                             : 0;
        scale[j] = a.scale_of(most);
        bool mine = at.row == 0 && col < a.cols && (pass == Pass::pieces || row0 == 0);
        if (mine)
          a.scale_inv_t[pass == Pass::pieces ? col * down + i / across : col] = 1.0f / scale[j];
      }
      __syncthreads();  // the tile is read before it is written again
      cast_share(tile, x, [&](int, int j) { return scale[j]; });
      __syncthreads();
    }
    if (a.transpose) write_columns(tile, a, row0, col0, q_t_vectors);
    __syncthreads();
  }
  if (pass != Pass::cast) finish_amax(largest, a.state, a.amax);
}

// Rows without a transpose: `group` threads take a row, whose second read comes from the cache.
template <int group, class X, class Q>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const BlockArgs<X, Q> a) {
  constexpr int n = kVector<Q>;
  __shared__ uint32_t shared;
  int t = static_cast<int>(threadIdx.x) % group;
  uint32_t largest = 0;
  constexpr int rows_at_once = kThreads / group;
  int64_t turns = (a.rows + rows_at_once - 1) / rows_at_once;
  for (int64_t i = blockIdx.x; i < turns; i += gridDim.x) {
    int64_t row = i * rows_at_once + static_cast<int>(threadIdx.x) / group;
    bool inside = row < a.rows;
    const X* x = a.x + (inside ? row : 0) * a.cols;
    Q* q = a.q + (inside ? row : 0) * a.cols;
    Span span = split<n>(inside ? a.cols : 0, q, x);
    uint32_t most = 0;
    for_each<n>(span, t, group, [&](auto width, int64_t at) {
      X wide[decltype(width)::value];
      load(x + at, wide);
#pragma unroll
      for (X value : wide) most = Max::apply(most, magnitude_bits(decode(value)));
    });
    if constexpr (group == kWarp) {
      most = warp_reduce<Max>(most, kWarp);
    } else {
      most = block_reduce<kThreads, Max>(most);
      if (t == 0) shared = most;
      __syncthreads();
      most = shared;
      __syncthreads();  // read before the next row's is written
    }
    largest = Max::apply(largest, most);
    float scale = a.scale_of(most);
    if (t == 0 && inside) a.scale_inv[row] = 1.0f / scale;
    for_each<n>(span, t, group, [&](auto width, int64_t at) {
      X wide[decltype(width)::value];
      Q rounded[decltype(width)::value];
      load(x + at, wide);
#pragma unroll
      for (int j = 0; j < decltype(width)::value; ++j) {
        rounded[j] = Convert<Q>::encode(decode(wide[j]), scale);
      }
      store(q + at, rounded);
    });
  }
  finish_amax(largest, a.state, a.amax);
}

enum class Granularity { row, block1x128, block128x128 };

// Without rows or columns there are still scales, of 1.
static __global__ void ones_kernel(float* out, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) out[i] = 1.0f;
}

inline cudaError_t quantize_empty(const Blocks& b, Granularity g, cudaStream_t stream) {
  bool by_row = g == Granularity::row;
  cudaError_t error = cudaSuccess;
  if (by_row && b.rows > 0) {
    error = launch(ones_kernel, 1, kThreads, 0, stream, b.scale_inv, b.rows);
  }
  if (error == cudaSuccess && by_row && b.transpose && b.cols > 0) {
    error = launch(ones_kernel, 1, kThreads, 0, stream, b.scale_inv_t, b.cols);
  }
  if (error != cudaSuccess) return error;
  return amax(b.x_dtype, b.x, 0, b.state, b.amax, 1, stream);
}

// One launch; two for rows with a transpose, whose columns' scales need all of x.
inline cudaError_t quantize_blocks(const Blocks& b, Granularity g, int sms, cudaStream_t stream) {
  if (b.rows == 0 || b.cols == 0) return quantize_empty(b, g, stream);
  cudaError_t error = cudaSuccess;
  auto run = [&](auto tx, auto tq) {
    using X = typename decltype(tx)::type;
    using Q = typename decltype(tq)::type;
    BlockArgs<X, Q> args = {static_cast<const X*>(b.x),
                            static_cast<Q*>(b.q),
                            static_cast<Q*>(b.q_t),
                            b.rows,
                            b.cols,
                            b.transpose,
                            b.power_of_two,
                            b.scale_inv,
                            b.scale_inv_t,
                            b.maxima,
                            b.maxima + b.rows,
                            b.state,
                            b.amax};
    int64_t tiles =
        ((b.rows + kScaleBlock - 1) / kScaleBlock) * ((b.cols + kScaleBlock - 1) / kScaleBlock);
    int64_t grid = grid_for(tiles, sms);
    auto pass = [&](void (*kernel)(const BlockArgs<X, Q>)) {
      if (error == cudaSuccess) error = launch(kernel, grid, kThreads, 0, stream, args);
    };
    if (g == Granularity::block1x128) {
      pass(quantize_tiles_kernel<Pass::pieces, X, Q>);
    } else if (g == Granularity::block128x128) {
      pass(quantize_tiles_kernel<Pass::squares, X, Q>);
    } else if (b.transpose) {
      pass(quantize_tiles_kernel<Pass::maxima, X, Q>);
      pass(quantize_tiles_kernel<Pass::cast, X, Q>);
    } else if (b.cols <= 4096) {
      constexpr int at_once = kThreads / kWarp;
      grid = grid_for((b.rows + at_once - 1) / at_once, sms);
      pass(quantize_rows_kernel<kWarp, X, Q>);
    } else {
      grid = grid_for(b.rows, sms);
      pass(quantize_rows_kernel<kThreads, X, Q>);
    }
  };
  with_float(b.x_dtype, [&](auto tx) {
    if (b.q_dtype == Dtype::e4m3) {
      run(tx, Type<E4m3>{});
    } else {
      run(tx, Type<E5m2>{});
    }
  });
  return error;
}

}  // namespace mixprec::cuda
