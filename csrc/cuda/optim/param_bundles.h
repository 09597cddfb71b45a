// The tensors of an optimizer's update: checks them, and brings those of each param into one memory
// order for the kernels.
#pragma once

#include <array>

#include "cuda/common/on_device.h"
#include "cuda/optim/step.cuh"
#include "overlap.h"

namespace mixprec::cuda {

inline Stored stored_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return Stored::f32;
    case ScalarType::BFloat16:
      return Stored::bf16;
    case ScalarType::Half:
      return Stored::f16;
    case ScalarType::Short:
      return Stored::i16;
    case ScalarType::Double:
      return Stored::f64;
    case ScalarType::Byte:
      return Stored::u8;
    default:
      return Stored::absent;
  }
}

inline Stored stored_of(const MaybeTensor& t) {
  return t.has_value() ? stored_of(t->scalar_type()) : Stored::absent;
}

// The lists of a call.
struct StepLists {
  const char* op;
  const Tensors &params, &grads, &states, &scales, &masters;
  const Tensor& steps;
};

class ParamBundles {
 public:
  // Checks all tensors before any is copied or written.
  ParamBundles(const StepLists& lists, double max_value, bool stochastic_rounding,
               const std::vector<int64_t>& indices)
      : lists_(lists), stochastic_rounding_(stochastic_rounding) {
    const Tensors& params = lists.params;
    size_t count = params.size();
    require(lists.steps.scalar_type() == ScalarType::Float && lists.steps.dim() == 1 &&
                lists.steps.is_cuda() && lists.steps.is_contiguous() &&
                lists.steps.numel() == static_cast<int64_t>(count),
            "steps must be fp32 [params], contiguous, on a CUDA device");
    require(max_value > 0, "max_value must be positive");
    require(lists.grads.size() == count && (lists.masters.empty() || lists.masters.size() == count),
            "grads and masters must have one tensor per param");
    states_ = count == 0 ? 0 : static_cast<int>(lists.states.size() / count);
    require(states_ <= 2 && lists.states.size() == states_ * count &&
                (lists.scales.empty() || lists.scales.size() == lists.states.size()),
            "states and state_scales must have one tensor per state and param");
    bool random = stochastic_rounding;
    for (size_t i = 0; i < count; ++i) {
      auto& at = bundles_.emplace_back().at;
      at[kParam] = params[i], at[kGrad] = lists.grads[i];
      if (!lists.masters.empty()) at[kMaster] = lists.masters[i];
      for (int k = 0; k < states_; ++k) {
        at[kState + k] = lists.states[k * count + i];
        if (stored_of(at[kState + k]) != Stored::u8) continue;
        require(!lists.scales.empty(), "state_scales must hold the scales of states in uint8");
        at[kScale + k] = lists.scales[k * count + i];
      }
      check(bundles_[i]);
      random |= is_random(bundles_[i]);
    }
    check_disjoint(params, lists.op, "params");
    require(indices.size() == count || (indices.empty() && !random),
            "indices must have one number per param for stochastic rounding");
    for (int64_t index : indices) {
      require(index >= 0 && index < int64_t{1} << 30, "indices must be in [0, 2^30)");
    }
    indices_ = indices;
  }

  // The number of arrays of state that each param has.
  int states() const { return states_; }

  // Must be called with the params' device as the current one.
  std::vector<StepTensor> tensors() {
    std::vector<StepTensor> result;
    for (Bundle& bundle : bundles_) {
      if (is_flat(bundle)) {
        bundle.flat = bundle.at;
      } else {
        for (int a = 0; a < kStepArrays; ++a) {
          if (bundle.at[a].has_value()) bundle.flat[a] = row_major(*bundle.at[a]);
        }
      }
      StepTensor t = {};
      for (int a = 0; a < kStepArrays; ++a) {
        t.stored[a] = stored_of(bundle.flat[a]);
        if (!bundle.flat[a].has_value()) continue;
        t.data[a] = a == kGrad ? const_cast<void*>(bundle.flat[a]->const_data_ptr())
                               : bundle.flat[a]->mutable_data_ptr();
      }
      t.numel = bundle.at[kParam]->numel();
      t.index = indices_.empty() ? 0 : indices_[result.size()];
      result.push_back(t);
    }
    return result;
  }

  // After the launches: copies back the tensors that were copied for them.
  void write_back() const {
    for (const Bundle& bundle : bundles_) {
      for (int a = 0; a < kStepArrays; ++a) {
        if (a != kGrad && bundle.at[a].has_value())
          cuda::write_back(*bundle.at[a], *bundle.flat[a]);
      }
    }
  }

 private:
  // One param with its grad, master and states; flat: what the kernels read and write.
  struct Bundle {
    std::array<MaybeTensor, kStepArrays> at, flat;
  };

  void require(bool fits, const char* what) const { STD_TORCH_CHECK(fits, lists_.op, ": ", what); }

  void check(const Bundle& bundle) const {
    const Tensor& param = *bundle.at[kParam];
    for (int k = 0; k < 2; ++k) {
      const MaybeTensor& scale = bundle.at[kScale + k];
      require(!scale.has_value() ||
                  (together(*scale, lists_.steps) && stored_of(scale) == Stored::f32 &&
                   scale->is_contiguous() && scale->dim() == 1 &&
                   scale->numel() == state8_blocks(param.numel())),
              "state_scales of states in uint8 must be fp32 [ceil(numel / 256)], contiguous");
    }
    for (int a = 0; a < kScale; ++a) {
      if (!bundle.at[a].has_value()) continue;
      const Tensor& t = *bundle.at[a];
      require(together(t, lists_.steps) && same_shape(t, param) && (a == kGrad || is_writable(t)),
              "a grad, a state and a master must have their param's shape; all must be on one CUDA "
              "device, and all but grads writable");
    }
    Stored p = stored_of(bundle.at[kParam]), g = stored_of(bundle.at[kGrad]);
    Stored real = p == Stored::f64 ? Stored::f64 : Stored::f32;
    require(p != Stored::absent && p != Stored::i16 && p != Stored::u8,
            "a param must be fp32, bf16, fp16 or fp64");
    require(g != Stored::absent && g != Stored::i16 && g != Stored::u8 &&
                (g == Stored::f64) == (p == Stored::f64),
            "a grad must be fp32, bf16 or fp16 (fp64 for an fp64 param)");
    if (bundle.at[kMaster].has_value()) {
      Stored m = stored_of(bundle.at[kMaster]);
      require(m == real || (m == Stored::i16 && p == Stored::bf16),
              "a master must be fp32 (fp64 for an fp64 param), or int16 for a bf16 param");
    }
    for (int a = kState; a < kScale; ++a) {
      Stored s = stored_of(bundle.at[a]);
      bool low = (s == Stored::bf16 || s == Stored::u8) && real == Stored::f32;
      require(!bundle.at[a].has_value() || s == real || low,
              "a state must be fp32, bf16 or uint8 (fp64 for an fp64 param)");
    }
  }

  // Whether random bits are used; these are numbered in row-major order.
  bool is_random(const Bundle& bundle) const {
    bool param = stochastic_rounding_ && !bundle.at[kMaster].has_value();
    bool random = param && stored_of(bundle.at[kParam]) == Stored::bf16;
    for (int a = kState; a < kScale; ++a) {
      Stored s = stored_of(bundle.at[a]);
      random = random || s == Stored::bf16 || s == Stored::u8;
    }
    return random;
  }

  // Whether all arrays of a param have one memory order without gaps.
  bool is_flat(const Bundle& bundle) const {
    const Tensor& param = *bundle.at[kParam];
    bool flat = is_random(bundle) ? param.is_contiguous() : is_dense(param);
    for (int a = 0; a < kScale; ++a) {
      flat = flat && (!bundle.at[a].has_value() || same_strides(param, *bundle.at[a]));
    }
    return flat;
  }

  const StepLists& lists_;
  bool stochastic_rounding_;
  int states_;
  std::vector<Bundle> bundles_;
  std::vector<int64_t> indices_;
};

}  // namespace mixprec::cuda
