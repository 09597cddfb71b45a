// The tiles of the Hopper GEMM kernel: the planner chooses one, the launcher finds its kernel by
// its index, and the kernels are instantiated from the same table. Host only, no CUDA, no torch.
#pragma once

#include <array>
#include <cstdint>

namespace mixprec::cuda::sm90 {

// direct: wgmma adds up all of K. promoted: FP8 tensor cores keep about 13 bits of a sum, so each
// 128 of K are added to FP32 registers. scaled: promoted, with scales for each 128 of K.
enum class Accumulate { direct, promoted, scaled };

// One tile, for every pair of operand types of its family and every layout that the family has.
struct TileConfig {
  bool fp8;  // else fp16 or bf16
  Accumulate accumulate;
  int block_m, block_n;
  int consumers;  // warpgroups that compute; one more loads
  int cluster;    // blocks that share their tile of b
  bool base;      // may be chosen unmeasured
};

constexpr std::array<TileConfig, 15> kTileConfigs = {{
    {false, Accumulate::direct, 64, 128, 1, 1, true},
    {false, Accumulate::direct, 128, 128, 2, 1, true},
    {false, Accumulate::direct, 128, 256, 2, 1, true},
    {false, Accumulate::direct, 128, 256, 2, 2, false},
    {true, Accumulate::promoted, 64, 128, 1, 1, true},
    {true, Accumulate::promoted, 128, 128, 2, 1, true},
    {true, Accumulate::promoted, 256, 128, 2, 1, true},
    {true, Accumulate::promoted, 256, 128, 2, 2, false},
    {true, Accumulate::scaled, 64, 128, 1, 1, true},
    {true, Accumulate::scaled, 128, 128, 2, 1, true},
    {true, Accumulate::scaled, 256, 128, 2, 1, true},
    {true, Accumulate::scaled, 256, 128, 2, 2, false},
    {true, Accumulate::direct, 64, 128, 1, 1, true},
    {true, Accumulate::direct, 128, 256, 2, 1, true},
    {true, Accumulate::direct, 128, 256, 2, 2, false},
}};
constexpr int kTileConfigCount = static_cast<int>(kTileConfigs.size());

constexpr int kChunkBytes =
    128;  // of K in one stage of the ring, for each row of a and column of b

constexpr int chunk_elements(const TileConfig& t) { return t.fp8 ? kChunkBytes : kChunkBytes / 2; }

// Of a block: per stage the tiles of a and b and two barriers, per consumer 16 KiB for its output.
constexpr int64_t shared_bytes(const TileConfig& t, int stages) {
  return int64_t{stages} * ((t.block_m + t.block_n) * kChunkBytes + 16) +
         int64_t{t.consumers} * (16 << 10);
}

}  // namespace mixprec::cuda::sm90
