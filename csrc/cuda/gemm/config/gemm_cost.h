// A model of the time of a GEMM on a Hopper GPU, in SM clocks. The constants are published or
// estimated, but for those of an H100. The model is only used to rank tiles.
#pragma once

#include <algorithm>

#include "cuda/gemm/config/gemm_tiles.h"
#include "cuda/gemm/config/tile_configs.h"

namespace mixprec::cuda::sm90 {

constexpr double kMathPerClock = 32;          // m * n per chunk: 4096 16-bit FLOP, or 8192 FP8
constexpr double kSharedBytesPerClock = 128;  // of one SM's shared memory
// One SM's share of L2: what explains the speeds of four tiles without clusters on an H100, at
// M = N = K = 8192 in bf16.
constexpr double kL2BytesPerClock = 44;
constexpr double kDramBytesPerClock = 2500;  // 4.3 TB/s at 1.7 GHz
constexpr double kLanesPerClock = 128;       // FP32 additions of one SM
constexpr double kStartClocks = 2000;        // launch, barriers, loading the first stage from DRAM
// The partial sums and the second kernel. Fitted to an H100, on which 64 x 4096 x 4096 in three
// parts took twice as long as its bytes need.
constexpr double kFinishClocks = 27000;

struct GemmWork {
  int64_t m, n, k;
  int in_bytes, out_bytes;  // of an element
};

// One chunk of K of one tile: the time of the slowest of the units that work in parallel. Elements
// outside a and b are not moved.
constexpr double chunk_clocks(const TileConfig& t, const GemmWork& w) {
  double m = t.block_m, n = t.block_n;
  double math = m * n / kMathPerClock;
  // Every 64 rows of the tile are one wgmma, which reads them and all of b; TMA writes both once.
  double shared = (m / 64 * (64 + n) + m + n) * kChunkBytes / kSharedBytesPerClock;
  double read = std::min<double>(m, w.m) + std::min<double>(n, w.n) / t.cluster;
  double l2 = read * kChunkBytes / kL2BytesPerClock;
  int per_element = t.accumulate == Accumulate::direct     ? 0
                    : t.accumulate == Accumulate::promoted ? 1
                                                           : 2;
  double promotion = per_element * m * n / kLanesPerClock;
  // Two consumers alternate: one promotes while the other's wgmma runs.
  double compute = t.consumers > 1 ? std::max(math, promotion) : math + promotion;
  return std::max({compute, shared, l2}) + l2 / 16;  // less traffic is better, also if hidden
}

// tiles: in units of clusters; chunks: of one split.
inline double gemm_clocks(const TileConfig& t, const GemmWork& w, const GemmTiles& tiles,
                          int64_t chunks, int sms) {
  int64_t slots = sms / t.cluster, waves = (tile_count(tiles) + slots - 1) / slots;
  bool split = tiles.splits > 1;
  double stored = std::min<double>(t.block_m, w.m) * std::min<double>(t.block_n, w.n) *
                  (split ? 4 : w.out_bytes);
  double per_tile = static_cast<double>(chunks) * chunk_clocks(t, w) + stored / kL2BytesPerClock;
  double m = static_cast<double>(w.m), n = static_cast<double>(w.n), k = static_cast<double>(w.k);
  double moved = (m + n) * k * w.in_bytes + m * n * w.out_bytes;
  double clocks =
      kStartClocks + std::max(static_cast<double>(waves) * per_tile, moved / kDramBytesPerClock);
  if (split) clocks += kFinishClocks + tiles.splits * m * n * 4 / kDramBytesPerClock;
  return clocks;
}

// The number of tile rows in a band that minimises the rows of a and columns of b that the tiles in
// flight read from L2.
constexpr int raster_group(const TileConfig& t, int64_t m_tiles, int sms) {
  int64_t slots = std::max(1, sms / t.cluster), best_bytes = INT64_MAX;
  int best = 1;
  for (int group = 1; group <= 16 && (group == 1 || group <= m_tiles); group *= 2) {
    int64_t bytes =
        int64_t{group} * t.block_m * t.cluster + (slots + group - 1) / group * t.block_n;
    if (bytes < best_bytes) best_bytes = bytes, best = group;
  }
  return best;
}

}  // namespace mixprec::cuda::sm90
