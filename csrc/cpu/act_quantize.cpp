// act_quantize and act_backward.
#include "cpu/quantize.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

// x and up as they are read, row-major.
struct Inputs {
  Dtype dtype;
  Tensor x;
  MaybeTensor up;

  const void* x_at(int64_t i) const { return at(x.const_data_ptr(), dtype, i); }
  const void* up_at(int64_t i) const { return up ? at(up->const_data_ptr(), dtype, i) : nullptr; }
};

Inputs inputs_of(const Tensor& x, const MaybeTensor& up, const char* op) {
  Dtype dtype = float_dtype(x, op);
  if (!up.has_value()) return {dtype, row_major(x), std::nullopt};
  STD_TORCH_CHECK(same_shape(x, *up) && up->scalar_type() == x.scalar_type(), op,
                  ": up must have x's shape and dtype");
  return {dtype, row_major(x), row_major(*up)};
}

}  // namespace

// x, up: any shape, of one dtype -> the results of a cast
Quantized act_quantize(Tensor x, MaybeTensor up, Text kind, ScalarType type, MaybeTensor scale,
                       bool transpose, Text granularity, bool power_of_two_scale,
                       MaybeTensor record) {
  const char* op = "act_quantize";
  Inputs in = inputs_of(x, up, op);
  Activation act = activation_of(kind, op);
  int64_t cols = as_matrix(x).second;
  auto produce = [&](int64_t first, int64_t rows, float* const* out, bool) {
    int64_t i = first * cols;
    loops().act(act, in.dtype, in.x_at(i), in.up_at(i), out[0], rows * cols);
  };
  Cast cast = {type, scale, transpose, granularity, power_of_two_scale, record};
  return cast_rows(op, x, cast, 1, produce)[0];
}

// g, x, up: any shape -> the results of a cast of dx, then of dup (empty without up)
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
act_backward(Tensor g, Tensor x, MaybeTensor up, Text kind, ScalarType type, MaybeTensor scale,
             bool transpose, Text granularity, bool power_of_two_scale, MaybeTensor record) {
  const char* op = "act_backward";
  Inputs in = inputs_of(x, up, op);
  Activation act = activation_of(kind, op);
  Dtype g_dtype = float_dtype(g, op);
  STD_TORCH_CHECK(same_shape(g, x), op, ": g must have x's shape");
  g = row_major(g);
  int64_t cols = as_matrix(x).second;
  auto produce = [&](int64_t first, int64_t rows, float* const* out, bool) {
    int64_t i = first * cols;
    loops().act_backward(act, g_dtype, in.dtype, at(g.const_data_ptr(), g_dtype, i), in.x_at(i),
                         in.up_at(i), out[0], out[1], rows * cols);
  };
  Cast cast = {type, scale, transpose, granularity, power_of_two_scale, record};
  auto casts = cast_rows(op, x, cast, up.has_value() ? 2 : 1, produce);
  auto nothing = [] { return empty({0}, ScalarType::Float); };
  if (!up.has_value()) {
    casts.emplace_back(empty({0}, type), empty({0, 0}, type), nothing(), nothing(), nothing());
  }
  return std::tuple_cat(casts[0], casts[1]);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("act_quantize", TORCH_BOX(&mixprec::cpu::act_quantize));
  m.impl("act_backward", TORCH_BOX(&mixprec::cpu::act_backward));
}
