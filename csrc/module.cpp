// mixprec._C: the choice of the loops for this processor, and build information for Python. The ops
// register themselves when this library is loaded.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/products.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

struct Level {
  const Loops* table;
  bool is_faster = true;  // than the levels below
};

#if defined(__x86_64__) && defined(__linux__)
constexpr unsigned kAmxTileData = 18;  // a component of the processor's state (XCR0)

// Whether processor and kernel have AMX's tiles and bf16 products.
bool has_amx() {
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24;
  unsigned eax, ebx, ecx, edx;
  unsigned long components = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & bf16) && (edx & tile) &&
         syscall(SYS_arch_prctl, 0x1021 /* ARCH_GET_XCOMP_SUPP */, &components) == 0 &&
         (components >> kAmxTileData & 1);
}

// Linux gives a process tiles once it asks, and then saves 8 KB more a thread where they are used.
void ask_for_tiles() {
  if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, kAmxTileData) != 0) {
    throw std::runtime_error("MIXPREC_ISA=amx: the kernel refuses AMX to this process: " +
                             std::string(std::strerror(errno)));
  }
}
#else
bool has_amx() { return false; }
void ask_for_tiles() {}
#endif

// Those that this processor can run, lowest first.
std::vector<Level> levels() {
  std::vector<Level> levels{{&base::table}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2) levels.push_back({&avx2::table});
  if (avx512) levels.push_back({&avx512::table});
  // Of the processors with bf16 only Intel's Cooper Lake has no VBMI; it multiplies in FP32 anyway.
  // Intel's cores begin a bf16 dot product every second cycle and two FP32 FMAs every cycle: half
  // the FLOP/s. By name, not by a measurement: the two round differently, and runs are to be
  // repeated.
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) {
    levels.push_back({&avx512::table_bf16, !__builtin_cpu_is("intel")});
    // Not chosen by itself: no run on a processor with AMX has measured it yet.
    if (has_amx()) levels.push_back({&avx512::table_amx, false});
    levels.push_back({&avx512::table_amx_model, false});
  }
#endif
  return levels;
}

std::vector<std::string> isa_available() {
  std::vector<std::string> names;
  for (const Level& level : levels()) names.emplace_back(level.table->isa);
  return names;
}

const Loops& select() {
  const char* variable = std::getenv("MIXPREC_ISA");
  const std::string wanted = variable == nullptr ? "" : variable;
  const Loops* best = nullptr;
  std::string names;
  for (const Level& level : levels()) {
    if (wanted == level.table->isa) {
      if (wanted == "amx") ask_for_tiles();
      return *level.table;
    }
    if (level.is_faster) best = level.table;
    names += (names.empty() ? "" : " ") + std::string(level.table->isa);
  }
  if (wanted.empty()) return *best;
  throw std::runtime_error("MIXPREC_ISA=" + wanted +
                           " is not a level of this processor; it has: " + names);
}

// A level that is asked for is one of our kernels.
bool select_products() {
  const char* variable = std::getenv("MIXPREC_PRODUCTS");
  const std::string wanted = variable == nullptr ? "" : variable;
  if (wanted.empty()) return has_amx() && std::getenv("MIXPREC_ISA") == nullptr;
  if (wanted == "torch" || wanted == "mixprec") return wanted == "torch";
  throw std::runtime_error("MIXPREC_PRODUCTS must be torch or mixprec, got " + wanted);
}

std::map<std::string, std::string> build_info() {
  return {{"compiler", __VERSION__},
          {"torch", MIXPREC_BUILT_WITH_TORCH},
          {"no_cuda", MIXPREC_NO_CUDA},  // why the CUDA kernels were not built; empty if they were
          {"cuda_archs", MIXPREC_CUDA_ARCHS}};  // for which GPUs they were built
}

}  // namespace

const Loops& loops() {
  static const Loops& chosen = select();
  return chosen;
}

bool products_are_torchs() {
  static const bool chosen = select_products();
  return chosen;
}

PYBIND11_MODULE(_C, m) {
  loops();  // an unusable MIXPREC_ISA is an ImportError, not a crash in a thread
  products_are_torchs();
  m.doc() =
      "The compiled half of mixprec: CPU kernels (registered as torch ops) and build information.";
  m.def(
      "isa", [] { return std::string(loops().isa); },
      "The instruction set in use: base, avx2, avx512 or avx512_bf16. MIXPREC_ISA names another, "
      "also "
      "amx, or amx_model, which computes the tiles of AMX without AMX, for tests.");
  m.def("products_are_torchs", &products_are_torchs,
        "Whether bf16 products of layers are torch's (MIXPREC_PRODUCTS overrides).");
  m.def("isa_available", &isa_available, "The levels that this processor can run, lowest first.");
  m.def("build_info", &build_info, "The compiler and the torch that this library was built with.");
}

}  // namespace mixprec::cpu

// What the headers of GCC 11 and later take from glibc 2.32 and libstdc++ 3.4.29, defined here, so
// that a wheel loads on older systems as well. Without it the linker takes what is missing from the
// libraries of torch, which export it by chance.
#ifdef __GLIBC__
// Read by std::shared_ptr: its counters are atomic also in a process with one thread.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif

#ifdef __GLIBCXX__
// Called where the size of an array overflows.
void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }
// C++20 has added to these, or moved what they had.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
#endif
