// Kernels over memory of exactly the right size, for the sanitizers: every kernel that has a
// barrier, and odd sizes and alignments. What each computes is tested from Python; here only what
// tells of a race is compared. Exits with 1 where that is wrong; the sanitizers exit with numbers
// of their own.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/grads/grad_stats.cuh"
#include "cuda/grads/unscale.cuh"
#include "cuda/optim/adamw.cuh"
#include "cuda/optim/sgd.cuh"
#include "cuda/quantize/dequantize.cuh"
#include "cuda/quantize/quantize.cuh"
#include "cuda/scale/scale.cuh"

using namespace mixprec;
using namespace mixprec::cuda;

namespace {

bool failed = false;

void expect(bool correct, const char* what) {
  if (!correct) std::printf("wrong: %s\n", what);
  failed |= !correct;
}

// Several chunks for one block, of more than one gradient. With `counting` two reductions follow
// each other in turn, without it one follows itself.
template <bool counting>
void grad_stats_case() {
  std::vector<float> g(3 * kChunk + 5);
  std::vector<Bf16> low(33, Convert<Bf16>::encode(2.0f));
  double want = 0.0;
  for (size_t i = 0; i < g.size(); ++i) {
    g[i] = static_cast<float>(i % 9);
    want += double{g[i]} * g[i];
  }
  int64_t zeros = (static_cast<int64_t>(g.size()) + 8) / 9;
  GradList grads = {{Dtype::bf16, low.data(), 33},
                    {Dtype::f32, nullptr, 0},
                    {Dtype::f32, g.data(), static_cast<int64_t>(g.size())}};
  std::vector<double> sums(chunks_in(grads)), sum_sq(3, -1.0);
  std::vector<uint64_t> kinds(counting ? sums.size() : 0);
  std::vector<int64_t> counts(3 * kKinds, -1);
  float found_inf = 0.0f;
  ChunkStats chunks = {sums.data(), kinds.data()};
  const float* inv_scale = nullptr;
  cudaError_t error = for_grads(grads, [&](auto t, const GradLaunch& list) {
    return launch(grad_stats_kernel<typename decltype(t)::type, counting>, 2, kThreads, 0, nullptr,
                  list, inv_scale, &found_inf, chunks);
  });
  if (error == cudaSuccess) {
    error =
        add_chunks(grads, chunks, sum_sq.data(), counting ? counts.data() : nullptr, 1, nullptr);
  }
  expect(error == cudaSuccess && found_inf == 0.0f, "grad_stats launch");
  expect(sum_sq == std::vector<double>{33 * 4.0, 0.0, want}, "sum_sq");
  if (counting) {
    expect(counts == std::vector<int64_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, zeros, 0}, "counts");
  }
}

// Several tiles and rows for one block, some of them ragged; also all reductions of amax.
void quantize_case(int64_t rows, int64_t cols, Granularity granularity, bool transpose,
                   const float* given = nullptr) {
  std::vector<Bf16> x(rows * cols);
  float largest = 0.0f;
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = Convert<Bf16>::encode(static_cast<float>(i * 37 % 211) - 100.0f);
    largest = std::max(largest, std::abs(decode(x[i])));
  }
  auto blocks = [&](int64_t m, int64_t k) {  // the number of scales of an [m, k] tensor
    if (granularity == Granularity::tensor) return int64_t{1};
    int64_t down = granularity == Granularity::block128x128 ? (m + kTile - 1) / kTile : m;
    return down * (granularity == Granularity::row ? 1 : (k + kTile - 1) / kTile);
  };
  std::vector<E4m3> q(x.size()), q_t(transpose ? x.size() : 0);
  std::vector<float> scale_inv(blocks(rows, cols), -1.0f);
  bool scaled_t = transpose && granularity != Granularity::tensor;
  std::vector<float> scale_inv_t(scaled_t ? blocks(cols, rows) : 0, -1.0f);
  float amax = -1.0f;
  Quantize a = {Dtype::bf16,        Dtype::e4m3, granularity, x.data(),
                q.data(),           q_t.data(),  rows,        cols,
                transpose,          true,        given,       scale_inv.data(),
                scale_inv_t.data(), &amax,       nullptr};
  std::vector<uint32_t> scratch(scratch_words(a, 1), 0xFFFFFFFFu);
  a.scratch = scratch.data();
  expect(quantize(a, 1, nullptr) == cudaSuccess, "quantize launch");
  expect(amax == largest, "amax");
  bool written = true, turned = true;
  for (std::vector<float>* scales : {&scale_inv, &scale_inv_t}) {
    for (float s : *scales) written = written && s > 0.0f;
  }
  for (int64_t i = 0; granularity == Granularity::tensor && i < rows * cols && transpose; ++i) {
    turned = turned && q_t[i % cols * rows + i / cols].bits == q[i].bits;
  }
  expect(written && turned, "scales, and q^T beside q");
}

constexpr int64_t kOdd = 1003;  // elements, of which the kernels see those from `skipped` on

void unscale_case(int64_t skipped) {
  std::vector<float> g(kOdd, 3.0f);
  float inv_scale = 0.5f, found_inf = 0.0f;
  GradList grads = {{Dtype::f32, g.data() + skipped, kOdd - skipped}};
  std::vector<uint64_t> kinds(chunks_in(grads));
  std::vector<int64_t> counts(kKinds, -1);
  cudaError_t error =
      unscale(grads, &inv_scale, &found_inf, counts.data(), {nullptr, kinds.data()}, 1, nullptr);
  bool same = true;
  for (int64_t i = 0; i < kOdd; ++i) same = same && g[i] == (i < skipped ? 3.0f : 1.5f);
  expect(error == cudaSuccess && same && found_inf == 0.0f, "unscale");
  expect(counts == std::vector<int64_t>(kKinds, 0), "counts");
}

// Every way to store a weight, its gradient and states; each array has an alignment of its own. All
// of it is zero.
template <class Rule>
void step_case(const Rule& rule, int states, int64_t skipped) {
  using S = Stored;
  constexpr S rows[][4] = {{S::f32, S::bf16, S::absent, S::f32},
                           {S::f16, S::f32, S::f32, S::bf16},
                           {S::bf16, S::f16, S::i16, S::bf16},
                           {S::f64, S::f64, S::f64, S::f64}};
  std::vector<std::vector<char>> arrays;
  std::vector<StepTensor> tensors;
  for (const auto& row : rows) {
    StepTensor t = {};
    for (int a = 0; a < kState + states; ++a) {
      t.stored[a] = row[std::min<int>(a, kState)];
      if (t.stored[a] == S::absent) continue;
      int64_t size = t.stored[a] == S::f64 ? 8 : t.stored[a] == S::f32 ? 4 : 2;
      int64_t skip = a == kGrad ? (skipped + 1) % 8 : skipped;
      arrays.emplace_back((kOdd + skip) * size);
      t.data[a] = arrays.back().data() + skip * size;
    }
    t.numel = kOdd;
    tensors.push_back(t);
  }
  std::vector<float> steps(tensors.size());
  std::vector<StepConstants<Rule>> constants(tensors.size());
  StepArgs args = {};
  args.steps = steps.data();
  args.max_value = 2.0;
  args.stochastic_rounding = true;
  expect(step(tensors, rule, args, constants.data(), 1, nullptr) == cudaSuccess, "step launch");
  expect(steps == std::vector<float>(steps.size(), 1.0f), "steps");
}

void clip_coef_case() {
  std::vector<double> sum_sq(kOdd, 4.0);
  float clip = -1.0f;
  cudaError_t error = clip_coef(sum_sq.data(), kOdd, 1e3, &clip, nullptr);
  expect(error == cudaSuccess && clip == 1.0f, "clip_coef");
  error = clip_coef(sum_sq.data(), kOdd, std::sqrt(kOdd * 4.0) / 2, &clip, nullptr);
  expect(error == cudaSuccess && std::abs(clip - 0.5f) < 1e-6f, "clip_coef below 1");
}

void quantize_and_back_case(int64_t skipped) {
  std::vector<float> x(kOdd, 7.0f), back(kOdd, -1.0f);
  std::vector<E5m2> q(kOdd);
  float one = 1.0f, scale_inv = -1.0f, amax = -1.0f;
  int64_t n = kOdd - skipped;
  Quantize a = {Dtype::f32,
                Dtype::e5m2,
                Granularity::tensor,
                x.data() + skipped,
                q.data() + skipped,
                nullptr,
                1,
                n,
                false,
                true,
                &one,
                &scale_inv,
                nullptr,
                &amax,
                nullptr};
  std::vector<uint32_t> scratch(scratch_words(a, 1), 0xFFFFFFFFu);
  a.scratch = scratch.data();
  cudaError_t error = quantize(a, 1, nullptr);
  expect(error == cudaSuccess && scale_inv == 1.0f && amax == 7.0f, "quantize");
  ScaleGrid grid = {&scale_inv, n, 0, 0, 0, 0};
  error = dequantize(Dtype::e5m2, Dtype::f32, q.data() + skipped, back.data() + skipped, n, grid, 1,
                     nullptr);
  expect(error == cudaSuccess, "dequantize");
  bool same = true;
  for (int64_t i = 0; i < kOdd; ++i) same = same && back[i] == (i < skipped ? -1.0f : 7.0f);
  expect(same, "quantize and dequantize");
}

}  // namespace

int main() {
  cuda_on_cpu::set_seed(1);
  grad_stats_case<false>();
  grad_stats_case<true>();
  // More than kBlocksPerSm tiles or rows: some blocks have several.
  const float two = 2.0f, none = 0.0f;
  quantize_case(128, 270, Granularity::tensor, true, &two);
  quantize_case(131, 656, Granularity::tensor, true, &none);
  quantize_case(131, 144, Granularity::tensor, false);
  quantize_case(75, 150, Granularity::row, false);
  quantize_case(11, 1030, Granularity::row, false);
  for (Granularity g : {Granularity::row, Granularity::block1x128, Granularity::block128x128}) {
    quantize_case(131, 656, g, true);
    if (g != Granularity::row) quantize_case(128, 1200, g, false);
  }
  clip_coef_case();
  for (int64_t skipped : {0, 1, 4, 7}) {
    unscale_case(skipped);
    step_case(SgdRule{{0.5, 0.9, 0.0, 0.0, false}}, 1, skipped);
    step_case(AdamWRule{{0.1, 0.9, 0.99, 1e-8, 0.0, true}}, 2, skipped);
    quantize_and_back_case(skipped);
  }
  return failed ? 1 : 0;
}
