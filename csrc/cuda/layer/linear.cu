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

  CastOperand cast(const Tensor& x, const RoleCast& how, bool own_t, const Delayed* delayed,
                   const MaybeTensor&) const {
    if (how.grain == Grain::none) return {{torch::stable::to(x, how.type), {}, {}}, {}};
    static const Text names[] = {"", "tensor", "row", "block1x128", "block128x128"};
    STD_TORCH_CHECK(how.grain != Grain::mx, "linear: block formats run op by op on a GPU");
    MaybeTensor scale;
    if (delayed != nullptr && delayed->scale) {
      scale = torch::stable::select(*delayed->scale, 0, delayed->index);
    }
    LayerCast c = cast_for_layer(
        x, {how.type, scale, own_t, names[static_cast<int>(how.grain)], how.power_of_two});
    if (delayed != nullptr && delayed->amax) {  // NaN stays
      called("aten::maximum", "out", *delayed->amax, c.amax, *delayed->amax);
    }
    CastOperand out = {{c.data, c.scale_inv, {}}, {}};
    if (own_t) out.own_t = {c.data_t, c.scale_inv_t ? c.scale_inv_t : c.scale_inv, {}};
    return out;
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
};

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("linear_forward", TORCH_BOX(&mixprec::linear_forward<mixprec::cuda::CudaLayer>));
  m.impl("linear_backward", TORCH_BOX(&mixprec::linear_backward<mixprec::cuda::CudaLayer>));
}
