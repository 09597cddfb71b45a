// The kernels of csrc/cuda as plain C functions over host memory: every argument is a number of 64
// bits, an address, or an array of addresses. Each returns 0 or CUDA's error code.
#include <array>
#include <vector>

#include "cuda/fused/act_quantize.cuh"
#include "cuda/fused/norm_backward.cuh"
#include "cuda/fused/norm_quantize.cuh"
#include "cuda/gemm/kernel/gemm_finish.cuh"
#include "cuda/grads/unscale.cuh"
#include "cuda/optim/step.cuh"
#include "cuda/pack/pack.cuh"
#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/dequantize.cuh"
#include "cuda/quantize/quantize.cuh"
#include "cuda/quantize_mx/dequantize_mx.cuh"
#include "cuda/quantize_mx/quantize_mx.cuh"
#include "cuda/scale/scale.cuh"
#include "math/step.h"

using namespace mixprec;
using namespace mixprec::cuda;

namespace {

Gpu gpu(int64_t sms) { return {static_cast<int>(sms), nullptr}; }

GradList grad_list(int64_t count, const int64_t* dtypes, void** data, const int64_t* numels) {
  GradList grads;
  for (int64_t i = 0; i < count; ++i) {
    grads.push_back({static_cast<Dtype>(dtypes[i]), data[i], numels[i]});
  }
  return grads;
}

constexpr uint64_t kUnwritten = ~uint64_t{0};
constexpr uint32_t kDirty = 0xFFFFFFFFu;  // larger than any maximum

Floats floats(const int64_t* dtypes, void** data, int which) {
  return {data[which], static_cast<Dtype>(dtypes[which])};
}

// how: dtype, granularity, rows, cols, transpose, power_of_two_scale; results: data, data_t,
// scale_inv, scale_inv_t, amax.
Quantize cast(const int64_t* how, void** results, const float* scale, int64_t sms,
              std::vector<uint32_t>& scratch) {
  auto numbers = [&](int which) { return static_cast<float*>(results[which]); };
  Quantize args(static_cast<Dtype>(how[0]), static_cast<Granularity>(how[1]), results[0],
                results[1], how[2], how[3], how[4] != 0, how[5] != 0, scale, numbers(2), numbers(3),
                numbers(4), nullptr);
  scratch.assign(scratch_words(args, gpu(sms)), kDirty);
  args.scratch = scratch.data();
  return args;
}

template <class Run>
int cast(const int64_t* how, void** results, const float* scale, int64_t sms, const Run& run) {
  std::vector<uint32_t> scratch;
  return run(cast(how, results, scale, sms, scratch));
}

template <class Rule>
int run_step(const std::vector<StepTensor>& tensors, double lr, const double* settings,
             const StepArgs& args, int64_t sms) {
  std::vector<StepOfTensor<Rule>> of_tensors(tensors.size());
  return step(tensors, make_rule<Rule>(lr, settings), args, of_tensors.data(), gpu(sms));
}

}  // namespace

extern "C" {

void seed(int64_t value) { cuda_on_cpu::set_seed(value); }

int unscale(int64_t count, const int64_t* dtypes, void** data, const int64_t* numels,
            const float* inv_scale, float* found_inf, int64_t* counts, int64_t sms) {
  GradList grads = grad_list(count, dtypes, data, numels);
  std::vector<uint64_t> scratch(counts != nullptr ? chunks_in(grads) : 0, kUnwritten);
  return mixprec::cuda::unscale(grads, inv_scale, found_inf, counts, {nullptr, scratch.data()},
                                gpu(sms));
}

int grad_stats(int64_t count, const int64_t* dtypes, void** data, const int64_t* numels,
               const float* inv_scale, float* found_inf, double* sum_sq, int64_t* counts,
               int64_t sms) {
  GradList grads = grad_list(count, dtypes, data, numels);
  std::vector<double> sums(chunks_in(grads), __builtin_nan(""));
  std::vector<uint64_t> kinds(counts != nullptr ? sums.size() : 0, kUnwritten);
  return mixprec::cuda::grad_stats(grads, inv_scale, found_inf, sum_sq, counts,
                                   {sums.data(), kinds.data()}, gpu(sms));
}

int amax(int64_t dtype, const void* x, int64_t count, float* result, int64_t sms) {
  std::vector<uint32_t> partials(partials_for(gpu(sms)), kDirty);
  return with_float(static_cast<Dtype>(dtype), [&](auto t) {
    auto* data = static_cast<const typename decltype(t)::type*>(x);
    return mixprec::cuda::amax(data, count, partials.data(), result, gpu(sms));
  });
}

int quantize(int64_t x_dtype, const void* x, const int64_t* how, void** results, const float* scale,
             int64_t sms) {
  return cast(how, results, scale, sms, [&](const Quantize& args) {
    return with_float(static_cast<Dtype>(x_dtype), [&](auto t) {
      using X = typename decltype(t)::type;
      return quantize_from(Plain<X>{static_cast<const X*>(x)}, {{args}}, gpu(sms));
    });
  });
}

// in: x, residual, weight, bias
int norm_quantize(const int64_t* dtypes, void** in, double eps, void* total, float* mean,
                  float* rstd, const int64_t* how, void** results, const float* scale,
                  int64_t sms) {
  return cast(how, results, scale, sms, [&](const Quantize& args) {
    NormRows rows({args.rows, args.cols, false}, floats(dtypes, in, 0), floats(dtypes, in, 1),
                  floats(dtypes, in, 2), floats(dtypes, in, 3), false, total,
                  static_cast<float>(eps), mean, rstd);
    return mixprec::cuda::norm_quantize(rows, args, gpu(sms));
  });
}

// in: g, x, weight, g_total
int norm_backward(const int64_t* dtypes, void** in, int64_t rows, int64_t cols, const float* mean,
                  const float* rstd, void* dx, float* dweight, float* dbias, int64_t sms) {
  NormGradients a({rows, cols, false}, floats(dtypes, in, 0), floats(dtypes, in, 1),
                  floats(dtypes, in, 2), floats(dtypes, in, 3), mean, rstd, dx, dweight, dbias,
                  nullptr);
  std::vector<float> bands(2 * a.bands_down() * cols, __builtin_nanf(""));
  a.bands = bands.data();
  return mixprec::cuda::norm_backward(a, gpu(sms));
}

// in: x, up
int act_quantize(const int64_t* dtypes, void** in, int64_t kind, const int64_t* how, void** results,
                 const float* scale, int64_t sms) {
  return cast(how, results, scale, sms, [&](const Quantize& args) {
    return mixprec::cuda::act_quantize(floats(dtypes, in, 0), floats(dtypes, in, 1),
                                       static_cast<Activation>(kind), args, gpu(sms));
  });
}

// in: g, x, up; scale: of dx; dup: without an amax if it is not wanted
int act_backward(const int64_t* dtypes, void** in, int64_t kind, const int64_t* how, void** dx,
                 void** dup, const float* scale, int64_t sms) {
  std::vector<uint32_t> scratch[2];
  Quantize of_dx = cast(how, dx, scale, sms, scratch[0]);
  Quantize of_dup = cast(how, dup, nullptr, sms, scratch[1]);
  return mixprec::cuda::act_backward(floats(dtypes, in, 0), floats(dtypes, in, 1),
                                     floats(dtypes, in, 2), static_cast<Activation>(kind), of_dx,
                                     of_dup.amax != nullptr ? &of_dup : nullptr, gpu(sms));
}

int dequantize(int64_t data_dtype, int64_t out_dtype, const void* data, void* out,
               const float* scale_inv, int64_t count, int64_t cols, int64_t rows_each,
               int64_t cols_each, int64_t row_stride, int64_t col_stride, int64_t sms) {
  ScaleGrid grid = {scale_inv, cols, rows_each, cols_each, row_stride, col_stride};
  return mixprec::cuda::dequantize(static_cast<Dtype>(data_dtype), static_cast<Dtype>(out_dtype),
                                   data, out, count, grid, gpu(sms));
}

// results: data, data_t, scale_inv, scale_inv_t, tensor_scale_inv, amax
int quantize_mx(int64_t x_dtype, const void* x, int64_t rows, int64_t cols, int64_t format,
                int64_t mode, int64_t transpose, const int64_t* random_seed, int64_t swizzled,
                int64_t with_amax, void** results, int64_t sms) {
  auto bytes = [&](int which) { return static_cast<uint8_t*>(results[which]); };
  auto numbers = [&](int which) { return static_cast<float*>(results[which]); };
  std::vector<uint32_t> scratch(partials_for(gpu(sms)), kDirty);
  BlockFormat f = static_cast<BlockFormat>(format);
  QuantizeMx args(f, scale_rule(f, static_cast<ScaleMode>(mode), 0.0f, false),
                  {bytes(0), bytes(2), rows, cols, kParamStream},
                  {bytes(1), bytes(3), cols, rows, kFirstStateStream}, transpose != 0,
                  swizzled != 0, random_seed, with_amax != 0 ? numbers(5) : nullptr, numbers(4),
                  scratch.data());
  return with_float(static_cast<Dtype>(x_dtype), [&](auto t) {
    auto* data = static_cast<const typename decltype(t)::type*>(x);
    return mixprec::cuda::quantize_mx(data, args, gpu(sms));
  });
}

int dequantize_mx(int64_t out_dtype, int64_t format, const uint8_t* data, const uint8_t* scale_inv,
                  const float* tensor_scale_inv, int64_t rows, int64_t cols, void* out,
                  int64_t sms) {
  return mixprec::cuda::dequantize_mx(
      static_cast<Dtype>(out_dtype),
      {static_cast<BlockFormat>(format), data, scale_inv, tensor_scale_inv, rows, cols}, out,
      gpu(sms));
}

int pack(int64_t dtype, int64_t bits, const void* x, uint8_t* codes, Bf16* ranges, int64_t count,
         int64_t random_seed, int64_t counter, const int64_t* offset, int64_t sms) {
  PackRandom random = {static_cast<uint64_t>(random_seed), static_cast<uint64_t>(counter), offset};
  return mixprec::cuda::pack(static_cast<Dtype>(dtype), bits, x, codes, ranges, count, random,
                             gpu(sms));
}

int unpack(int64_t dtype, int64_t bits, const uint8_t* codes, const Bf16* ranges, void* y,
           int64_t count, int64_t sms) {
  return mixprec::cuda::unpack(static_cast<Dtype>(dtype), bits, codes, ranges, y, count, gpu(sms));
}

// op: which, in the order of runner.py. pointers, dtypes: [count][kStepArrays]; indices may be
// null.
int update(int64_t op, int64_t count, const int64_t* dtypes, void** pointers, const int64_t* numels,
           const int64_t* indices, float* steps, const float* lr_f32, const double* lr_f64,
           const float* inv_scale, const float* clip, const float* found_inf, double max_value,
           int64_t maximize, int64_t stochastic_rounding, int64_t seed, double lr,
           const double* settings, int64_t sms) {
  std::vector<StepTensor> tensors(count);
  for (int64_t i = 0; i < count; ++i) {
    for (int a = 0; a < kStepArrays; ++a) {
      tensors[i].data[a] = pointers[i * kStepArrays + a];
      tensors[i].dtype[a] = static_cast<Dtype>(dtypes[i * kStepArrays + a]);
    }
    tensors[i].numel = numels[i];
    tensors[i].index = indices != nullptr ? indices[i] : 0;
  }
  StepArgs args = {steps,     lr_f32,        lr_f64,
                   inv_scale, clip,          found_inf,
                   max_value, maximize != 0, stochastic_rounding != 0,
                   seed};
  constexpr auto run =
      std::array{run_step<AdamW>, run_step<Sgd>, run_step<Lion>, run_step<MuonDirection>};
  return run[op](tensors, lr, settings, args, sms);
}

// For ctypes: sizes are ints.
int finish(const float* partial, int splits, int m, int n, const Epilogue* epilogue, int sms) {
  return gemm_finish(partial, splits, m, n, *epilogue, gpu(sms));
}

int scale_from_amax(float* scale, float* scale_inv, const float* amax, int64_t count, int64_t dtype,
                    double two_to_minus_margin, int64_t power_of_two) {
  if (count == 0) return 0;
  return launch(scale_from_amax_kernel, {(count + kThreads - 1) / kThreads}, nullptr, scale,
                scale_inv, amax, count, format_max(static_cast<Dtype>(dtype)),
                static_cast<float>(two_to_minus_margin), power_of_two != 0);
}

int inv_scale(const float* scale, float* result) {
  return launch(inv_scale_kernel, {1, 1}, nullptr, scale, result);
}

int clip_coef(const double* sum_sq, int64_t count, double max_norm, float* result) {
  return launch(clip_coef_kernel, {1}, nullptr, sum_sq, count, max_norm, result);
}

int update_scale(float* scale, int32_t* growth_tracker, int32_t* hysteresis_tracker,
                 int64_t* counters, const float* found_inf, const float* underflow,
                 double growth_factor, double backoff_factor, int64_t growth_interval,
                 double min_scale, double max_scale, int64_t hysteresis, double grow_on_underflow) {
  LossScaleState state = {scale, growth_tracker, hysteresis_tracker, counters};
  LossScaleRule rule = {growth_factor,
                        backoff_factor,
                        growth_interval,
                        static_cast<float>(min_scale),
                        static_cast<float>(max_scale),
                        static_cast<int>(hysteresis)};
  return launch(update_scale_kernel, {1, 1}, nullptr, state, found_inf, underflow,
                static_cast<float>(grow_on_underflow), rule);
}

int update_delayed_scales(int64_t count, void** histories, void** scales, void** amaxes,
                          const double* fmt_max, int64_t length, double two_to_minus_margin,
                          int64_t power_of_two, int64_t most_recent) {
  std::vector<DelayedScale> tensors(count);
  for (int64_t i = 0; i < count; ++i) {
    tensors[i] = {static_cast<float*>(histories[i]), static_cast<float*>(scales[i]),
                  static_cast<float*>(amaxes[i]), static_cast<float>(fmt_max[i])};
  }
  return mixprec::cuda::update_delayed_scales(
      tensors.data(), count,
      {length, static_cast<float>(two_to_minus_margin), power_of_two != 0, most_recent != 0},
      nullptr);
}
}
