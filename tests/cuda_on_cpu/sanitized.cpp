// Kernels over memory of exactly the right size, for the sanitizers and against values computed
// here: every kernel that has a barrier, and odd sizes and alignments. Exits with 1 where a value
// is wrong; the sanitizers exit with numbers of their own.
#include <cstdio>
#include <vector>

#include "cuda/adamw.cuh"
#include "cuda/dequantize.cuh"
#include "cuda/grad_stats.cuh"
#include "cuda/quantize.cuh"
#include "cuda/unscale.cuh"

using namespace mixprec;
using namespace mixprec::cuda;

namespace {

bool failed = false;

void expect(bool correct, const char* what) {
  if (!correct) std::printf("wrong: %s\n", what);
  failed |= !correct;
}

// Several chunks for one block, and a chunk for a block that comes late.
void grad_stats_case() {
  std::vector<float> g(3 * kChunk + 5);
  double want = 0.0;
  for (size_t i = 0; i < g.size(); ++i) {
    g[i] = static_cast<float>(i % 9);
    want += double{g[i]} * g[i];
  }
  GradList grads = {{Dtype::f32, g.data(), static_cast<int64_t>(g.size())}};
  std::vector<double> partials(grad_stats_chunks(grads));
  unsigned done = 0;
  float found_inf = 0.0f;
  double sum_sq = -1.0;
  GradStats stats = {
      nullptr, &found_inf, &sum_sq, partials.data(), static_cast<int>(partials.size()), &done};
  cudaError_t error = for_lists<1>(
      1, [&](int64_t, TensorEntry<1>& e) { return e = {{g.data()}, grads[0].numel, 0}, true; },
      [&](const TensorList<1>& list) {
        return launch(grad_stats_kernel<float>, 2, kThreads, 0, nullptr, list, stats);
      });
  expect(error == cudaSuccess && done == 0, "grad_stats launch");
  expect(sum_sq == want && found_inf == 0.0f, "sum_sq");
}

// Several tiles for one block, some of them ragged; also the reduction of amax.
void quantize_case(int64_t rows, int64_t cols) {
  std::vector<Bf16> x(rows * cols);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = Convert<Bf16>::encode(static_cast<float>(i * 37 % 211) - 100.0f);
  }
  std::vector<E4m3> q(x.size()), q_t(x.size());
  AmaxState state = {0, 0};
  float amax = -1.0f, scale_inv = -1.0f, scale = 2.0f;
  AmaxOut out = {&state, &amax, {nullptr, &scale_inv, &scale, 0.0f, false}};
  cudaError_t error = launch(quantize_transpose_kernel<Bf16, E4m3>, 1, kThreads, 0, nullptr,
                             x.data(), q.data(), q_t.data(), rows, cols, &scale, out);
  expect(error == cudaSuccess && state.done == 0 && state.largest == 0, "quantize launch");
  expect(amax == 110.0f && scale_inv == 0.5f, "amax");
  bool same = true;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      uint8_t want = Convert<E4m3>::encode(decode(x[r * cols + c]), scale).bits;
      same = same && q[r * cols + c].bits == want && q_t[c * rows + r].bits == want;
    }
  }
  expect(same, "q or q_t");
}

constexpr int64_t kOdd = 1003;  // elements, of which the kernels see those from `skipped` on

void unscale_case(int64_t skipped) {
  std::vector<float> g(kOdd, 3.0f);
  float inv_scale = 0.5f, found_inf = 0.0f;
  auto entry = [&](int64_t, TensorEntry<1>& e) {
    return e = {{g.data() + skipped}, kOdd - skipped, 0}, true;
  };
  cudaError_t error = for_lists<1>(1, entry, [&](const TensorList<1>& list) {
    return launch(unscale_kernel<float>, 1, kThreads, 0, nullptr, list, &inv_scale, &found_inf);
  });
  bool same = true;
  for (int64_t i = 0; i < kOdd; ++i) same = same && g[i] == (i < skipped ? 3.0f : 1.5f);
  expect(error == cudaSuccess && same && found_inf == 0.0f, "unscale");
}

void adamw_case(int64_t skipped) {
  std::vector<Bf16> param(kOdd);
  std::vector<float> grad(kOdd, 1.0f), m(kOdd), v(kOdd), master(kOdd, 1.0f);
  AdamWSettings settings = {0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 1.0};
  AdamWConstants constants = {adamw_scalars<float>(settings, 1), {}};
  auto entry = [&](int64_t, TensorEntry<5>& e) {
    e = {{param.data() + skipped, grad.data() + skipped, m.data() + skipped, v.data() + skipped,
          master.data() + skipped},
         kOdd - skipped,
         0};
    return true;
  };
  const float* found_inf = nullptr;
  cudaError_t error = for_lists<5>(1, entry, [&](const TensorList<5>& list) {
    return launch(adamw_kernel<Bf16, float, true>, 1, kThreads, 0, nullptr, list, &constants,
                  found_inf);
  });
  float one_m = 0.0f, one_v = 0.0f;
  float want = adamw(1.0f, 1.0f, one_m, one_v, constants.narrow);
  bool same = true;
  for (int64_t i = 0; i < kOdd; ++i) same = same && master[i] == (i < skipped ? 1.0f : want);
  expect(error == cudaSuccess && same, "adamw");
}

void quantize_and_back_case(int64_t skipped) {
  std::vector<float> x(kOdd, 7.0f), back(kOdd, -1.0f);
  std::vector<E5m2> q(kOdd);
  float one = 1.0f;
  const float* scale = &one;
  int64_t n = kOdd - skipped;
  launch(quantize_kernel<float, E5m2>, 1, kThreads, 0, nullptr, x.data() + skipped,
         q.data() + skipped, n, scale, AmaxOut{});
  launch(dequantize_kernel<E5m2, float>, 1, kThreads, 0, nullptr, q.data() + skipped,
         back.data() + skipped, n, scale);
  bool same = true;
  for (int64_t i = 0; i < kOdd; ++i) same = same && back[i] == (i < skipped ? -1.0f : 7.0f);
  expect(same, "quantize and dequantize");
}

}  // namespace

int main() {
  cuda_on_cpu::set_seed(1);
  grad_stats_case();
  quantize_case(128, 270);
  quantize_case(131, 144);
  for (int64_t skipped : {0, 1, 4, 7}) {
    unscale_case(skipped);
    adamw_case(skipped);
    quantize_and_back_case(skipped);
  }
  return failed ? 1 : 0;
}
