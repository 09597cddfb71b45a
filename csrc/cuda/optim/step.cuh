// An optimizer's update on the GPU: one tiny launch that counts the steps and computes their
// constants, then one launch for all tensors of any formats (one more for fp64 params). Both read
// found_inf on the device and do nothing if it is set. The formula is the template argument Rule
// (math/step.h), which keeps `states` arrays of state.
#pragma once

#include <vector>

#include "cuda/common/launch.h"
#include "cuda/common/tensor_list.cuh"
#include "cuda/optim/group.cuh"
#include "math/step.h"

namespace mixprec::cuda {

// The arguments that all tensors of a call share.
struct StepArgs {
  float* steps;  // [tensors]
  // Device memory, one element each. If null: the rule's lr (at most one of the two is not null),
  // 1, 1, 0.
  const float* lr_f32;
  const double* lr_f64;
  const float *inv_scale, *clip, *found_inf;
  double max_value;
  bool maximize, stochastic_rounding;
  int64_t seed;

  __device__ __forceinline__ bool skip() const {
    return found_inf != nullptr && *found_inf != 0.0f;
  }
};

// The count of one tensor's step, and its constants.
template <class Rule>
struct StepOfTensor {
  StepConstants<Rule> constants;
  int64_t step;
};

template <class Rule>
__global__ void __launch_bounds__(kThreads)
    count_steps_kernel(Rule rule, const StepArgs args, int count, StepOfTensor<Rule>* result) {
  int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= count || args.skip()) return;
  float steps = args.steps[i] + 1.0f;
  args.steps[i] = steps;
  if (args.lr_f32 != nullptr) rule.lr = *args.lr_f32;
  if (args.lr_f64 != nullptr) rule.lr = *args.lr_f64;
  GradSettings grad = {args.inv_scale != nullptr ? *args.inv_scale : 1.0,
                       args.clip != nullptr ? *args.clip : 1.0, args.max_value, args.maximize};
  int64_t step = static_cast<int64_t>(steps);
  result[i] = {step_constants(rule, grad, step), step};
}

// kState, kState + 1: the states; kScale, kScale + 1: the scales of those in 8 bits.
enum StepArray { kParam, kGrad, kMaster, kState, kScale = kState + 2 };
constexpr int kStepArrays = kScale + 2;

struct StepTensor {
  void* data[kStepArrays];   // device memory, numel elements each; scales: one per 256
  Dtype dtype[kStepArrays];  // of master and states perhaps none; f64: of all tensors or of none
  int64_t numel;
  int64_t index;  // for stochastic rounding
};

// So that a lane has the same places of a block in every round (random_in_block).
static_assert(kThreads * kGroup % kState8Block == 0 && kChunk % kState8Block == 0);

// The tags of a tensor: its position in the call's list, its index, the formats of its arrays.
enum StepTag { kNumber, kIndex, kDtypes, kStepTags };
using StepLaunch = TensorList<kStepArrays, kStepTags>;

// Arrays of state for which a rule has registers: as many as its last form uses.
template <class Rule>
constexpr int kRuleStates = Rule::states(Rule::kVariants - 1);

// What the elements of a chunk have in common.
template <class Rule, class Real>
struct StepChunk {
  static constexpr int kStates = kRuleStates<Rule>;

  Array array[kState + kStates];
  float* scale[kStates];
  typename Rule::template Scalars<Real> scalars;
  int64_t seed, step;
  int index, variant;
  PhiloxWords in_block[kStates];  // for states in 8 bits

  __device__ __forceinline__ StepChunk(const StepLaunch& list, int tensor, const Rule& rule,
                                       const StepArgs& args, const StepOfTensor<Rule>& of_tensor)
      : seed(args.seed), step(of_tensor.step), index(list.tag[kIndex][tensor]) {
    uint32_t dtypes = list.tag[kDtypes][tensor];
#pragma unroll
    for (int a = 0; a < kState + kStates; ++a) {
      array[a] = {list.data[a][tensor], static_cast<Dtype>(dtypes >> (4 * a) & 0xFu)};
    }
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      scale[k] = static_cast<float*>(list.data[kScale + k][tensor]);
    }
    if constexpr (sizeof(Real) == 8) {
      scalars = of_tensor.constants.wide;
    } else {
      scalars = of_tensor.constants.narrow;
    }
    variant = rule.variant(has_state() ? kStates : 0, step);
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (array[kState + k].dtype == Dtype::u8) {
        in_block[k] = random_in_block(random(kFirstStateStream + k));
      }
    }
  }

  __device__ __forceinline__ RandomStream random(int stream) const {
    return random_stream(seed, step, index, static_cast<Stream>(stream));
  }

  __device__ __forceinline__ bool has_8_bits() const {
    bool any = false;
#pragma unroll
    for (int k = 0; k < kStates; ++k) any |= array[kState + k].dtype == Dtype::u8;
    return any;
  }

  // Whether the param has states: known while compiling but for a rule whose first form has none.
  __device__ __forceinline__ bool has_state() const {
    return Rule::states(0) > 0 || array[kState].dtype != Dtype::none;
  }
};

// The formula in the form that is known only now, for the elements of a group.
template <class Rule, class Real, int states, int from = 0>
__device__ __forceinline__ void update_group(int variant, Real (&p)[kGroup],
                                             const Real (&g)[kGroup], Real (&s)[states][kGroup],
                                             const typename Rule::template Scalars<Real>& scalars) {
  if constexpr (from + 1 < Rule::kVariants) {
    if (variant != from) {
      update_group<Rule, Real, states, from + 1>(variant, p, g, s, scalars);
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    p[j] = Rule::template update<from>(p[j], g[j], s[0][j], s[states - 1][j], scalars);
  }
}

// Elements [i, i + count) of a tensor, at most eight; lanes: those of the warp that call this.
template <class Rule, class Real>
__device__ __forceinline__ void step_group(const StepChunk<Rule, Real>& c, const StepArgs& args,
                                           int64_t i, int count, unsigned lanes) {
  constexpr int states = kRuleStates<Rule>;
  const Array &param = c.array[kParam], &master = c.array[kMaster];
  const bool has_master = master.dtype != Dtype::none, narrow = master.dtype == Dtype::i8;
  const bool split = narrow || master.dtype == Dtype::i16;
  const bool has_state = c.has_state();
  Group<Real> weight, rest, grad, state[states];
  grad.load(c.array[kGrad], i, count);
#pragma unroll
  for (int k = 0; k < states; ++k) {
    if (has_state) state[k].load(c.array[kState + k], i, count);
  }
  weight.load(has_master && !split ? master : param, i, count);
  Real p[kGroup], g[kGroup], s[states][kGroup];
  if (split) {
    rest.load(master, i, count);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      uint32_t bits = narrow ? rest.byte(j) << 8 : rest.half(j);
      p[j] = join_master({weight.half(j)}, static_cast<int16_t>(bits));
    }
  } else {
    weight.decode(has_master ? master.dtype : param.dtype, p);
  }
  grad.decode(c.array[kGrad].dtype, g);
#pragma unroll
  for (int k = 0; k < states; ++k) {
    if constexpr (sizeof(Real) == 4) {
      if (has_state && c.array[kState + k].dtype == Dtype::u8) {
        float scale = c.scale[k][i / kState8Block];
        k == 0 ? decode_group<true>(state[k], scale, s[k])
               : decode_group<false>(state[k], scale, s[k]);
        continue;
      }
    }
    state[k].decode(c.array[kState + k].dtype, s[k]);
  }

  update_group<Rule>(c.variant, p, g, s, c.scalars);

  uint32_t of_block = 0;
  if (sizeof(Real) == 4 && c.has_8_bits()) {
    of_block = random_of_block(c.random(kParamStream), i / kState8Block);
  }
#pragma unroll
  for (int k = 0; k < states; ++k) {
    const Array& a = c.array[kState + k];
    if (!has_state) break;
    if constexpr (sizeof(Real) == 4) {
      if (a.dtype == Dtype::u8) {
        const PhiloxWords& in_block = c.in_block[k];
        float scale =
            k == 0 ? encode_group<true>(s[k], count, lanes, k, in_block, of_block, state[k])
                   : encode_group<false>(s[k], count, lanes, k, in_block, of_block, state[k]);
        if (i % kState8Block == 0) c.scale[k][i / kState8Block] = scale;
        state[k].store(a, i, count);
        continue;
      }
    }
    if (sizeof(Real) == 4 && a.dtype == Dtype::bf16) {
      state[k].encode(s[k], random_words(c.random(kFirstStateStream + k), i / kGroup));
    } else {
      state[k].encode(a.dtype, s[k]);
    }
    state[k].store(a, i, count);
  }
  if (split) {
    PhiloxWords bits = {};
    if (narrow) {  // of_block would need a register up to here
      bits = random_in_block(c.random(kParamStream));
      of_block = random_of_block(c.random(kParamStream), i / kState8Block);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      float x = static_cast<float>(p[j]);
      uint32_t random =
          block_random(static_cast<uint16_t>(random16(bits, j)), static_cast<uint16_t>(of_block));
      SplitMaster both = split_master(narrow ? stochastic_24(x, random) : x);
      weight.set_half(j, both.param.bits);
      uint16_t remainder = static_cast<uint16_t>(both.remainder);
      if (narrow) {
        rest.set_byte(j, static_cast<uint8_t>(remainder >> 8));
      } else {
        rest.set_half(j, remainder);
      }
    }
    rest.store(master, i, count);
  } else if (has_master) {
    rest.encode(master.dtype, p);
    rest.store(master, i, count);
    weight.encode(param.dtype, p);
  } else if (args.stochastic_rounding && param.dtype == Dtype::bf16) {
    weight.encode(p, random_words(c.random(kParamStream), i / kGroup));
  } else {
    weight.encode(param.dtype, p);
  }
  weight.store(param, i, count);
}

template <class Rule, class Real>
__global__ void __launch_bounds__(kThreads, sizeof(Real) == 8 ? 1 : 2)
    step_kernel(const __grid_constant__ StepLaunch list, const Rule rule, const StepArgs args,
                const StepOfTensor<Rule>* of_tensors) {
  if (args.skip()) return;
  for (int c = blockIdx.x; c < list.chunks(); c += gridDim.x) {
    Chunk chunk = list.chunk(c);
    StepChunk<Rule, Real> shared(list, chunk.tensor, rule, args,
                                 of_tensors[list.tag[kNumber][chunk.tensor]]);
    for (int i = threadIdx.x * kGroup; i < chunk.size; i += kThreads * kGroup) {
      int left = static_cast<int>(chunk.size) - i;
      int in_block = i % static_cast<int>(kState8Block);
      step_group(shared, args, chunk.begin + i, left < kGroup ? left : kGroup,
                 lanes_of_block(left + in_block));
    }
  }
}

// of_tensors: scratch, one entry per tensor.
template <class Rule>
cudaError_t step(const std::vector<StepTensor>& tensors, const Rule& rule, const StepArgs& args,
                 StepOfTensor<Rule>* of_tensors, const Gpu& gpu) {
  int count = static_cast<int>(tensors.size());
  if (count == 0) return cudaSuccess;
  cudaError_t error = launch(count_steps_kernel<Rule>, {(count + kThreads - 1) / kThreads},
                             gpu.stream, rule, args, count, of_tensors);
  for (bool wide : {false, true}) {
    if (error != cudaSuccess) return error;
    auto entry = [&](int64_t i, TensorEntry<kStepArrays, kStepTags>& e) {
      const StepTensor& t = tensors[i];
      uint32_t dtypes = 0;
      for (int a = 0; a < kStepArrays; ++a) {
        e.data[a] = t.data[a];
        dtypes |= static_cast<uint32_t>(t.dtype[a]) << (4 * a);
      }
      e.numel = t.numel;
      e.tag[kNumber] = static_cast<int32_t>(i);
      e.tag[kIndex] = static_cast<int32_t>(t.index);
      e.tag[kDtypes] = static_cast<int32_t>(dtypes);
      return t.numel > 0 && (t.dtype[kParam] == Dtype::f64) == wide;
    };
    auto* kernel = wide ? step_kernel<Rule, double> : step_kernel<Rule, float>;
    error = for_lists<kStepArrays, kStepTags>(count, entry, [&](const StepLaunch& list) {
      return launch_over(kernel, list.chunks(), gpu, list, rule, args, of_tensors);
    });
  }
  return error;
}

}  // namespace mixprec::cuda
