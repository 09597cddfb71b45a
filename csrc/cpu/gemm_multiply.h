// The loops of a matrix product over panels of packed operands, for any kernel that multiplies two
// panels. Columns of b are packed together; each thread packs a block of a, some rows by one pass
// of K, that stays in its L2 cache while it meets them. Each element of the result is stored once,
// from fp32 sums. Scales that vary along K multiply the sums of each 128 elements of K, in a tile
// of their own, before these are added.
#pragma once

#include <atomic>

#include "cpu/gemm_operands.h"

namespace mixprec::cpu {

constexpr int64_t kTileRows = 64, kTileCols = kOnes;  // of sums that are scaled or stored together

// The scales of both operands; those of b one for each column.
struct BothScales {
  Scales a;
  std::vector<float> b;  // [chunks][n] if they vary along K, else [n]
  int64_t n;
  bool b_by_chunk;
  bool promoted = false;  // the sums of chunks are added in FP32, whether or not they have scales

  BothScales(const Scales& a, const Scales& columns, int64_t n, int64_t k)
      : a(a), n(n), b_by_chunk(columns.by_chunk) {
    int64_t chunks = b_by_chunk ? ceil_div(k, kChunk) : 1;
    b.resize(static_cast<size_t>(chunks * n));
    for (int64_t i = 0; i < chunks * n; ++i) b[i] = columns.at(i % n, i / n);
  }
  bool by_chunk() const { return promoted || a.by_chunk || b_by_chunk; }
  // The factors of the sums of one chunk of rows and columns, those of rows in `row_scales`.
  Epilogue chunk_factors(int64_t row, int64_t m, int64_t col, int64_t chunk,
                         float* row_scales) const {
    for (int64_t i = 0; i < m; ++i) row_scales[i] = a.by_chunk ? a.at(row + i, chunk) : 1.0f;
    return {row_scales, b_by_chunk ? b.data() + chunk * n + col : ones(), nullptr};
  }
  // The factors of the sums over all chunks.
  void row_factors(int64_t row, int64_t m, float* factors) const {
    for (int64_t i = 0; i < m; ++i) factors[i] = a.by_chunk ? 1.0f : a.at(row + i, 0);
  }
  const float* column_factors(int64_t col) const { return b_by_chunk ? ones() : b.data() + col; }
};

// a [M, K] times b [K, N], which is given with its columns as rows.
struct Product {
  Matrix a, b;
  int64_t k;
  BothScales scales;
  Result result;
};

// A part of the result: rows [row, row + m) by columns [col, col + n).
struct Part {
  int64_t row, col, m, n;
};

// fp32 sums, row-major.
struct Sums {
  float* data;
  int64_t ld;

  float* at(int64_t row, int64_t col) const { return data + row * ld + col; }
};

// The part of a result that a block of a gives, and the factors of its rows.
struct Output {
  const Product& product;
  Part part;
  const float* row_scales;  // [part.m]

  // Tile (row, col) of the part, of m x n at most.
  void store(int64_t row, int64_t col, int64_t m, int64_t n, Sums sums) const {
    const Result& result = product.result;
    SumTile tile = {sums.data, sums.ld, std::min(m, part.m - row), std::min(n, part.n - col)};
    int64_t at_col = part.col + col;
    void* to = result.element(part.row + row, at_col);
    Epilogue e = {row_scales + row, product.scales.column_factors(at_col),
                  result.bias == nullptr ? nullptr : result.bias + at_col};
    if (result.adds) {
      loops().accumulate_tile(tile, e, static_cast<float*>(to), result.stride_i, result.stride_j);
    } else {
      loops().store_tile(result.dtype, tile, e, to, result.stride_i);
    }
  }
  // Fetches the first lines of the tile's rows, before it is multiplied.
  void fetch(int64_t row, int64_t col, int64_t m) const {
    const Result& result = product.result;
    const char* line = static_cast<char*>(result.element(part.row + row, part.col + col));
    int64_t step = result.stride_i * element_size(result.dtype);
    for (int64_t i = std::min(m, part.m - row); i > 0; --i, line += step) {
      __builtin_prefetch(line, 1);
    }
  }
  void store_all(Sums sums) const {
    for (int64_t col = 0; col < part.n; col += kTileCols) {
      store(0, col, part.m, kTileCols, {sums.at(0, col), sums.ld});
    }
  }
};

constexpr int64_t kWordsPerPass = 1024;    // of K
constexpr int64_t kPassesTogether = 2;     // of K, whose panels of b are packed at a time
constexpr int64_t kPackedBytes = 8 << 20;  // of b at a time
constexpr int64_t kPanelsPerBlock = 8;     // of a: 448 KB with AVX-512, 192 KB with AVX2
constexpr int64_t kRowsOfSums = 8192;      // at a time, where not all of K is packed at once

constexpr int64_t kTileSums = 1024;  // sums; some tiles of a micro-kernel, in the L1 cache

// What a product may use: threads, and memory for b at a time.
struct Resources {
  int64_t threads, packed_bytes;
};

inline Resources all_threads() { return {torch::stable::get_num_threads(), kPackedBytes}; }

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

// Packed panels: those of a hold one pass, those of b `words` of K, from the first word of the
// pass.
struct Panels {
  const uint32_t *a, *b;
  int64_t words;
};

// sums [m, n] = or += the products over the elements [first_k, first_k + k) of K, which are
// multiplied by the scales of chunks.
template <class Kernel>
void multiply_chunks(const Kernel& kernel, const Panels& panels, Part part, int64_t first_k,
                     int64_t k, const BothScales& scales, Sums sums) {
  alignas(64) static thread_local float tile[kTileRows * kTileCols];
  float row_scales[kTileRows];
  int64_t width = kernel.width_a(part.m);
  int64_t step_m = kTileRows / width * width, step_n = kTileCols / kernel.nr * kernel.nr;
  int64_t words = kernel.words(k), step_w = kernel.words(kChunk);
  for (int64_t r = 0; first_k == 0 && r < part.m; ++r) {
    std::fill(sums.at(r, 0), sums.at(r, part.n), 0.0f);
  }
  for (int64_t col = 0; col < part.n; col += step_n) {
    int64_t n = std::min(step_n, part.n - col);
    for (int64_t row = 0; row < part.m; row += step_m) {
      int64_t m = std::min(step_m, part.m - row);
      for (int64_t w = 0; w < words; w += step_w) {
        for (int64_t j = 0; j < n; j += kernel.nr) {
          for (int64_t i = 0; i < m; i += width) {
            kernel.micro(width, std::min(step_w, words - w),
                         panels.a + (row + i) * words + w * width,
                         panels.b + (col + j) * panels.words + w * kernel.nr,
                         tile + i * kTileCols + j, kTileCols, false);
          }
        }
        int64_t chunk = first_k / kChunk + w / step_w;
        Epilogue scale = scales.chunk_factors(part.row + row, m, part.col + col, chunk, row_scales);
        loops().accumulate_tile({tile, kTileCols, m, n}, scale, sums.at(row, col), sums.ld, 1);
      }
    }
  }
}

// sums = or += the products over [first_k, first_k + k) of K; with the last of K, they are stored.
// sums: none where this is all of K.
template <class Kernel>
void multiply_pass(const Kernel& kernel, const Panels& panels, int64_t first_k, int64_t k,
                   bool is_last, Sums sums, const Output& out) {
  alignas(64) float tile[kTileSums];
  int64_t words = kernel.words(k), width = kernel.width_a(out.part.m), nr = kernel.nr;
  int64_t step_m = kTileSums / (width * nr) * width;
  for (int64_t j = 0; j < out.part.n; j += nr) {
    for (int64_t row = 0; row < out.part.m; row += step_m) {
      int64_t end = std::min(row + step_m, out.part.m);
      Sums to = sums.data == nullptr ? Sums{tile, nr} : Sums{sums.at(row, j), sums.ld};
      if (is_last) out.fetch(row, j, step_m);
      for (int64_t i = row; i < end; i += width) {
        kernel.micro(width, words, panels.a + i * words, panels.b + j * panels.words,
                     to.at(i - row, 0), to.ld, first_k > 0);
      }
      if (is_last) out.store(row, j, step_m, nr, to);
    }
  }
}

// Memory for rows x cols sums, in whole panels. Rows are not a power of two apart, where they would
// share a few sets of a cache.
inline Sums sums_of(Scratch& scratch, int64_t rows, int64_t cols, int64_t nr) {
  int64_t ld = ceil_div(cols, nr) * nr + 16;
  return {static_cast<float*>(scratch.get(rows * ld * 4)), ld};
}

// With subnormal bf16 numbers, which the bf16 dot product reads as zero: in FP32.
inline void multiply_exactly(const Output& out) {
  static thread_local Scratch scratch[3];
  const GemmKernel& exact = loops().gemm_f32;
  const auto& [a, b, k, scales, result] = out.product;
  Part part = out.part;
  uint32_t* packed_a = panels(scratch[0], part.m, exact.mr, k);
  uint32_t* packed_b = panels(scratch[1], kTileCols, exact.nr, k);
  Sums sums = sums_of(scratch[2], ceil_div(part.m, exact.mr) * exact.mr, kTileCols, exact.nr);
  pack_rows(exact, exact.pack_a, exact.width_a(part.m), a, part.row, part.m, k, packed_a);
  for (int64_t col = 0; col < part.n; col += kTileCols) {
    Output here = out;
    here.part = {part.row, part.col + col, part.m, std::min(kTileCols, part.n - col)};
    pack_rows(exact, exact.pack_b, exact.nr, b, here.part.col, here.part.n, k, packed_b);
    Panels both = {packed_a, packed_b, k};
    if (scales.by_chunk()) {
      multiply_chunks(exact, both, here.part, 0, k, scales, sums);
      here.store_all(sums);
    } else {
      multiply_pass(exact, both, 0, k, true, {nullptr, 0}, here);
    }
  }
}

// The elements of K that one pass over blocks of a takes.
template <class Kernel>
int64_t k_per_pass(const Kernel& kernel) {
  return kWordsPerPass / kernel.words(kChunk) * kChunk;
}

// Whether an element was lost, by the first panel of a block of a; only ever set.
using Lost = std::vector<std::atomic<bool>>;

// The rows of a part times its columns, over the elements [first_k, first_k + count) of K; `packed`
// are these columns of b. all: the sums of the part, or none where this is all of K. With the last
// elements of K, results are stored.
template <class Kernel>
void multiply_part(const Kernel& kernel, const Product& product, Part part, int64_t first_k,
                   int64_t count, const uint32_t* packed, Sums all, Lost& lost, int64_t threads) {
  const BothScales& scales = product.scales;
  const int64_t k = product.k;
  int64_t words = kernel.words(count), step_k = k_per_pass(kernel);
  int64_t panels_m = ceil_div(part.m, kernel.mr), panels_n = ceil_div(part.n, kernel.nr);
  int64_t step_m = kPanelsPerBlock * kernel.mr;
  int64_t tile = kTileCols / kernel.nr * kernel.nr;
  bool by_chunk = scales.by_chunk(), in_one_pass = k <= step_k;
  // Of all of K, so that the blocks of a are the same each time.
  double flops = 2.0 * static_cast<double>(part.m) * static_cast<double>(part.n) *
                 static_cast<double>(kernel.words(k));
  Split split = split_threads(panels_m, panels_n, flops < 2e5 ? 1 : threads, kernel);
  torch::stable::parallel_for(0, split.m * split.n, 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch for_a, for_sums;
    uint32_t* packed_a = panels(for_a, step_m, kernel.mr, kernel.words(std::min(count, step_k)));
    float row_scales[kPanelsPerBlock * kMaxRows];
    for (int64_t share = begin; share < end; ++share) {
      int64_t sm = share / split.n, sn = share % split.n;
      int64_t m_end = std::min(part.m, panels_m * (sm + 1) / split.m * kernel.mr);
      int64_t n_begin = panels_n * sn / split.n * kernel.nr;
      int64_t n_end = std::min(part.n, panels_n * (sn + 1) / split.n * kernel.nr);
      int64_t step_n = by_chunk && in_one_pass ? tile : n_end - n_begin;
      for (int64_t row = panels_m * sm / split.m * kernel.mr; row < m_end; row += step_m) {
        int64_t m = std::min(step_m, m_end - row);
        bool lost_here = lost[row / kernel.mr];
        scales.row_factors(part.row + row, m, row_scales);
        for (int64_t col = n_begin; col < n_end; col += step_n) {
          Part here = {part.row + row, part.col + col, m, std::min(step_n, n_end - col)};
          Output out = {product, here, row_scales};
          Sums sums = {nullptr, 0};
          if (all.data != nullptr) {
            sums = {all.at(row, col), all.ld};
          } else if (by_chunk || !in_one_pass) {
            sums = sums_of(for_sums, step_m, here.n, kernel.nr);
          }
          for (int64_t at_k = 0; !lost_here && (at_k == 0 || at_k < count); at_k += step_k) {
            int64_t first = first_k + at_k, pass = std::min(step_k, count - at_k);
            if (col == n_begin) {
              lost_here = pack_rows(kernel, kernel.pack_a, kernel.width_a(m),
                                    along_k(product.a, first), here.row, m, pass, packed_a);
            }
            if (lost_here) break;
            Panels both = {packed_a, packed + col * words + kernel.words(at_k) * kernel.nr, words};
            bool is_last = first + pass >= k;
            if (by_chunk) {
              multiply_chunks(kernel, both, here, first, pass, scales, sums);
              if (is_last) out.store_all(sums);
            } else {
              multiply_pass(kernel, both, first, pass, is_last, sums, out);
            }
          }
          if (lost_here) lost[row / kernel.mr] = true;
          if (lost_here && first_k + count >= k) multiply_exactly(out);
        }
      }
    }
  });
}

template <class Kernel>
void multiply(const Kernel& kernel, const Product& product, Resources use = all_threads()) {
  const int64_t k = product.k, m = product.a.rows, n = product.b.rows;
  static thread_local Scratch for_b, for_sums;
  int64_t nr = kernel.nr, step_k = kPassesTogether * k_per_pass(kernel);
  bool at_once = k <= step_k;
  int64_t fit = use.packed_bytes / 4 / std::max<int64_t>(1, kernel.words(std::min(k, step_k))) / nr;
  int64_t step_n = std::max<int64_t>(1, fit) * nr;
  int64_t step_m = std::max<int64_t>(1, at_once ? m : kRowsOfSums);
  for (int64_t row = 0; row < m; row += step_m) {
    for (int64_t col = 0; col < n; col += step_n) {
      Part part = {row, col, std::min(step_m, m - row), std::min(step_n, n - col)};
      Sums all = {nullptr, 0};
      if (!at_once) all = sums_of(for_sums, ceil_div(part.m, kernel.mr) * kernel.mr, part.n, nr);
      Lost lost(ceil_div(part.m, kernel.mr));
      for (int64_t first_k = 0; first_k == 0 || first_k < k; first_k += step_k) {
        int64_t count = std::min(step_k, k - first_k), words = kernel.words(count);
        uint32_t* packed = panels(for_b, part.n, nr, words);
        int64_t grain = std::max<int64_t>(1, kPiece / (nr * std::max<int64_t>(1, count)));
        std::atomic<bool> lost_b{false};
        torch::stable::parallel_for(
            0, ceil_div(part.n, nr), grain, [&](int64_t begin, int64_t end) {
              int64_t first = begin * nr, columns = std::min(part.n, end * nr) - first;
              if (pack_rows(kernel, kernel.pack_b, nr, along_k(product.b, first_k), col + first,
                            columns, count, packed + first * words)) {
                lost_b = true;
              }
            });
        if (lost_b) std::fill(lost.begin(), lost.end(), true);
        multiply_part(kernel, product, part, first_k, count, packed, all, lost, use.threads);
      }
    }
  }
}

}  // namespace mixprec::cpu
