// The tiles of the Hopper GEMM kernel: the planner chooses one, the launcher finds its kernel by
// its index, and the kernels are instantiated from the same table. Host only, no CUDA, no torch.
#pragma once

#include <array>
#include <cstdint>

namespace mixprec::cuda::sm90 {

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

}  // namespace mixprec::cuda::sm90
