// linear_forward and linear_backward on CUDA tensors: casts by our kernels, products by ours or,
// where mixprec/ops/linear_pass.py has chosen it, by torch's.
#include "cuda/common/on_device.h"
#include "cuda/quantize/cast.h"
#include "layer.h"

namespace mixprec::cuda {

namespace {

template <class... Args>
Tensor called(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(args)> stack = {torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor t(const Tensor& x) { return torch::stable::transpose(x, 0, 1); }

MaybeTensor scale_of(const Read& r, bool as_rows) {
  const MaybeTensor& scale = r.stored.scale_inv;
  return !scale || scale->dim() == 0 || r.transposed != as_rows ? scale : MaybeTensor(t(*scale));
}

struct CudaLayer {
  int64_t choice;  // of product i, bits 2 * i: torch's, and 2 * i + 1: fast accumulation
  MaybeTensor offs;

  bool is_vendor(int i) const { return choice >> (2 * i) & 1; }
  bool is_fast(int i) const { return choice >> (2 * i + 1) & 1; }

  // In as few launches as there can be.
  void cast(const std::vector<CastCall>& calls) const {
    std::vector<ToCast> matrices;
    std::vector<CastOperand*> results;
    for (const CastCall& c : calls) {
      if (c.how.grain == Grain::none) {
        c.result->matrix.data = torch::stable::to(c.x, c.how.type);
        continue;
      }
      static const Text names[] = {"", "tensor", "row", "block1x128", "block128x128"};
      STD_TORCH_CHECK(c.how.grain != Grain::mx, "linear: block formats run op by op on a GPU");
      Cast how = {
          c.how.type, {}, c.own_t, names[static_cast<int>(c.how.grain)], c.how.power_of_two};
      matrices.push_back({c.x, how, scale_at(c), record_at(c)});
      results.push_back(c.result);
    }
    if (matrices.empty()) return;
    std::vector<LayerCast> made = cast_for_layer(matrices);
    for (size_t i = 0; i < made.size(); ++i) {
      const LayerCast& m = made[i];
      results[i]->matrix = {m.data, m.scale_inv, {}};
      if (m.data_t) results[i]->own_t = {m.data_t, m.scale_inv_t ? m.scale_inv_t : m.scale_inv, {}};
    }
  }

  Tensor multiply(const Read& a_, const Read& b_, ScalarType type, const MaybeTensor& bias,
                  int i) const {
    STD_TORCH_CHECK(!offs, "linear: groups run op by op on a GPU");
    Tensor a = a_.transposed ? t(*a_.stored.data) : *a_.stored.data;
    Tensor b = b_.transposed ? *b_.stored.data : t(*b_.stored.data);
    MaybeTensor of_a = scale_of(a_, true), of_b = scale_of(b_, false), none;
    if (!is_vendor(i)) {
      return called("mixprec::gemm", "", a, b, of_a, of_b, bias, type, is_fast(i));
    }
    if (of_a) {
      return called("aten::_scaled_mm", "", a, b, *of_a, *of_b, bias, none,
                    std::optional<ScalarType>(type), is_fast(i));
    }
    if (bias) return called("aten::linear", "", a, t(b), bias);
    if (a.scalar_type() == type) return called("aten::mm", "", a, b);
    return called("aten::mm", "dtype", a, b, type);
  }

  void accumulate(const Tensor& acc, const Read& a_, const Read& b_) const {
    Tensor a = a_.transposed ? t(*a_.stored.data) : *a_.stored.data;
    Tensor b = b_.transposed ? *b_.stored.data : t(*b_.stored.data);
    std::array<StableIValue, 5> stack = {
        torch::stable::detail::from(acc), torch::stable::detail::from(a),
        torch::stable::detail::from(b), torch::stable::detail::from(scale_of(a_, true)),
        torch::stable::detail::from(scale_of(b_, false))};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("mixprec::gemm_accumulate_", "", stack.data(), TORCH_ABI_VERSION));
  }

  MaybeTensor sum_of_rows(const Tensor&, ScalarType) const { return {}; }  // torch's, in Python

 private:
  static const float* scale_at(const CastCall& c) {
    if (c.delayed == nullptr || !c.delayed->scale) return nullptr;
    const Tensor& scale = *c.delayed->scale;
    STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float && scale.numel() == 2 &&
                        scale.is_contiguous() && same_device(scale, c.x),
                    "linear: scale must be fp32 [2] on x's device");
    return read_fp32(scale) + c.delayed->index;
  }
  static float* record_at(const CastCall& c) {
    if (c.delayed == nullptr || !c.delayed->amax) return nullptr;
    check_scalar(*c.delayed->amax, ScalarType::Float, c.x, "linear", "amax");
    return fp32_of(*c.delayed->amax);
  }
};

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("linear_forward", TORCH_BOX(&mixprec::linear_forward<mixprec::cuda::CudaLayer>));
  m.impl("linear_backward", TORCH_BOX(&mixprec::linear_backward<mixprec::cuda::CudaLayer>));
}
