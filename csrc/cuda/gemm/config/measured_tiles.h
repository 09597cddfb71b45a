// The tiles that `python -m mixprec.bench tune` measured to be the fastest on the user's GPU, which
// the planner prefers. Host only, no CUDA, no torch.
#pragma once

#include <atomic>
#include <span>

#include "cuda/gemm/config/gemm_plan.h"

namespace mixprec::cuda::sm90 {

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
