// The planner's structs as text, and the reason against each tile that was not chosen.
#pragma once

#include <sstream>

#include "cuda/gemm/config/gemm_plan.h"

namespace mixprec::cuda::sm90 {

inline const char* to_string(Dtype d) {
  constexpr const char* names[] = {"fp32", "bf16", "fp16", "e4m3", "e5m2", "fp64"};
  return names[static_cast<int>(d)];
}

inline const char* to_string(Major m) { return m == Major::k ? "K-major" : "MN-major"; }

inline const char* to_string(Granularity g) {
  constexpr const char* names[] = {"tensor", "row", "block1x128", "block128x128"};
  return names[static_cast<int>(g)];
}

inline const char* to_string(Accumulate a) {
  constexpr const char* names[] = {"direct", "promoted", "scaled"};
  return names[static_cast<int>(a)];
}

inline std::string to_string(const TileConfig& t) {
  std::ostringstream s;
  s << (t.fp8 ? "fp8 " : "16-bit ") << to_string(t.accumulate) << ' ' << t.block_m << 'x'
    << t.block_n << ", " << t.consumers << (t.consumers > 1 ? " consumers" : " consumer");
  if (t.cluster > 1) s << ", cluster of " << t.cluster;
  return s.str();
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

inline std::string to_string(const DeviceProperties& g) {
  std::ostringstream s;
  s << "compute capability " << g.major << '.' << g.minor << ", " << g.sms << " SMs, "
    << g.shared_bytes << " bytes of shared memory";
  return s.str();
}

inline std::string to_string(const GemmConfig& c) {
  std::ostringstream s;
  s << "tile config " << c.tile_config << " (" << to_string(kTileConfigs[c.tile_config]) << "), "
    << c.stages << " stages, " << c.tiles.m_tiles << 'x' << c.tiles.n_tiles << " tiles in bands of "
    << c.tiles.group << ", " << c.tiles.splits << " splits of " << c.chunks_per_split << " chunks, "
    << c.grid << " blocks with " << c.shared_bytes << " bytes each, workspace " << c.workspace_bytes
    << ", stored " << (c.tma_store ? "by TMA" : "plainly") << ", about "
    << static_cast<int64_t>(c.clocks) << " clocks";
  return s.str();
}

// One line per tile config: the plan, or the reason why it was not chosen.
inline std::array<std::string, kTileConfigCount> explain(
    const GemmProblem& p, const DeviceProperties& gpu, const ConfigOverride& forced = {},
    std::span<const MeasuredGemm> measured = kMeasured) {
  std::array<std::string, kTileConfigCount> lines;
  std::optional<GemmConfig> plan = plan_gemm(p, gpu, forced, measured);
  for (int tile_config = 0; tile_config < kTileConfigCount; ++tile_config) {
    const char* reason =
        why_not(kTileConfigs[tile_config], p, gpu, tile_config == forced.tile_config);
    std::ostringstream s;
    if (plan && plan->tile_config == tile_config) {
      s << "chosen: " << to_string(*plan);
    } else if (reason != nullptr) {
      s << reason;
    } else if (forced.tile_config >= 0 && forced.tile_config != tile_config) {
      s << "tile config " << forced.tile_config << " is forced";
    } else if (std::optional<GemmConfig> own = best_on(tile_config, p, gpu, forced); !own) {
      s << "the partial sums of " << forced.splits << " splits exceed " << kMaxWorkspaceBytes
        << " bytes";
    } else if (own->clocks < plan->clocks) {
      s << "tile config " << plan->tile_config << " was measured to be faster";
    } else {
      s << "about " << static_cast<int64_t>(own->clocks) << " clocks, tile config "
        << plan->tile_config << " " << static_cast<int64_t>(plan->clocks);
    }
    lines[tile_config] = s.str();
  }
  return lines;
}

}  // namespace mixprec::cuda::sm90
