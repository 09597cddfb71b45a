// The tensors of an optimizer's update: those of each param in one memory order for the kernels.
#pragma once

#include <array>

#include "arguments/step.h"
#include "cuda/common/on_device.h"
#include "cuda/optim/step.cuh"

namespace mixprec::cuda {

class ParamBundles {
 public:
  // Checks all tensors before any is copied or written.
  explicit ParamBundles(const UpdateLists& lists) : lists_(lists) {
    std::vector<CheckedParam> checked = UpdateCheck(lists).run();
    for (size_t i = 0; i < checked.size(); ++i) {
      const CheckedParam& c = checked[i];
      Bundle& bundle = bundles_.emplace_back();
      auto& at = bundle.at;
      bundle.dtype = {c.param, c.grad, c.master, c.state[0], c.state[1], Dtype::f32, Dtype::f32};
      at[kParam] = lists.params[i], at[kGrad] = lists.grads[i];
      if (!lists.masters.empty()) at[kMaster] = lists.masters[i];
      for (int k = 0; k < lists.states_each(); ++k) {
        at[kState + k] = lists.states[lists.place(k, i)];
        if (c.state[k] == Dtype::u8) at[kScale + k] = lists.state_scales[lists.place(k, i)];
      }
      bundle.random = c.random;
    }
  }

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
        t.dtype[a] = bundle.dtype[a];
        if (!bundle.flat[a].has_value()) continue;
        t.data[a] = a == kGrad ? const_cast<void*>(bundle.flat[a]->const_data_ptr())
                               : bundle.flat[a]->mutable_data_ptr();
      }
      t.numel = bundle.at[kParam]->numel();
      t.index = lists_.indices.empty() ? 0 : lists_.indices[result.size()];
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
    std::array<Dtype, kStepArrays> dtype;
    bool random;
  };

  // Whether all arrays of a param have one memory order without gaps.
  static bool is_flat(const Bundle& bundle) {
    const Tensor& param = *bundle.at[kParam];
    bool flat = bundle.random ? param.is_contiguous() : is_dense(param);
    for (int a = 0; a < kScale; ++a) {
      flat = flat && (!bundle.at[a].has_value() || same_strides(param, *bundle.at[a]));
    }
    return flat;
  }

  const UpdateLists& lists_;
  std::vector<Bundle> bundles_;
};

}  // namespace mixprec::cuda
