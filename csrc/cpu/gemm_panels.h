// The loops of a matrix product over panels of packed operands, for any kernel that multiplies two
// panels: pack, multiply into an fp32 tile that stays in the L2 cache, store each element once.
// Scales that vary along K multiply the sums of each 128 elements of K in a second tile before
// these are added.
#pragma once

#include <atomic>

#include "cpu/gemm_scales.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

struct Matrix {  // element (i, k) is data[i * stride_i + k * stride_k]
  Dtype dtype;
  const void* data;
  int64_t rows, stride_i, stride_k;
};

constexpr int64_t kPackedBytes = 32 << 20;  // of b at a time; bounds the scratch memory
constexpr int64_t kWordsPerPass = 1024;     // of K between two updates of the fp32 tile
constexpr int64_t kPackedTogether = 64;     // of K, where neighbouring panels are packed together
constexpr int64_t kTileRows = 56, kTileCols = 256;  // of the fp32 tile: 56 KB

// Packs rows [first, first + count) of x into panels of `width`. Returns whether an element was
// lost.
template <class Kernel>
bool pack_rows(const Kernel& kernel, decltype(GemmKernel::pack_a) pack, int64_t width,
               const Matrix& x, int64_t first, int64_t count, int64_t k, uint32_t* out) {
  // Where panels are narrow pieces of the same rows of memory, they are packed while these are in
  // the cache.
  int64_t together = x.stride_i == 1 ? kPackedTogether : std::max<int64_t>(1, k);
  bool lost = false;
  for (int64_t done = 0; done < k; done += together) {
    for (int64_t row = 0; row < count; row += width) {
      int64_t element = (first + row) * x.stride_i + done * x.stride_k;
      lost |= pack(x.dtype, at(x.data, x.dtype, element), x.stride_i, x.stride_k,
                   std::min(width, count - row), std::min(together, k - done),
                   out + row * kernel.words(k) + kernel.words(done) * width);
    }
  }
  return lost;
}

// The number of threads along M and along N that takes the least time.
struct Split {
  int64_t m = 1, n = 1;
};

template <class Kernel>
Split split_threads(int64_t panels_m, int64_t panels_n, int64_t threads, const Kernel& kernel) {
  Split best;
  double best_cost = 1e300;
  for (int64_t m = 1; m <= std::min(threads, panels_m); ++m) {
    int64_t n = std::min(threads / m, panels_n);
    double rows = static_cast<double>(ceil_div(panels_m, m) * kernel.mr);
    double cols = static_cast<double>(ceil_div(panels_n, n) * kernel.nr);
    // Arithmetic; each thread packs its rows of a, and reads its columns of b.
    double cost = rows * cols + 32.0 * rows + 8.0 * cols;
    if (cost < best_cost) best_cost = cost, best = {m, n};
  }
  return best;
}

// The scales of both operands. Those of b come from `columns_of`, [chunks][n] or [n]; `b` points at
// the first column of the part.
struct BothScales {
  Scales a;
  const float* b;
  int64_t n;  // columns of all of b
  bool b_by_chunk;
  bool promoted = false;  // the sums of chunks are apart, whether or not they have scales

  bool by_chunk() const { return promoted || a.by_chunk || b_by_chunk; }
  // The factors of the sum of one chunk of a row from column `col` on; `ones` holds n ones.
  Epilogue of_chunk(int64_t row, int64_t col, int64_t chunk, const float* ones) const {
    return {a.by_chunk ? a.at(row, chunk) : 1.0f, b_by_chunk ? b + chunk * n + col : ones, nullptr};
  }
  // The factors of the sum over all chunks.
  Epilogue at_the_end(int64_t row, int64_t col, const float* bias, const float* ones) const {
    return {a.by_chunk ? 1.0f : a.at(row, 0), b_by_chunk ? ones : b + col, bias};
  }
};

constexpr int64_t kTile = kTileRows * kTileCols;

// One for each column of the tile.
inline const float* ones() {
  static const std::vector<float> all(kTileCols, 1.0f);
  return all.data();
}

// A part of the result: rows [row, row + m) by columns [col, col + n).
struct Part {
  int64_t row, col, m, n;
};

// The product of a tile's panels. store(row, first column, n, fp32 sums) is called for each row.
// tile: memory for 2 * kTile sums.
template <class Kernel, class Store>
void multiply_tile(const Kernel& kernel, const uint32_t* a, const uint32_t* b, Part part,
                   int64_t words, const BothScales& scales, const Store& store, float* tile) {
  bool by_chunk = scales.by_chunk();
  int64_t words_per_pass = by_chunk ? kernel.words(kChunk) : kWordsPerPass;
  float* sums = by_chunk ? tile + kTile : tile;  // of one pass, or of all so far
  if (by_chunk) std::fill(tile, tile + part.m * kTileCols, 0.0f);
  // At least one pass, so that K = 0 gives zeros.
  for (int64_t w = 0; w == 0 || w < words; w += words_per_pass) {
    int64_t pass = std::min(words_per_pass, words - w);
    for (int64_t j = 0; j < part.n; j += kernel.nr) {
      for (int64_t i = 0; i < part.m; i += kernel.mr) {
        kernel.micro(pass, a + i * words + w * kernel.mr, b + j * words + w * kernel.nr,
                     sums + i * kTileCols + j, kTileCols, w > 0 && !by_chunk);
      }
    }
    for (int64_t r = 0; by_chunk && r < part.m; ++r) {
      Epilogue scale = scales.of_chunk(part.row + r, part.col, w / words_per_pass, ones());
      loops().accumulate_row(sums + r * kTileCols, scale, tile + r * kTileCols, 1, part.n);
    }
  }
  for (int64_t r = 0; r < part.m; ++r) {
    store(part.row + r, part.col, part.n, tile + r * kTileCols);
  }
}

inline uint32_t* panels(Scratch& scratch, int64_t rows, int64_t width, int64_t words) {
  int64_t bytes = ceil_div(rows, width) * width * words * 4;
  return static_cast<uint32_t*>(scratch.get(std::max<int64_t>(bytes, 64)));
}

// A tile with subnormal bf16 numbers, which the bf16 dot product reads as zero: in FP32.
template <class Store>
void multiply_exactly(const Matrix& a, const Matrix& b, int64_t k, Part part,
                      const BothScales& scales, const Store& store, float* tile) {
  static thread_local Scratch scratch[2];
  const GemmKernel& exact = loops().gemm_f32;
  uint32_t* packed_a = panels(scratch[0], part.m, exact.mr, k);
  uint32_t* packed_b = panels(scratch[1], part.n, exact.nr, k);
  pack_rows(exact, exact.pack_a, exact.mr, a, part.row, part.m, k, packed_a);
  pack_rows(exact, exact.pack_b, exact.nr, b, part.col, part.n, k, packed_b);
  multiply_tile(exact, packed_a, packed_b, part, k, scales, store, tile);
}

// All of a times columns [first, first + n) of b, which are packed. Each thread packs the rows of a
// tile, which stay in its L2 cache while they meet all columns.
template <class Kernel, class Store>
void multiply_columns(const Kernel& kernel, const Matrix& a, const Matrix& b, int64_t k,
                      int64_t first, int64_t n, const uint32_t* packed_b, bool lost_b,
                      const BothScales& scales, const Store& store) {
  int64_t words = kernel.words(k), step_n = kTileCols / kernel.nr * kernel.nr;
  int64_t panels_m = ceil_div(a.rows, kernel.mr), panels_n = ceil_div(n, kernel.nr);
  int64_t step_m = kTileRows / kernel.mr * kernel.mr;
  double flops =
      2.0 * static_cast<double>(a.rows) * static_cast<double>(n) * static_cast<double>(words);
  int64_t threads = flops < 2e5 ? 1 : torch::stable::get_num_threads();
  Split split = split_threads(panels_m, panels_n, threads, kernel);
  torch::stable::parallel_for(0, split.m * split.n, 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch for_a, for_tile;
    float* tile = static_cast<float*>(for_tile.get(2 * kTile * 4));
    for (int64_t share = begin; share < end; ++share) {
      int64_t sm = share / split.n, sn = share % split.n;
      int64_t m_end = std::min(a.rows, panels_m * (sm + 1) / split.m * kernel.mr);
      int64_t n_begin = panels_n * sn / split.n * kernel.nr;
      int64_t n_end = std::min(n, panels_n * (sn + 1) / split.n * kernel.nr);
      for (int64_t row = panels_m * sm / split.m * kernel.mr; row < m_end; row += step_m) {
        int64_t m = std::min(step_m, m_end - row);
        uint32_t* packed_a = panels(for_a, m, kernel.mr, words);
        bool lost = pack_rows(kernel, kernel.pack_a, kernel.mr, a, row, m, k, packed_a) || lost_b;
        for (int64_t col = n_begin; col < n_end; col += step_n) {
          Part part{row, first + col, m, std::min(step_n, n_end - col)};
          if (lost) {
            multiply_exactly(a, b, k, part, scales, store, tile);
          } else {
            multiply_tile(kernel, packed_a, packed_b + col * words, part, words, scales, store,
                          tile);
          }
        }
      }
    }
  });
}

// All of a [M, K] times b [K, N]; b is given with its columns as rows. Applies the scales that vary
// along K; `store` applies the others: it is called for each piece of a row of the result.
template <class Kernel, class Store>
void multiply(const Kernel& kernel, const Matrix& a, const Matrix& b, int64_t k,
              const BothScales& scales, const Store& store) {
  static thread_local Scratch scratch;
  int64_t words = kernel.words(k), nr = kernel.nr;
  int64_t fit = kPackedBytes / 4 / std::max<int64_t>(1, words) / nr;
  int64_t step = std::max<int64_t>(1, fit) * nr;
  for (int64_t first = 0; first < b.rows; first += step) {
    int64_t n = std::min(step, b.rows - first);
    uint32_t* packed = panels(scratch, n, nr, words);
    int64_t grain = std::max<int64_t>(1, kPiece / (nr * std::max<int64_t>(1, k)));
    std::atomic<bool> lost{false};
    torch::stable::parallel_for(0, ceil_div(n, nr), grain, [&](int64_t begin, int64_t end) {
      int64_t row = begin * nr, count = std::min(n, end * nr) - row;
      if (pack_rows(kernel, kernel.pack_b, nr, b, first + row, count, k, packed + row * words)) {
        lost = true;
      }
    });
    multiply_columns(kernel, a, b, k, first, n, packed, lost, scales, store);
  }
}

}  // namespace mixprec::cpu
