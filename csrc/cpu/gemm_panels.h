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

constexpr int64_t kPackedBytes = 32 << 20;  // of each operand at a time; bounds the scratch memory
constexpr int64_t kWordsPerPass = 1024;     // of K between two updates of the fp32 tile
constexpr int64_t kTogether = 64;           // of K, where neighbouring panels are packed together
constexpr int64_t kTileRows = 56, kTileCols = 256;  // of the fp32 tile: 56 KB

// Packs rows [first, first + count) of x into panels of the kernel's `width`. Returns whether an
// element was lost.
template <class Kernel>
bool pack_panels(const Kernel& kernel, decltype(GemmKernel::pack_a) pack, int64_t width,
                 const Matrix& x, int64_t first, int64_t count, int64_t k, uint32_t* out) {
  int64_t grain = std::max<int64_t>(1, kPiece / (width * std::max<int64_t>(1, k)));
  int64_t words = kernel.words(k);
  // Where a panel is narrow pieces of many rows of memory, its neighbours are packed while these
  // rows are in the cache.
  int64_t together = x.stride_i == 1 ? kTogether : std::max<int64_t>(1, k);
  std::atomic<bool> lost{false};
  torch::stable::parallel_for(0, ceil_div(count, width), grain, [&](int64_t begin, int64_t end) {
    for (int64_t done = 0; done < k; done += together) {
      for (int64_t p = begin; p < end; ++p) {
        int64_t row = p * width, element = (first + row) * x.stride_i + done * x.stride_k;
        if (pack(x.dtype, at(x.data, x.dtype, element), x.stride_i, x.stride_k,
                 std::min(width, count - row), std::min(together, k - done),
                 out + row * words + kernel.words(done) * width)) {
          lost = true;
        }
      }
    }
  });
  return lost;
}

// The number of threads along M and along N that minimises the largest share of panels.
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
    double cost = rows * cols + 8.0 * (rows + cols);  // arithmetic, and a smaller part for reading
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

// store(row, first column, n, fp32 accumulators) is called once for each piece of a row of the
// part, when its sum over K is complete.
template <class Kernel, class Store>
void multiply_part(const Kernel& kernel, const uint32_t* a, const uint32_t* b, Part part,
                   int64_t words, const BothScales& scales, const Store& store) {
  auto [row0, col0, m, n] = part;
  int64_t panels_m = ceil_div(m, kernel.mr), panels_n = ceil_div(n, kernel.nr);
  double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(words);
  int64_t threads = flops < 2e5 ? 1 : torch::stable::get_num_threads();
  Split split = split_threads(panels_m, panels_n, threads, kernel);
  int64_t step_m = kTileRows / kernel.mr, step_n = kTileCols / kernel.nr;
  bool by_chunk = scales.by_chunk();
  int64_t words_per_pass = by_chunk ? kernel.words(kChunk) : kWordsPerPass;
  torch::stable::parallel_for(0, split.m * split.n, 1, [&](int64_t first, int64_t last) {
    static thread_local Scratch scratch;
    float* tile = static_cast<float*>(scratch.get(2 * kTile * 4));
    float* sums = by_chunk ? tile + kTile : tile;  // of one pass, or of all so far
    for (int64_t share = first; share < last; ++share) {
      int64_t sm = share / split.n, sn = share % split.n;
      int64_t m_begin = panels_m * sm / split.m, m_end = panels_m * (sm + 1) / split.m;
      int64_t n_begin = panels_n * sn / split.n, n_end = panels_n * (sn + 1) / split.n;
      for (int64_t pn = n_begin; pn < n_end; pn += step_n) {
        int64_t count_n = std::min(step_n, n_end - pn);
        for (int64_t pm = m_begin; pm < m_end; pm += step_m) {
          int64_t count_m = std::min(step_m, m_end - pm);
          int64_t row = pm * kernel.mr, col = pn * kernel.nr;
          int64_t rows = std::min(count_m * kernel.mr, m - row);
          int64_t cols = std::min(count_n * kernel.nr, n - col);
          if (by_chunk) std::fill(tile, tile + rows * kTileCols, 0.0f);
          // At least one pass, so that K = 0 gives zeros.
          for (int64_t w = 0; w == 0 || w < words; w += words_per_pass) {
            int64_t pass = std::min(words_per_pass, words - w);
            for (int64_t j = 0; j < count_n; ++j) {
              for (int64_t i = 0; i < count_m; ++i) {
                kernel.micro(pass, a + ((pm + i) * words + w) * kernel.mr,
                             b + ((pn + j) * words + w) * kernel.nr,
                             sums + i * kernel.mr * kTileCols + j * kernel.nr, kTileCols,
                             w > 0 && !by_chunk);
              }
            }
            for (int64_t r = 0; by_chunk && r < rows; ++r) {
              Epilogue scale =
                  scales.of_chunk(row0 + row + r, col0 + col, w / words_per_pass, ones());
              loops().accumulate_row(sums + r * kTileCols, scale, tile + r * kTileCols, 1, cols);
            }
          }
          for (int64_t r = 0; r < rows; ++r) {
            store(row0 + row + r, col0 + col, cols, tile + r * kTileCols);
          }
        }
      }
    }
  });
}

// One operand packed for one kernel, a block of rows at a time.
template <class Kernel>
class Packed {
 public:
  Packed(const Kernel& kernel, decltype(GemmKernel::pack_a) pack, int64_t width, const Matrix& x,
         int64_t k, Scratch& scratch)
      : kernel_(kernel), pack_(pack), width_(width), x_(x), k_(k), scratch_(scratch) {}

  uint32_t* data() const { return data_; }

  bool pack(int64_t first, int64_t count) {
    int64_t bytes = ceil_div(count, width_) * width_ * kernel_.words(k_) * 4;
    data_ = static_cast<uint32_t*>(scratch_.get(std::max<int64_t>(bytes, 64)));
    return pack_panels(kernel_, pack_, width_, x_, first, count, k_, data_);
  }

 private:
  const Kernel& kernel_;
  decltype(GemmKernel::pack_a) pack_;
  int64_t width_;
  const Matrix& x_;
  int64_t k_;
  Scratch& scratch_;
  uint32_t* data_ = nullptr;
};

// All of a [M, K] times b [K, N]; b is given with its columns as rows. Applies the scales that vary
// along K; `store` applies the others.
template <class Kernel, class Store>
void multiply(const Kernel& kernel, const Matrix& a, const Matrix& b, int64_t k,
              const BothScales& scales, const Store& store) {
  static thread_local Scratch scratch[4];
  const GemmKernel& exact = loops().gemm_f32;
  Packed packed_a(kernel, kernel.pack_a, kernel.mr, a, k, scratch[0]);
  Packed packed_b(kernel, kernel.pack_b, kernel.nr, b, k, scratch[1]);
  int64_t words = kernel.words(k);
  int64_t fit = kPackedBytes / 4 / std::max<int64_t>(1, words);
  int64_t block_m = std::max<int64_t>(1, fit / kernel.mr) * kernel.mr;
  int64_t block_n = std::max<int64_t>(1, fit / kernel.nr) * kernel.nr;
  bool lost_a = false;
  for (int64_t n0 = 0; n0 < b.rows; n0 += block_n) {
    int64_t n = std::min(block_n, b.rows - n0);
    bool lost_b = packed_b.pack(n0, n);
    for (int64_t m0 = 0; m0 < a.rows; m0 += block_m) {
      int64_t m = std::min(block_m, a.rows - m0);
      if (n0 == 0 || block_m < a.rows) lost_a = packed_a.pack(m0, m);
      Part part{m0, n0, m, n};
      if (lost_a || lost_b) {
        // There are subnormal bf16 numbers, which the bf16 dot product reads as zero: use fp32 for
        // this block.
        Packed wide_a(exact, exact.pack_a, exact.mr, a, k, scratch[2]);
        Packed wide_b(exact, exact.pack_b, exact.nr, b, k, scratch[3]);
        wide_a.pack(m0, m);
        wide_b.pack(n0, n);
        multiply_part(exact, wide_a.data(), wide_b.data(), part, k, scales, store);
      } else {
        multiply_part(kernel, packed_a.data(), packed_b.data(), part, words, scales, store);
      }
    }
  }
}

}  // namespace mixprec::cpu
