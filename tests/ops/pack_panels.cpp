// The packing loops of every level that this processor has write nothing beyond their panels.
// Prints what differs. Compiled and run by test_pack_panels.py.
#include <cstdio>
#include <vector>

#include "cpu/simd/loops.h"

using namespace mixprec;
using namespace mixprec::cpu;

constexpr int kBeyond = 64;
constexpr uint32_t kUntouched = 0xDEADBEEF;

template <class Kernel>
void check(const char* isa, const char* what, const Kernel& kernel,
           decltype(GemmKernel::pack_a) pack, int64_t width, int64_t step = 1) {
  std::vector<unsigned char> source(1 << 18, 0x38);
  for (Dtype dtype : {Dtype::f16, Dtype::bf16, Dtype::e4m3, Dtype::e5m2}) {
    for (int64_t k = step; k < 80; k += step) {
      for (int64_t rows : {width, width - 1, 3 * width + 1}) {
        for (bool adjacent : {false, true}) {
          int64_t of_panel = kernel.words(k);
          int64_t words = (rows + width - 1) / width * width * of_panel;
          std::vector<uint32_t> out(words + kBeyond, kUntouched);
          pack(dtype, source.data(), adjacent ? 1 : 333, adjacent ? 97 : 1, rows, k, out.data(),
               of_panel, width);
          int beyond = 0;
          for (int i = 0; i < kBeyond; ++i) beyond += out[words + i] != kUntouched;
          if (beyond > 0) std::printf("%s %s: k %ld, %d words beyond\n", isa, what, k, beyond);
        }
      }
    }
  }
}

void check(const Loops& l) {
  for (const GemmKernel* kernel : {&l.gemm_f32, &l.gemm_bf16}) {
    for (int64_t width = kernel->row_step; width <= kernel->mr; width += kernel->row_step) {
      check(l.isa, "a", *kernel, kernel->pack_a, width);
    }
    check(l.isa, "b", *kernel, kernel->pack_b, kernel->nr);
  }
  check(l.isa, "simulated a", l.simulated, l.simulated.pack_a, l.simulated.mr, 32);
  check(l.isa, "simulated b", l.simulated, l.simulated.pack_b, l.simulated.nr, 32);
}

int main() {
  check(base::table);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) check(avx2::table);
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    check(avx512::table);
  }
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) {
    check(avx512::table_bf16);
    check(avx512::table_amx_model);
  }
#endif
}
