// act_quantize and act_backward on CUDA tensors.
#include "cuda/fused/act_quantize.cuh"
#include "cuda/quantize/results.h"

namespace mixprec::cuda {

namespace {

MaybeTensor checked_up(const MaybeTensor& up, const Tensor& x, const std::string& op) {
  STD_TORCH_CHECK(!up.has_value() || up->scalar_type() == x.scalar_type(), op,
                  ": up must be of x's dtype");
  return checked(up, x, false, op + ": up");
}

Quantized act_quantize_op(Tensor x, MaybeTensor up, Text kind, ScalarType type, MaybeTensor scale,
                          bool transpose, Text granularity, bool power_of_two_scale,
                          MaybeTensor record) {
  Activation activation = activation_of(kind, "act_quantize");
  OnDevice device(x);
  x = checked(x, x, false, "act_quantize: x");
  up = checked_up(up, x, "act_quantize");
  Cast cast = {type, scale, transpose, granularity, power_of_two_scale, record};
  return quantized("act_quantize", x, cast, device, [&](const Quantize& args) {
    return act_quantize(floats(x), floats(up), activation, args, device);
  });
}

// The results for an `up` that is not given.
Quantized nothing(const Tensor& x, ScalarType type) {
  auto none = [&] { return empty_on(x, {0}, ScalarType::Float); };
  return {empty_on(x, {0}, type), empty_on(x, {0, 0}, type), none(), none(), none()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
act_backward_op(Tensor g, Tensor x, MaybeTensor up, Text kind, ScalarType type, MaybeTensor scale,
                bool transpose, Text granularity, bool power_of_two_scale, MaybeTensor record) {
  Activation activation = activation_of(kind, "act_backward");
  OnDevice device(x);
  x = checked(x, x, false, "act_backward: x");
  g = checked(g, x, false, "act_backward: g");
  up = checked_up(up, x, "act_backward");
  Cast cast = {type, scale, transpose, granularity, power_of_two_scale, record};
  CastOnDevice dx = allocated("act_backward", x, cast, device), dup = {};
  cast.scale.reset(), cast.record.reset();  // they are dx's
  if (up.has_value()) dup = allocated("act_backward", x, cast, device);
  check_launch(act_backward(floats(g), floats(x), floats(up), activation, dx.args,
                            up.has_value() ? &dup.args : nullptr, device),
               "act_backward");
  return std::tuple_cat(dx.results, up.has_value() ? dup.results : nothing(x, type));
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("act_quantize", TORCH_BOX(&mixprec::cuda::act_quantize_op));
  m.impl("act_backward", TORCH_BOX(&mixprec::cuda::act_backward_op));
}
