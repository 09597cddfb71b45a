// norm_quantize and norm_backward on CUDA tensors.
#include "cuda/fused/norm_backward.cuh"
#include "cuda/fused/norm_quantize.cuh"
#include "cuda/quantize/results.h"

namespace mixprec::cuda {

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> norm_quantize_op(
    Tensor x, MaybeTensor residual, MaybeTensor weight, MaybeTensor bias, double eps,
    bool subtract_mean, ScalarType type, MaybeTensor scale, bool transpose, Text granularity,
    bool power_of_two_scale, MaybeTensor record) {
  STD_TORCH_CHECK(x.dim() > 0, "norm_quantize: x must have 1 or more dimensions");
  OnDevice device(x);
  x = checked(x, x, false, "norm_quantize: x");
  residual = checked(residual, x, false, "norm_quantize: residual");
  STD_TORCH_CHECK(!residual.has_value() || residual->scalar_type() == x.scalar_type(),
                  "norm_quantize: residual must be of x's dtype");
  weight = checked(weight, x, true, "norm_quantize: weight");
  bias = checked(bias, x, true, "norm_quantize: bias");

  int64_t rows = as_matrix(x).first;
  Tensor total = residual.has_value() ? empty_on(x, x.sizes(), x.scalar_type())
                                      : empty_on(x, {0}, x.scalar_type());
  Tensor mean = vector_on(x, rows, subtract_mean), rstd = vector_on(x, rows, true);
  Cast cast = {type, scale, transpose, granularity, power_of_two_scale, record};
  Quantized q = quantized("norm_quantize", x, cast, device, [&](const Quantize& args) {
    NormRows all = {{args.rows, args.cols, false},
                    floats(x),
                    floats(residual),
                    floats(weight),
                    floats(bias),
                    false,
                    residual.has_value() ? total.mutable_data_ptr() : nullptr,
                    static_cast<float>(eps),
                    vector_of(mean, subtract_mean),
                    fp32_of(rstd)};
    return norm_quantize(all, args, device);
  });
  return std::tuple_cat(q, std::make_tuple(total, mean, rstd));
}

std::tuple<Tensor, Tensor, Tensor> norm_backward_op(Tensor g, Tensor x, MaybeTensor weight,
                                                    Tensor mean, Tensor rstd, MaybeTensor g_total,
                                                    bool with_bias) {
  STD_TORCH_CHECK(x.dim() > 0, "norm_backward: x must have 1 or more dimensions");
  OnDevice device(x);
  x = checked(x, x, false, "norm_backward: x");
  g = checked(g, x, false, "norm_backward: g");
  g_total = checked(g_total, x, false, "norm_backward: g_total");
  weight = checked(weight, x, true, "norm_backward: weight");
  auto [rows, cols] = as_matrix(x);
  bool layer_norm = mean.numel() > 0;
  for (const Tensor& t : {mean, rstd}) {
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && same_device(t, x) && t.dim() == 1 &&
                        (t.size(0) == rows || (t.get() == mean.get() && !layer_norm)),
                    "norm_backward: mean and rstd must be fp32 [M], x's rows, on x's CUDA device");
  }
  mean = row_major(mean), rstd = row_major(rstd);

  bool with_weight = weight.has_value(), any = with_weight || with_bias;
  Tensor dx = empty_on(x, x.sizes(), x.scalar_type());
  Tensor dweight = vector_on(x, cols, with_weight), dbias = vector_on(x, cols, with_bias);
  NormGradients a = {{rows, cols, false},
                     floats(g),
                     floats(x),
                     floats(weight),
                     floats(g_total),
                     layer_norm ? fp32_of(mean) : nullptr,
                     fp32_of(rstd),
                     dx.mutable_data_ptr(),
                     vector_of(dweight, with_weight),
                     vector_of(dbias, with_bias),
                     nullptr};
  Tensor bands = vector_on(x, 2 * a.bands_down() * cols, any);
  a.bands = fp32_of(bands);
  check_launch(norm_backward(a, device), "norm_backward");
  return {dx, dweight, dbias};
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("norm_quantize", TORCH_BOX(&mixprec::cuda::norm_quantize_op));
  m.impl("norm_backward", TORCH_BOX(&mixprec::cuda::norm_backward_op));
}
