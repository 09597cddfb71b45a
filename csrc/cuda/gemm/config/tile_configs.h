// The tiles of the Hopper GEMM kernel: the planner chooses one, the launcher finds its kernel by
// its index, and the kernels are instantiated from the same table. And a model of the time that a
// GEMM takes with each, in SM clocks: its constants are published or estimated, but for those of an
// H100, and it is only used to rank tiles. Host only, no CUDA, no torch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda/gemm/config/gemm_args.h"
#include "math/hd.h"

namespace mixprec::cuda::sm90 {

// Which dimension of an operand is contiguous in shared memory: K, or the other one (M or N).
enum class Major { k, mn };

// All tiles have the 128-byte swizzle: the 16-byte word w of the 128-byte row r is stored at word
// w ^ (r % 8). Addresses and strides are in bytes.
// K-major: rows of 128 bytes of K; groups of 8 rows are `stride` apart; `leading` is not used.
// MN-major: rows of 128 bytes of M or N, one per k; groups of 8 rows are `stride` apart, and every
// further 128 bytes of M or N `leading` apart.
MIXPREC_HD uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t swizzle_128 = uint64_t{1} << 62;
  return swizzle_128 | (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32;
}

// direct: wgmma accumulates over all of K. promoted: FP8 tensor cores keep about 13 bits of a sum,
// so the sum of every 128 of K is added to FP32 registers. scaled: promoted, with scales for each
// 128 of K.
enum class Accumulate { direct, promoted, scaled };

// Products with tiles of their own: CUDA_FAMILIES of mixprec/ops/_dispatch/gemm_table.py.
enum class GemmFamily { sixteen_bit, fp8, fp8_blocks, fp8_fast };
constexpr int kFamilies = 4;

constexpr GemmFamily family_of(bool fp8, Accumulate accumulate) {
  if (!fp8) return GemmFamily::sixteen_bit;
  return accumulate == Accumulate::promoted ? GemmFamily::fp8
         : accumulate == Accumulate::scaled ? GemmFamily::fp8_blocks
                                            : GemmFamily::fp8_fast;
}

// One tile, for every pair of operand types and every layout of its family (fp8 or 16-bit).
struct TileConfig {
  bool fp8;  // else fp16 or bf16
  Accumulate accumulate;
  int block_m, block_n;
  int consumers;  // warpgroups that compute; one more loads
  int cluster;    // blocks that share a tile of b
};

// clang-format off
constexpr std::array<TileConfig, 17> kTileConfigs = {{
    {false, Accumulate::direct, 64, 128, 1, 1},
    {false, Accumulate::direct, 128, 128, 2, 1},
    {false, Accumulate::direct, 128, 192, 2, 2},
    {false, Accumulate::direct, 128, 256, 2, 1},
    {false, Accumulate::direct, 128, 256, 2, 2},
    {true, Accumulate::promoted, 64, 128, 1, 1},
    {true, Accumulate::promoted, 128, 128, 2, 1},
    {true, Accumulate::promoted, 128, 192, 2, 2},
    {true, Accumulate::promoted, 256, 128, 2, 1},
    {true, Accumulate::promoted, 256, 128, 2, 2},
    {true, Accumulate::scaled, 64, 128, 1, 1},
    {true, Accumulate::scaled, 128, 128, 2, 1},
    {true, Accumulate::scaled, 256, 128, 2, 1},
    {true, Accumulate::direct, 64, 128, 1, 1},
    {true, Accumulate::direct, 128, 192, 2, 2},
    {true, Accumulate::direct, 128, 256, 2, 1},
    {true, Accumulate::direct, 128, 256, 2, 2},
}};
// clang-format on
constexpr int kTileConfigCount = static_cast<int>(kTileConfigs.size());
constexpr int kNotMeasured = -1;  // in the place of the index of a tile config

constexpr GemmFamily family_of(const TileConfig& t) { return family_of(t.fp8, t.accumulate); }

constexpr int kChunkBytes =
    128;  // of K in one stage of the ring, for each row of a and column of b

constexpr int chunk_elements(const TileConfig& t) { return t.fp8 ? kChunkBytes : kChunkBytes / 2; }

// Per block: for each stage the tiles of a and b, scales of b's columns and two barriers, for each
// consumer 16 KiB of output.
constexpr int64_t shared_bytes(const TileConfig& t, int stages) {
  int scales = t.accumulate == Accumulate::scaled ? t.block_n * 4 : 0;
  return int64_t{stages} * ((t.block_m + t.block_n) * kChunkBytes + scales + 16) +
         int64_t{t.consumers} * (16 << 10);
}

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
