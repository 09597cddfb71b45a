// A digest of what each loop of level `base` computes, a line each: the same lines have to come
// from every processor. It needs neither torch nor Python, so that it runs in an emulator.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/simd/formulas.h"

using namespace mixprec;
using namespace mixprec::cpu;

namespace {

const Loops& base_loops = base::table;
constexpr int64_t kCount = 4096;
const Dtype kFloats[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
const char* kNames[] = {"f32", "bf16", "f16", "e4m3", "e5m2", "f64", "u8", "i16", "i8", "none"};
const char* name(Dtype d) { return kNames[static_cast<int>(d)]; }

// xorshift, the same on every processor.
struct Random {
  uint64_t state;
  uint32_t bits() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<uint32_t>(state >> 32);
  }
  // About normal: the sum of four uniform numbers, times a power of two.
  float number(int spread) {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(bits() >> 8) * 0x1p-24f - 0.5f;
    return spread == 0 ? sum : sum * bits_float((127u + bits() % (2 * spread) - spread) << 23);
  }
};

// n numbers of a dtype as bytes; those of `special` also with zeros, subnormal numbers and Inf.
std::vector<uint8_t> numbers(Dtype d, int64_t n, uint64_t seed, int spread = 8,
                             bool special = false) {
  Random random{seed * 0x9E3779B97F4A7C15u + 1};
  std::vector<uint8_t> out(n * element_size(d));
  for (int64_t i = 0; i < n; ++i) {
    float x = random.number(spread);
    if (special && i % 16 == 3) x = i % 64 == 3 ? 0.0f : i % 64 == 19 ? -0x1p-140f : x * 0x1p20f;
    if (special && i % 512 == 500) x = i % 1024 == 500 ? HUGE_VALF : -HUGE_VALF;
    if (d == Dtype::f32) {
      std::memcpy(&out[4 * i], &x, 4);
    } else {
      with_low(d, [&](auto t) {
        using T = typename decltype(t)::type;
        T q;
        if constexpr (sizeof(T) == 2)
          q = Convert<T>::encode(x);
        else
          q = Convert<T>::encode(x, 1.0f);
        std::memcpy(&out[i * sizeof q], &q, sizeof q);
      });
    }
  }
  return out;
}

uint64_t digest = 0;
void add(uint64_t word) { digest = (digest ^ word) * 0x100000001B3u; }
void add_float(float x) { add(x != x ? 0x7FC00000u : float_bits(x)); }  // any NaN is one
void add_bytes(const void* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) add(static_cast<const uint8_t*>(data)[i]);
}
// Of n values; NaN has no sign and no payload.
void add_values(Dtype d, const void* data, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float x;
    if (d == Dtype::f32) {
      std::memcpy(&x, static_cast<const uint8_t*>(data) + 4 * i, 4);
    } else {
      with_low(d, [&](auto t) {
        typename decltype(t)::type q;
        std::memcpy(&q, static_cast<const uint8_t*>(data) + i * sizeof q, sizeof q);
        x = decode(q);
      });
    }
    add_float(x);
  }
}
void line(const std::string& what) {
  std::printf("%s %016llx\n", what.c_str(), static_cast<unsigned long long>(digest));
  digest = 0xCBF29CE484222325u;
}

void casts() {
  for (Dtype x : kFloats) {
    std::vector<uint8_t> from = numbers(x, kCount, 1, 20, true);
    add(base_loops.amax(x, from.data(), kCount - 3));  // Inf
    add(base_loops.amax(x, numbers(x, kCount, 17).data(), kCount - 3));
    line(std::string("amax ") + name(x));
    for (Dtype q : {Dtype::bf16, Dtype::f16, Dtype::e4m3, Dtype::e5m2}) {
      std::vector<uint8_t> to(kCount * 2), back(kCount * 4);
      for (float scale : {1.0f, 0x1p-9f, 3.7e4f}) {
        add(base_loops.quantize(x, q, from.data(), scale, to.data(), kCount - 5));
        add_values(q, to.data(), kCount - 5);
        base_loops.dequantize(q, x, to.data(), 1.0f / scale, back.data(), kCount - 5);
        add_values(x, back.data(), kCount - 5);
      }
      line(std::string("quantize ") + name(x) + " " + name(q));
    }
  }
}

void blocks() {
  const BlockFormat formats[] = {BlockFormat::mxfp8_e4m3, BlockFormat::mxfp8_e5m2,
                                 BlockFormat::mxfp6_e3m2, BlockFormat::mxfp6_e2m3,
                                 BlockFormat::mxfp4,      BlockFormat::nvfp4};
  for (BlockFormat format : formats) {
    for (bool stochastic : {false, true}) {
      std::vector<uint8_t> from = numbers(Dtype::f32, kCount, 2, 12, true);
      std::vector<uint8_t> q(kCount), scales(blocks_of(format, kCount)), back(kCount * 4);
      BlockCastRule rule = {format, scale_rule(format, ScaleMode::rceil, 1e3f, stochastic),
                            stochastic, 99, 0};
      add(base_loops.quantize_mx(Dtype::f32, rule, from.data(), kCount - 7, 64, q.data(),
                                 scales.data()));
      add_bytes(q.data(), block_bytes(format, kCount - 7));
      add_bytes(scales.data(), blocks_of(format, kCount - 7));
      float inverse = rule.scale.tensor_inv;
      base_loops.dequantize_mx(format, Dtype::f32, q.data(), scales.data(),
                               rule.scale.nvfp4 ? &inverse : nullptr, back.data(), kCount - 7);
      add_values(Dtype::f32, back.data(), kCount - 7);
    }
    line("quantize_mx " + std::to_string(static_cast<int>(format)));
  }
}

void activations_and_norms() {
  constexpr int64_t n = 1000;
  std::vector<uint8_t> wide = numbers(Dtype::f32, n, 3, 2), more = numbers(Dtype::f32, n, 4, 2);
  const float* weight = reinterpret_cast<const float*>(more.data());
  for (Dtype d : kFloats) {
    std::vector<uint8_t> x = numbers(d, n, 5, 3), up = numbers(d, n, 6, 3), g = numbers(d, n, 7, 3);
    std::vector<float> y(n), dx(n), dup(n), dweight(n, 0.5f), dbias(n, 0.25f), buffer(4 * n + 64);
    for (int kind = 0; kind < 4; ++kind) {
      Activation act = static_cast<Activation>(kind);
      base_loops.act(act, d, x.data(), up.data(), y.data(), n);
      base_loops.act_backward(act, d, d, g.data(), x.data(), up.data(), dx.data(), dup.data(), n);
      for (auto* values : {&y, &dx, &dup}) add_values(Dtype::f32, values->data(), n);
    }
    line(std::string("act ") + name(d));
    const float* row = base_loops.wide_row(d, x.data(), buffer.data(), n);
    for (bool subtract : {false, true}) {
      RowStatistics found = base_loops.row_statistics(row, n, 1e-5f, subtract);
      add_float(found.mean), add_float(found.rstd);
      base_loops.normalize(row, found, weight, weight, y.data(), n);
      add_values(Dtype::f32, y.data(), n);
      std::vector<uint8_t> out(n * 4);
      std::vector<float> scratch(4 * n + 64);
      base_loops.norm_backward_row({d, d, d, weight, subtract, n}, g.data(), x.data(), up.data(),
                                   found, out.data(), dweight.data(), dbias.data(), scratch.data());
      add_values(d, out.data(), n);
    }
    add_values(Dtype::f32, dweight.data(), n), add_values(Dtype::f32, dbias.data(), n);
    line(std::string("norm ") + name(d));
    std::vector<uint8_t> turned(n * 4);
    for (bool interleaved : {false, true}) {
      base_loops.rotary(d, interleaved, x.data(), weight, reinterpret_cast<float*>(wide.data()),
                        turned.data(), n);
      add_values(d, turned.data(), n);
    }
    line(std::string("rotary ") + name(d));
  }
}

void saved_and_loss() {
  for (Dtype d : kFloats) {
    for (int64_t bits : {4, 8}) {
      std::vector<uint8_t> x = numbers(d, kCount, 8, 4), codes(kCount), y(kCount * 4);
      std::vector<Bf16> ranges(2 * kCount / 32);
      PackArrays arrays = {d, bits, 7, 11, x.data(), y.data(), false, codes.data(), ranges.data()};
      base_loops.pack(arrays, 0, kCount);
      base_loops.unpack(arrays, 0, kCount);
      add_bytes(codes.data(), kCount * bits / 8);
      add_values(d, y.data(), kCount);
    }
    line(std::string("pack ") + name(d));
    std::vector<uint8_t> g = numbers(d, kCount, 9, 6, true);
    uint32_t counts[4] = {};
    double sum = 0;
    add(base_loops.grad_stats(d, g.data(), 0x1p-3f, kCount - 1, &sum, counts));
    add(base_loops.unscale(d, g.data(), 0x1p-3f, kCount - 1, counts));
    add_values(d, g.data(), kCount - 1), add_bytes(&sum, sizeof sum);
    add_bytes(counts, sizeof counts);
    line(std::string("unscale ") + name(d));
  }
  std::vector<uint8_t> logits = numbers(Dtype::f32, kCount, 10, 4);
  const float* data = reinterpret_cast<const float*>(logits.data());
  for (double softcap : {0.0, 30.0}) {
    float row[8] = {-HUGE_VALF};
    std::vector<float> g(kCount);
    base_loops.cross_entropy(data, kCount - 1, 17, make_softcap(softcap), row);
    add_values(Dtype::f32, row, 4);
    base_loops.cross_entropy_backward(data, kCount - 1, 17, 0.9f, {2.5f, 1.0f, 1e-4f, 0.125f},
                                      make_softcap(softcap), Dtype::f32, g.data());
    add_values(Dtype::f32, g.data(), kCount - 1);
  }
  line("cross_entropy");
}

template <class Rule>
void step(const char* what, const Rule& rule, StepLoop<Rule> loop, int states) {
  struct Form {
    Dtype param;
    Dtype master;
    bool eight_bits, stochastic;
  };
  const Form forms[] = {
      {Dtype::f32, Dtype::none, false, false}, {Dtype::bf16, Dtype::f32, false, false},
      {Dtype::f16, Dtype::f32, false, false},  {Dtype::bf16, Dtype::i16, true, false},
      {Dtype::bf16, Dtype::i8, true, true},    {Dtype::bf16, Dtype::none, false, true}};
  for (const Form& form : forms) {
    std::vector<uint8_t> p = numbers(form.param, kCount, 12, 2),
                         g = numbers(form.param, kCount, 13);
    std::vector<uint8_t> master = numbers(Dtype::f32, kCount, 14, 2), state[2];
    std::vector<float> scales[2];
    Dtype kind = form.eight_bits ? Dtype::u8 : Dtype::f32;
    StepArrays arrays = {form.param,
                         form.param,
                         {kind, kind},
                         form.master,
                         form.stochastic,
                         p.data(),
                         g.data(),
                         {},
                         {},
                         master.data(),
                         5,
                         3,
                         1};
    if (form.master == Dtype::none) arrays.master = nullptr;
    for (int s = 0; s < states; ++s) {
      state[s].assign(kCount * 4, 0), scales[s].assign(kCount / 256, 0.0f);
      arrays.state[s] = state[s].data(), arrays.scale[s] = scales[s].data();
    }
    GradSettings grad = {0x1p-4, 0.75, 1e30, false};
    for (int64_t t = 1; t < 4; ++t) {
      arrays.step = t;
      loop(arrays, 0, kCount, rule.variant(states, t), step_constants(rule, grad, t));
    }
    add_values(form.param, p.data(), kCount);
    if (arrays.master) add_bytes(master.data(), master.size());
    for (int s = 0; s < states; ++s) {
      add_bytes(state[s].data(), form.eight_bits ? kCount : kCount * 4);
      if (form.eight_bits) add_values(Dtype::f32, scales[s].data(), kCount / 256);
    }
  }
  line(what);
}

// Panels of one width, and the tile that they give.
template <class Kernel, class Multiply>
void product(const Kernel& kernel, Dtype d, int64_t words, int64_t width, Multiply&& multiply) {
  constexpr int64_t k = 200;
  std::vector<uint8_t> a = numbers(d, kMaxRows * k, 15, 3), b = numbers(d, kMaxCols * k, 16, 3);
  std::vector<uint32_t> pa(words * kMaxRows + 64), pb(words * kMaxCols + 64);
  add(kernel.pack_a(d, a.data(), k, 1, width, k, pa.data(), words, width));
  add(kernel.pack_b(d, b.data(), 1, kernel.nr, kernel.nr, k, pb.data(), words, kernel.nr));
  std::vector<float> c(kMaxRows * kMaxCols, 0.5f);
  for (bool accumulate : {false, true}) multiply(k, pa.data(), pb.data(), c.data(), accumulate);
  add_values(Dtype::f32, c.data(), c.size());
}

void products() {
  for (Dtype d : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::e4m3, Dtype::e5m2}) {
    const GemmKernel& plain = base_loops.gemm_f32;
    product(plain, d, plain.words(200), plain.mr,
            [&](int64_t k, auto* a, auto* b, float* c, bool add) {
              plain.micro(plain.mr, plain.words(k), a, b, c, plain.nr, add);
            });
    line(std::string("gemm ") + name(d));
    if (d == Dtype::f32) continue;
    for (Gpu gpu : {Gpu::ada, Gpu::hopper, Gpu::blackwell}) {
      TensorCore core = tensor_core(gpu, d);
      const SimulatedKernel& kernel =
          core.significant_bits == 14 ? base_loops.simulated_short : base_loops.simulated;
      int least = d == Dtype::e4m3 ? -6 : d == Dtype::bf16 ? -126 : -14;
      product(kernel, d, 200 * kernel.words_of_k, kernel.mr,
              [&](int64_t k, auto* a, auto* b, float* c, bool add) {
                kernel.steps(core, least, least, k, a, b, c, kernel.nr, add);
              });
    }
    line(std::string("gemm_simulated ") + name(d));
  }
}

}  // namespace

int main() {
  digest = 0xCBF29CE484222325u;
  casts();
  blocks();
  activations_and_norms();
  saved_and_loss();
  step("adamw", AdamW{1e-3, 0.9, 0.999, 1e-8, 0.1, 1}, base_loops.adamw, 2);
  step("sgd", Sgd{1e-2, 0.9, 0.0, 0.1, 1}, base_loops.sgd, 1);
  step("lion", Lion{1e-4, 0.9, 0.99, 0.1}, base_loops.lion, 1);
  step("muon_direction", MuonDirection{1e-2, 0.95, 1}, base_loops.muon_direction, 1);
  products();
}
