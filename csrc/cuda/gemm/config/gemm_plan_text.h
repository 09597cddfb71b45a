// The planner's structs in words, and the reason against each row that was not chosen.
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

inline std::string to_string(const GemmRow& r) {
  std::ostringstream s;
  s << (r.fp8 ? "fp8 " : "16-bit ") << to_string(r.accumulate) << ' ' << r.block_m << 'x'
    << r.block_n << ", " << r.consumers << (r.consumers > 1 ? " consumers" : " consumer");
  if (r.cluster > 1) s << ", cluster of " << r.cluster;
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

inline std::string to_string(const GpuFacts& g) {
  std::ostringstream s;
  s << "compute capability " << g.major << '.' << g.minor << ", " << g.sms << " SMs, "
    << g.shared_bytes << " bytes of shared memory";
  return s.str();
}

inline std::string to_string(const GemmConfig& c) {
  std::ostringstream s;
  s << "row " << c.row << " (" << to_string(kGemmRows[c.row]) << "), " << c.stages << " stages, "
    << c.tiles.m_tiles << 'x' << c.tiles.n_tiles << " tiles in bands of " << c.tiles.group << ", "
    << c.tiles.splits << " splits of " << c.chunks_per_split << " chunks, " << c.grid
    << " blocks with " << c.shared_bytes << " bytes each, workspace " << c.workspace_bytes
    << ", stored " << (c.tma_store ? "by TMA" : "plainly") << ", about "
    << static_cast<int64_t>(c.clocks) << " clocks";
  return s.str();
}

// One line per row: the plan, or why it is another one.
inline std::array<std::string, kGemmRowCount> explain(
    const GemmProblem& p, const GpuFacts& gpu, const GemmWish& wish = {},
    std::span<const MeasuredGemm> measured = kMeasured) {
  std::array<std::string, kGemmRowCount> lines;
  std::optional<GemmConfig> plan = plan_gemm(p, gpu, wish, measured);
  for (int row = 0; row < kGemmRowCount; ++row) {
    const char* reason = why_not(kGemmRows[row], p, gpu, row == wish.row);
    std::ostringstream s;
    if (plan && plan->row == row) {
      s << "chosen: " << to_string(*plan);
    } else if (reason != nullptr) {
      s << reason;
    } else if (wish.row >= 0 && wish.row != row) {
      s << "row " << wish.row << " is forced";
    } else if (std::optional<GemmConfig> own = best_on(row, p, gpu, wish); !own) {
      s << "the partial sums of " << wish.splits << " splits exceed " << kMaxWorkspaceBytes
        << " bytes";
    } else if (own->clocks < plan->clocks) {
      s << "row " << plan->row << " was measured to be faster";
    } else {
      s << "about " << static_cast<int64_t>(own->clocks) << " clocks, row " << plan->row << " "
        << static_cast<int64_t>(plan->clocks);
    }
    lines[row] = s.str();
  }
  return lines;
}

}  // namespace mixprec::cuda::sm90
