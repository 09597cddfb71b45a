// Chooses the instance of the Hopper kernel that runs a GEMM, and its parameters. Host only, no
// CUDA, no torch; a pure function of the problem.
#pragma once

#include <atomic>
#include <optional>
#include <span>
#include <sstream>
#include <string>

#include "cuda/gemm/config/tile_configs.h"
#include "dispatch.h"

namespace mixprec::cuda::sm90 {

// The elements that share a scale (mixprec/ops/quantize.py); the last two are applied to each 128
// of K.
enum class Granularity { tensor, row, block1x128, block128x128 };

struct GemmProblem {
  int64_t m, n, k;
  Dtype a, b, out;
  Major a_major = Major::k, b_major = Major::k;
  Granularity a_scale = Granularity::tensor, b_scale = Granularity::tensor;
  bool fast_accum = false;
  bool accumulate = false;  // into fp32
  // The base and the pitch are multiples of 16 bytes.
  bool a_aligned = true, b_aligned = true, out_aligned = true;
};

struct DeviceProperties {
  int major, minor;  // compute capability
  int sms;
  int64_t shared_bytes;  // per block, at most
};

// Overrides the planner's choice, for tests and measurements; -1 for tile_config and 0 for the
// others leave the choice to the planner.
struct ConfigOverride {
  int tile_config = -1, splits = 0, group = 0;
};

struct GemmConfig {
  int tile_config;  // index into kTileConfigs
  int stages;       // of the ring
  GemmTiles tiles;
  int chunks_per_split;
  int64_t grid;             // blocks: a multiple of the cluster
  int64_t shared_bytes;     // of a block
  int64_t workspace_bytes;  // fp32 [splits, m, n]; 0 for one split
  bool tma_store;
  double clocks;  // by the cost model
};

constexpr int kMaxStages = 8, kMinStages = 2;
constexpr int64_t kMaxWorkspaceBytes = 64 << 20;
// Fewer chunks than this do not hide the latency of the first one.
constexpr int64_t kMinChunksPerSplit = 4;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr bool is_8bit(Dtype d) { return d == Dtype::e4m3 || d == Dtype::e5m2; }

constexpr bool is_per_chunk(Granularity g) {
  return g == Granularity::block1x128 || g == Granularity::block128x128;
}

constexpr Accumulate accumulate_of(const GemmProblem& p) {
  if (!is_8bit(p.a)) return Accumulate::direct;
  if (is_per_chunk(p.a_scale) || is_per_chunk(p.b_scale)) return Accumulate::scaled;
  return p.fast_accum ? Accumulate::direct : Accumulate::promoted;
}

// As many as fit into shared memory.
constexpr int stages_of(const TileConfig& t, const DeviceProperties& gpu) {
  int stages = kMaxStages;
  while (stages >= kMinStages && shared_bytes(t, stages) > gpu.shared_bytes) --stages;
  return stages;
}

// Why no tile can compute the problem; null if one can.
inline const char* why_none(const GemmProblem& p, const DeviceProperties& gpu) {
  bool fp8 = is_8bit(p.a) && is_8bit(p.b), sixteen = p.a == Dtype::f16 || p.a == Dtype::bf16;
  if (gpu.major != 9 || gpu.minor != 0) return "the GPU is not of compute capability 9.0";
  if (!fp8 && !(sixteen && p.a == p.b)) return "a and b are not both fp16, both bf16 or both FP8";
  if (p.accumulate && p.out != Dtype::f32) return "only fp32 is accumulated into";
  if (p.m <= 0 || p.n <= 0 || p.k <= 0) return "m, n or k is 0: there is nothing to multiply";
  if (p.m > INT32_MAX - 512 || p.n > INT32_MAX - 512 || p.k > INT32_MAX - 512) {
    return "m, n or k does not fit into 32 bits";
  }
  if (!p.a_aligned) return "a's base or pitch is no multiple of 16 bytes: it has to be copied";
  if (!p.b_aligned) return "b's base or pitch is no multiple of 16 bytes: it has to be copied";
  if (fp8 && p.a_major != Major::k) return "a is FP8 and not contiguous along K: has to be copied";
  if (fp8 && p.b_major != Major::k) return "b is FP8 and not contiguous along K: has to be copied";
  if (sixteen && (is_per_chunk(p.a_scale) || is_per_chunk(p.b_scale))) {
    return "scales of blocks along K are for FP8 operands";
  }
  return nullptr;
}

// Why this tile cannot compute the problem, or should not; null if it may. forced: only what is
// impossible rules it out.
inline const char* why_not(const TileConfig& t, const GemmProblem& p, const DeviceProperties& gpu,
                           bool forced = false) {
  if (const char* reason = why_none(p, gpu)) return reason;
  if (t.fp8 != is_8bit(p.a)) return t.fp8 ? "for FP8 operands" : "for 16-bit operands";
  if (t.accumulate != accumulate_of(p)) {
    return t.accumulate == Accumulate::direct     ? "keeps the tensor core's short accumulator"
           : t.accumulate == Accumulate::promoted ? "not for these scales or fast_accum"
                                                  : "for scales of blocks along K";
  }
  if (stages_of(t, gpu) < kMinStages) return "two stages do not fit into shared memory";
  if (gpu.sms < t.cluster) return "the GPU is smaller than a cluster";
  if (forced) return nullptr;
  bool too_big = 2 * p.m <= t.block_m * t.cluster || 2 * p.n <= t.block_n;
  if (too_big && t.consumers * t.cluster > 1)
    return "at least half of each tile would lie outside of C";
  return nullptr;
}

// The problem on one tile with at most `splits` splits of K, none of them empty. Nothing if the
// partial sums would need too much memory.
inline std::optional<GemmConfig> config_of(int tile_config, const GemmProblem& p,
                                           const DeviceProperties& gpu, int64_t splits, int group) {
  const TileConfig& t = kTileConfigs[tile_config];
  int64_t chunks = ceil_div(p.k, chunk_elements(t));
  int64_t per_split = ceil_div(chunks, std::min(splits, chunks));
  splits = ceil_div(chunks, per_split);
  int64_t workspace = splits > 1 ? p.m * p.n * 4 : 0;
  if (workspace > kMaxWorkspaceBytes / splits) return std::nullopt;
  int64_t m_tiles = ceil_div(p.m, t.block_m * t.cluster);
  GemmTiles tiles = {static_cast<int>(m_tiles), static_cast<int>(ceil_div(p.n, t.block_n)),
                     static_cast<int>(splits),
                     group > 0 ? group : raster_group(t, m_tiles, gpu.sms)};
  int stages = stages_of(t, gpu);
  GemmWork work = {p.m, p.n, p.k, static_cast<int>(element_size(p.a)),
                   static_cast<int>(element_size(p.out))};
  return GemmConfig{tile_config,
                    stages,
                    tiles,
                    static_cast<int>(per_split),
                    std::min<int64_t>(tile_count(tiles), gpu.sms / t.cluster) * t.cluster,
                    shared_bytes(t, stages),
                    workspace * splits,
                    p.out_aligned && splits == 1,
                    gemm_clocks(t, work, tiles, per_split, gpu.sms)};
}

// The best number of splits for one tile. K is split only where the tiles of C leave SMs idle.
inline std::optional<GemmConfig> best_on(int tile_config, const GemmProblem& p,
                                         const DeviceProperties& gpu,
                                         const ConfigOverride& forced) {
  if (forced.splits > 0) return config_of(tile_config, p, gpu, forced.splits, forced.group);
  const TileConfig& t = kTileConfigs[tile_config];
  int64_t tiles = ceil_div(p.m, t.block_m * t.cluster) * ceil_div(p.n, t.block_n);
  int64_t most =
      std::min(gpu.sms / t.cluster / tiles, ceil_div(p.k, chunk_elements(t)) / kMinChunksPerSplit);
  std::optional<GemmConfig> best = config_of(tile_config, p, gpu, 1, forced.group);
  // Beyond 8, in steps of an eighth, because the plan is computed for each call.
  for (int64_t splits = 2; splits <= most; splits += std::max<int64_t>(1, splits / 8)) {
    std::optional<GemmConfig> c = config_of(tile_config, p, gpu, splits, forced.group);
    if (c && c->clocks < best->clocks) best = c;
  }
  return best;
}

// The config that the override allows: on the tile that was measured to be the fastest for the like
// of this problem, if that tile may compute it; else the cheapest, the first one of equals. Nothing
// if no tile can, or not the one that is forced: reasons_against() gives the reasons.
inline std::optional<GemmConfig> plan_gemm(const GemmProblem& p, const DeviceProperties& gpu,
                                           const ConfigOverride& forced = {},
                                           int measured = kNotMeasured) {
  std::optional<GemmConfig> best;
  if (forced.tile_config < 0 && measured != kNotMeasured &&
      why_not(kTileConfigs[measured], p, gpu) == nullptr) {
    best = best_on(measured, p, gpu, forced);
    if (best) return best;
  }
  for (int tile_config = 0; tile_config < kTileConfigCount; ++tile_config) {
    bool requested = tile_config == forced.tile_config;
    if ((forced.tile_config >= 0 && !requested) ||
        why_not(kTileConfigs[tile_config], p, gpu, requested) != nullptr)
      continue;
    std::optional<GemmConfig> c = best_on(tile_config, p, gpu, forced);
    if (c && (!best || c->clocks < best->clocks)) best = c;
  }
  return best;
}

inline const char* to_string(Dtype d) {
  constexpr const char* names[] = {"fp32", "bf16", "fp16", "e4m3", "e5m2", "fp64"};
  return names[static_cast<int>(d)];
}

inline const char* to_string(Major m) { return m == Major::k ? "K-major" : "MN-major"; }

inline const char* to_string(Granularity g) {
  constexpr const char* names[] = {"tensor", "row", "block1x128", "block128x128"};
  return names[static_cast<int>(g)];
}

inline std::string to_string(const GemmProblem& p) {
  std::ostringstream s;
  s << p.m << 'x' << p.n << 'x' << p.k << ": a " << to_string(p.a) << ' ' << to_string(p.a_major)
    << (p.a_aligned ? "" : " unaligned") << " scaled by " << to_string(p.a_scale) << ", b "
    << to_string(p.b) << ' ' << to_string(p.b_major) << (p.b_aligned ? "" : " unaligned")
    << " scaled by " << to_string(p.b_scale) << (p.accumulate ? ", added into " : ", out ")
    << to_string(p.out) << (p.out_aligned ? "" : " unaligned")
    << (p.fast_accum ? ", fast_accum" : "");
  return s.str();
}

// Why no tile config runs the problem: each reason once.
inline std::string reasons_against(const GemmProblem& p, const DeviceProperties& gpu,
                                   const ConfigOverride& forced = {}) {
  std::string all;
  for (int tile_config = 0; tile_config < kTileConfigCount; ++tile_config) {
    bool is_forced = tile_config == forced.tile_config;
    const char* reason = why_not(kTileConfigs[tile_config], p, gpu, is_forced);
    std::string why = reason != nullptr ? reason
                      : forced.tile_config >= 0 && !is_forced
                          ? "tile config " + std::to_string(forced.tile_config) + " is forced"
                          : "the partial sums of " + std::to_string(forced.splits) +
                                " splits exceed " + std::to_string(kMaxWorkspaceBytes) + " bytes";
    if (all.find(why) == std::string::npos) all += "; " + why;
  }
  return all;
}

// As in mixprec/ops/_dispatch/gemm_table.py, where the limits are explained.
enum class SizeClass { thin, unaligned, small, medium, large };
constexpr int kSizeClasses = 5;

constexpr SizeClass size_class(const GemmProblem& p) {
  int64_t bytes = element_size(p.a);
  if (p.m <= 64 || p.n <= 64) return SizeClass::thin;
  if (p.n * bytes % 16 != 0 || p.k * bytes % 16 != 0) return SizeClass::unaligned;
  double products = static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  auto cube = [](double side) { return side * side * side; };
  return products <= cube(1448)   ? SizeClass::small
         : products <= cube(4096) ? SizeClass::medium
                                  : SizeClass::large;
}

// A tile config, or kNotMeasured, for each family and size class; it may be read while it is set.
class MeasuredTiles {
 public:
  static constexpr int kCount = kFamilies * kSizeClasses;

  MeasuredTiles() {
    for (std::atomic<int>& tile_config : tile_configs_) tile_config = kNotMeasured;
  }

  // False, and nothing is changed, unless there are kCount numbers (size classes inside of
  // families) of tile configs of their families.
  bool set(std::span<const int64_t> tile_configs) {
    if (tile_configs.size() != kCount) return false;
    for (int i = 0; i < kCount; ++i) {
      int64_t found = tile_configs[i];
      if (found < kNotMeasured || found >= kTileConfigCount) return false;
      if (found == kNotMeasured) continue;
      if (static_cast<int>(family_of(kTileConfigs[found])) != i / kSizeClasses) return false;
    }
    for (int i = 0; i < kCount; ++i) tile_configs_[i] = static_cast<int>(tile_configs[i]);
    return true;
  }

  int of(const GemmProblem& p) const {
    int family = static_cast<int>(family_of(is_8bit(p.a), accumulate_of(p)));
    return tile_configs_[family * kSizeClasses + static_cast<int>(size_class(p))];
  }

 private:
  std::array<std::atomic<int>, kCount> tile_configs_;
};

}  // namespace mixprec::cuda::sm90
