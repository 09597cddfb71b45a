// Selects the table of loops for this processor.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

struct Level {
  const Loops* table;
  bool runs_here;
  bool is_faster = true;  // than the levels below
};

struct Levels {
  Level level[4];
  int count;
};

Levels levels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // Of the processors with bf16 only Intel's Cooper Lake has no VBMI; it multiplies in FP32 anyway.
  bool bf16 =
      avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  // Intel's cores begin a bf16 dot product every second cycle and two FP32 FMAs every cycle: half
  // the FLOP/s. By name, not by a measurement: the two round differently, and runs are to be
  // repeated.
  return {{{&base::table, true},
           {&avx2::table, avx2},
           {&avx512::table, avx512},
           {&avx512::table_bf16, bf16, !__builtin_cpu_is("intel")}},
          4};
#else
  return {{{&base::table, true}}, 1};
#endif
}

const Loops& select() {
  Levels all = levels();
  const char* wanted = std::getenv("MIXPREC_ISA");
  const Loops* best = nullptr;
  for (int i = 0; i < all.count; ++i) {
    bool named = wanted != nullptr && std::strcmp(wanted, all.level[i].table->isa) == 0;
    if (named && all.level[i].runs_here) return *all.level[i].table;
    if (all.level[i].runs_here && all.level[i].is_faster) best = all.level[i].table;
  }
  if (wanted != nullptr && *wanted != '\0') {
    throw std::runtime_error(std::string("MIXPREC_ISA=") + wanted +
                             " is not a level of this processor; it has: " + isa_available());
  }
  return *best;
}

}  // namespace

const Loops& loops() {
  static const Loops& chosen = select();
  return chosen;
}

const char* isa_available() {
  static const std::string names = [] {
    std::string joined;
    Levels all = levels();
    for (int i = 0; i < all.count; ++i) {
      if (all.level[i].runs_here) joined += (i ? " " : "") + std::string(all.level[i].table->isa);
    }
    return joined;
  }();
  return names.c_str();
}

}  // namespace mixprec::cpu
