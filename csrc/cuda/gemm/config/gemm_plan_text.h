// What the planner was asked for as text, and why it found no plan.
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

}  // namespace mixprec::cuda::sm90
