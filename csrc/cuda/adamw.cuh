// adamw_ on the GPU: one tiny launch that counts the steps and forms their constants, then one
// launch per mix of dtypes. Both read found_inf on the device and do nothing where it is set.
#pragma once

#include <unordered_map>
#include <vector>

#include "cuda/launch.h"
#include "cuda/tensor_list.cuh"
#include "cuda/vec.cuh"
#include "dispatch.h"
#include "math/adamw.h"
#include "math/unscale.h"

namespace mixprec::cuda {

// The constants of one step, in both widths.
struct AdamWConstants {
  AdamWScalars<float> narrow;
  AdamWScalars<double> wide;
};

struct AdamWScalarInputs {  // device memory, one element each; null: 1, 1, 0
  const float* inv_scale;
  const float* clip;
  const float* found_inf;
};

struct StepList {
  static constexpr int kCapacity = (32764 - 256) / 8;
  float* step[kCapacity];  // no two the same
  int32_t count;
};

__device__ __forceinline__ bool skips(const float* found_inf) {
  return found_inf != nullptr && *found_inf != 0.0f;
}

static __global__ void __launch_bounds__(kThreads)
    adamw_steps_kernel(const __grid_constant__ StepList list, AdamWSettings settings, bool maximize,
                       const AdamWScalarInputs inputs, AdamWConstants* constants) {
  int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= list.count || skips(inputs.found_inf)) return;
  float step = *list.step[i] + 1.0f;
  *list.step[i] = step;
  settings.inv_scale = inputs.inv_scale != nullptr ? *inputs.inv_scale : 1.0;
  settings.clip = inputs.clip != nullptr ? *inputs.clip : 1.0;
  if (maximize) settings.clip = -settings.clip;
  constants[i] = {adamw_scalars<float>(settings, static_cast<int64_t>(step)),
                  adamw_scalars<double>(settings, static_cast<int64_t>(step))};
}

template <class Real>
__device__ __forceinline__ AdamWScalars<Real> scalars_of(const AdamWConstants& c) {
  if constexpr (sizeof(Real) == 8) {
    return c.wide;
  } else {
    return c.narrow;
  }
}

template <class T>
__device__ __forceinline__ typename Unscale<T>::Real widened(T x) {
  if constexpr (sizeof(T) == 8) {
    return x;
  } else {
    return decode(x);
  }
}

// Arrays of the list: param, grad, exp_avg, exp_avg_sq, master. Tag: which constants.
template <class P, class G, bool has_master>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ TensorList<5> list, const AdamWConstants* constants,
                 const float* found_inf) {
  using Real = typename Unscale<P>::Real;
  constexpr bool grad_first = sizeof(G) < sizeof(P);  // the narrowest
  constexpr int n = grad_first ? kVector<G> : kVector<P>;
  if (skips(found_inf)) return;
  for (int c = blockIdx.x; c < list.chunks(); c += gridDim.x) {
    Chunk chunk = list.chunk(c);
    AdamWScalars<Real> s = scalars_of<Real>(constants[list.tag[chunk.tensor]]);
    P* param = list.at<P>(0, chunk);
    const G* grad = list.at<G>(1, chunk);
    Real *exp_avg = list.at<Real>(2, chunk), *exp_avg_sq = list.at<Real>(3, chunk);
    Real* master = has_master ? list.at<Real>(4, chunk) : exp_avg;
    Span span = grad_first ? split<n>(chunk.size, grad, param, exp_avg, exp_avg_sq, master)
                           : split<n>(chunk.size, param, grad, exp_avg, exp_avg_sq, master);
    for_each<n>(span, threadIdx.x, kThreads, [&](auto width, int64_t i) {
      constexpr int w = decltype(width)::value;
      P p[w];
      G g[w];
      Real m[w], v[w], truth[w];
      load(grad + i, g);
      load(exp_avg + i, m);
      load(exp_avg_sq + i, v);
      if constexpr (has_master) {
        load(master + i, truth);
      } else {
        load(param + i, p);
      }
#pragma unroll
      for (int j = 0; j < w; ++j) {
        if constexpr (!has_master) truth[j] = widened(p[j]);
        truth[j] = adamw(truth[j], widened(g[j]), m[j], v[j], s);
        p[j] = Unscale<P>::round(truth[j]);
      }
      store(param + i, p);
      store(exp_avg + i, m);
      store(exp_avg_sq + i, v);
      if constexpr (has_master) store(master + i, truth);
    });
  }
}

struct AdamWTensor {
  Dtype param_dtype, grad_dtype;
  void* param;  // this and the following: device memory, numel elements each
  const void* grad;
  void *exp_avg, *exp_avg_sq, *master;  // master: null for all tensors, or for none
  float* step;                          // one element, may be shared
  int64_t numel;
};

// Counts each distinct step once; tags[i] is where the constants of tensor i are.
inline cudaError_t adamw_steps(const std::vector<AdamWTensor>& tensors,
                               const AdamWSettings& settings, bool maximize,
                               const AdamWScalarInputs& inputs, AdamWConstants* constants,
                               std::vector<int32_t>& tags, cudaStream_t stream) {
  StepList list;
  list.count = 0;
  auto flush = [&] {
    return launch(adamw_steps_kernel, (list.count + kThreads - 1) / kThreads, kThreads, 0, stream,
                  list, settings, maximize, inputs, constants);
  };
  std::unordered_map<float*, int32_t> seen;
  for (const AdamWTensor& t : tensors) {
    auto [entry, is_new] = seen.emplace(t.step, static_cast<int32_t>(seen.size()));
    tags.push_back(entry->second);
    if (!is_new) continue;
    if (list.count == StepList::kCapacity) {
      if (cudaError_t error = flush(); error != cudaSuccess) return error;
      constants += list.count;
      list.count = 0;
    }
    list.step[list.count++] = t.step;
  }
  return list.count > 0 ? flush() : cudaSuccess;
}

// constants: scratch, one for each distinct step.
inline cudaError_t adamw(const std::vector<AdamWTensor>& tensors, const AdamWSettings& settings,
                         bool maximize, const AdamWScalarInputs& inputs, AdamWConstants* constants,
                         int sms, cudaStream_t stream) {
  std::vector<int32_t> tags;
  cudaError_t error = adamw_steps(tensors, settings, maximize, inputs, constants, tags, stream);
  auto update = [&](Dtype pd, Dtype gd, auto tp, auto tg, auto has_master) {
    if (error != cudaSuccess) return;
    auto entry = [&](int64_t i, TensorEntry<5>& e) {
      const AdamWTensor& t = tensors[i];
      e = {{t.param, const_cast<void*>(t.grad), t.exp_avg, t.exp_avg_sq, t.master},
           t.numel,
           tags[i]};
      return t.param_dtype == pd && t.grad_dtype == gd &&
             (t.master != nullptr) == (has_master.value != 0);
    };
    using P = typename decltype(tp)::type;
    using G = typename decltype(tg)::type;
    error =
        for_lists<5>(static_cast<int64_t>(tensors.size()), entry, [&](const TensorList<5>& list) {
          return launch(adamw_kernel<P, G, decltype(has_master)::value != 0>,
                        grid_for(list.chunks(), sms), kThreads, 0, stream, list, constants,
                        inputs.found_inf);
        });
  };
  auto both = [&](Dtype pd, Dtype gd, auto tp, auto tg) {
    update(pd, gd, tp, tg, Int<0>{});
    update(pd, gd, tp, tg, Int<1>{});
  };
  for (Dtype pd : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (Dtype gd : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      with_float(pd, [&](auto tp) { with_float(gd, [&](auto tg) { both(pd, gd, tp, tg); }); });
    }
  }
  both(Dtype::f64, Dtype::f64, Type<double>{}, Type<double>{});
  return error;
}

}  // namespace mixprec::cuda
