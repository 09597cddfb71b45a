// Kernels over memory of exactly the right size, for the sanitizers and against values computed
// here: every kernel that has a barrier, and odd sizes and alignments. Exits with 1 where a value
// is wrong; the sanitizers exit with numbers of their own.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <map>
#include <tuple>
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

// Of a block of `down` rows and `across` columns from row and col on.
float block_amax(const std::vector<Bf16>& x, int64_t rows, int64_t cols, int64_t row, int64_t col,
                 int64_t down, int64_t across) {
  float largest = 0.0f;
  for (int64_t r = row; r < rows && r < row + down; ++r) {
    for (int64_t c = col; c < cols && c < col + across; ++c) {
      largest = std::max(largest, std::abs(decode(x[r * cols + c])));
    }
  }
  return largest;
}

// Several tiles and rows for one block, some of them ragged; also all reductions of amax. The
// magnitudes differ between blocks.
void quantize_case(int64_t rows, int64_t cols, Granularity granularity, bool transpose,
                   const float* given = nullptr) {
  std::vector<Bf16> x(rows * cols);
  for (size_t i = 0; i < x.size(); ++i) {
    int64_t r = static_cast<int64_t>(i) / cols, c = static_cast<int64_t>(i) % cols;
    float size = static_cast<float>(1 << (r / 64 + c / 64) % 5);
    x[i] = Convert<Bf16>::encode((static_cast<float>(i * 37 % 211) - 100.0f) * size);
  }
  int64_t down = 1, across = 1, blocks_t = 1;
  if (granularity != Granularity::tensor) {
    bool squares = granularity == Granularity::block128x128;
    down = squares ? (rows + kTile - 1) / kTile : rows;
    across = granularity == Granularity::row ? 1 : (cols + kTile - 1) / kTile;
    blocks_t = (squares ? (cols + kTile - 1) / kTile : cols) *
               (granularity == Granularity::row ? 1 : (rows + kTile - 1) / kTile);
  }
  std::vector<E4m3> q(x.size()), q_t(transpose ? x.size() : 0);
  std::vector<float> scale_inv(down * across, -1.0f), scale_inv_t(transpose ? blocks_t : 0, -1.0f);
  float amax = -1.0f;
  Quantize a = {Dtype::bf16,        Dtype::e4m3, granularity, x.data(),
                q.data(),           q_t.data(),  rows,        cols,
                transpose,          true,        given,       scale_inv.data(),
                scale_inv_t.data(), &amax,       nullptr};
  std::vector<uint32_t> scratch(scratch_words(a, 1), 0xFFFFFFFFu);
  a.scratch = scratch.data();
  expect(quantize(a, 1, nullptr) == cudaSuccess, "quantize launch");
  expect(amax == block_amax(x, rows, cols, 0, 0, rows, cols), "amax");

  // The scales of what is there, by their blocks, for q and then q^T.
  bool by_squares = granularity == Granularity::block128x128;
  bool by_tensor = granularity == Granularity::tensor, by_row = granularity == Granularity::row;
  std::map<std::tuple<bool, int64_t, int64_t>, float> scales;
  bool same = true;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      auto at = [&](int64_t n, bool whole, bool one, int64_t size, int64_t& first) {
        int64_t width = whole ? size : one ? 1 : kTile;
        first = n / width * width;
        return width;
      };
      for (bool turned : {false, true}) {
        if (turned && !transpose) continue;
        int64_t row = 0, col = 0;
        // The side along which a block is long is K of q and M of q^T.
        bool one_row = !turned && !by_squares, one_col = turned && !by_squares;
        int64_t height = at(r, by_tensor || (turned && by_row), one_row, rows, row);
        int64_t breadth = at(c, by_tensor || (!turned && by_row), one_col, cols, col);
        auto [found, is_new] = scales.try_emplace({turned, row, col}, 0.0f);
        float& s = found->second;
        if (is_new) {
          float amax_here = block_amax(x, rows, cols, row, col, height, breadth);
          s = given != nullptr && *given != 0.0f
                  ? *given
                  : scale_from_amax(amax_here, 448.0f, 1.0f, true, 1.0f);
        }
        uint8_t want = Convert<E4m3>::encode(decode(x[r * cols + c]), s).bits;
        same = same && (turned ? q_t[c * rows + r] : q[r * cols + c]).bits == want;
        if (by_tensor) {
          same = same && scale_inv[0] == 1.0f / s;
        } else if (turned) {
          int64_t wide = by_row ? 1 : (rows + kTile - 1) / kTile;
          same = same && scale_inv_t[col / breadth * wide + row / height] == 1.0f / s;
        } else {
          same = same && scale_inv[row / height * across + col / breadth] == 1.0f / s;
        }
        if (!same) break;
      }
    }
  }
  expect(same, "q, q_t or their scales");
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

// An array of `stored` elements, all `value`, of which a kernel sees those from `skipped` on.
struct Elements {
  Stored stored;
  std::vector<char> bytes;

  Elements(Stored s, double value) : stored(s), bytes(kOdd * size()) {
    for (int64_t i = 0; i < kOdd; ++i) {
      if (stored == Stored::f64) put(i, value);
      if (stored == Stored::f32) put(i, static_cast<float>(value));
      if (stored == Stored::bf16) put(i, Convert<Bf16>::encode(static_cast<float>(value)));
      if (stored == Stored::f16) put(i, Convert<Fp16>::encode(static_cast<float>(value)));
    }
  }
  int64_t size() const { return stored == Stored::f64 ? 8 : stored == Stored::f32 ? 4 : 2; }
  template <class T>
  void put(int64_t i, T x) {
    std::memcpy(bytes.data() + i * size(), &x, sizeof x);
  }
  template <class T>
  T get(int64_t i) const {
    T x;
    std::memcpy(&x, bytes.data() + i * size(), sizeof x);
    return x;
  }
};

// Every way to store a weight, its gradient and states; each array has an alignment of its own. The
// weight 1 goes to 0.5: exact in all formats.
void step_case(int64_t skipped) {
  struct Row {
    Stored param, grad, master, state;
  };
  constexpr Row rows[] = {{Stored::f32, Stored::bf16, Stored::absent, Stored::f32},
                          {Stored::f16, Stored::f32, Stored::f32, Stored::bf16},
                          {Stored::bf16, Stored::f16, Stored::i16, Stored::bf16},
                          {Stored::bf16, Stored::bf16, Stored::absent, Stored::absent},
                          {Stored::f64, Stored::f64, Stored::f64, Stored::f64}};
  std::vector<Elements> arrays;
  std::vector<StepTensor> tensors;
  arrays.reserve(kStepArrays * std::size(rows));
  for (const Row& row : rows) {
    StepTensor t = {};
    for (int a = 0; a <= kState; ++a) {
      Stored stored[] = {row.param, row.grad, row.master, row.state};
      t.stored[a] = stored[a];
      if (stored[a] == Stored::absent) continue;
      Elements& e = arrays.emplace_back(stored[a], a == kState ? 0.0 : 1.0);
      int64_t skip = a == kGrad ? (skipped + 1) % 8 : skipped;
      t.data[a] = e.bytes.data() + skip * e.size();
    }
    t.numel = kOdd - 7;
    tensors.push_back(t);
  }
  std::vector<float> steps(tensors.size());
  std::vector<StepConstants<SgdRule>> constants(tensors.size());
  StepArgs args = {};
  args.steps = steps.data();
  args.max_value = 2.0;
  args.stochastic_rounding = true;
  SgdRule rule = {{0.5, 0.9, 0.0, 0.0, false}};
  expect(step(tensors, rule, args, constants.data(), 1, nullptr) == cudaSuccess, "step launch");
  bool same = true;
  for (size_t i = 0; i < steps.size(); ++i) same = same && steps[i] == 1.0f;
  expect(same, "steps");
  size_t next = 0;
  for (const Row& row : rows) {
    const Elements& param = arrays[next];
    next += 2 + (row.master != Stored::absent) + (row.state != Stored::absent);
    for (int64_t i = 0; i < kOdd; ++i) {
      double want = i >= skipped && i < skipped + kOdd - 7 ? 0.5 : 1.0, got = 0.0;
      if (row.param == Stored::f64) got = param.get<double>(i);
      if (row.param == Stored::f32) got = param.get<float>(i);
      if (row.param == Stored::bf16) got = decode(param.get<Bf16>(i));
      if (row.param == Stored::f16) got = decode(param.get<Fp16>(i));
      same = same && got == want;
    }
  }
  expect(same, "param");
}

void adamw_case(int64_t skipped) {
  std::vector<Bf16> param(kOdd);
  std::vector<float> grad(kOdd, 1.0f), m(kOdd), v(kOdd), master(kOdd, 1.0f);
  float steps = 0.0f;
  StepTensor t = {{param.data() + skipped, grad.data() + skipped, master.data() + skipped,
                   m.data() + skipped, v.data() + skipped},
                  {Stored::bf16, Stored::f32, Stored::f32, Stored::f32, Stored::f32},
                  kOdd - skipped,
                  0};
  StepArgs args = {};
  args.steps = &steps;
  args.max_value = 2.0;
  AdamWRule rule = {{0.1, 0.9, 0.99, 1e-8, 0.0, true}};
  StepConstants<AdamWRule> constants;
  cudaError_t error = step({t}, rule, args, &constants, 1, nullptr);
  float one_m = 0.0f, one_v = 0.0f;
  float want = adamw<true>(1.0f, 1.0f, one_m, one_v, constants.narrow);
  bool same = true;
  for (int64_t i = 0; i < kOdd; ++i) same = same && master[i] == (i < skipped ? 1.0f : want);
  expect(error == cudaSuccess && same && steps == 1.0f, "adamw");
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
    step_case(skipped);
    adamw_case(skipped);
    quantize_and_back_case(skipped);
  }
  return failed ? 1 : 0;
}
