// amax, quantize and dequantize on CUDA tensors.
#include "cuda/quantize/amax_array.cuh"
#include "cuda/quantize/arrays.cuh"
#include "cuda/quantize/dequantize.cuh"
#include "cuda/quantize/results.h"

namespace mixprec::cuda {

namespace {

Dtype check_input(const Tensor& x, const char* what) {
  Dtype dtype = dtype_of(x, what);
  STD_TORCH_CHECK(is_float(dtype) && x.is_cuda(), what,
                  " must be fp32, bf16 or fp16 on a CUDA device");
  return dtype;
}

Tensor amax_op(Tensor x) {
  Dtype dtype = check_input(x, "amax: x");
  OnDevice device(x);
  x = dense(x);
  Tensor result = empty_on(x, {}, ScalarType::Float);
  Tensor partials = words_on(x, partials_for(device.sms));
  check_launch(amax(dtype, x.const_data_ptr(), x.numel(), words_of(partials), fp32_of(result),
                    device.sms, device.stream),
               "amax");
  return result;
}

Quantized quantize_op(Tensor x, ScalarType type, MaybeTensor scale, bool transpose,
                      std::string granularity, bool power_of_two_scale) {
  Dtype from = check_input(x, "quantize: x");
  STD_TORCH_CHECK(type != ScalarType::Float && type != ScalarType::Double,
                  "quantize: dtype must be fp8, fp16 or bf16");
  STD_TORCH_CHECK(granularity != "mx", "quantize: granularity mx is that of quantize_mx");
  OnDevice device(x);
  x = row_major(x);
  Cast cast = {type, scale, transpose, granularity, power_of_two_scale};
  return quantized("quantize", x, cast, device.sms, [&](const Quantize& args) {
    return quantize(from, x.const_data_ptr(), args, device.sms, device.stream);
  });
}

// The shape of scale_inv determines the granularity.
ScaleGrid grid_of(const Tensor& scale_inv, int64_t rows, int64_t cols) {
  const float* data = static_cast<const float*>(scale_inv.const_data_ptr());
  if (scale_inv.numel() == 1) return {data, cols, 0, 0, 0, 0};
  bool is_matrix = scale_inv.dim() == 2;
  int64_t r = is_matrix ? scale_inv.size(0) : -1, c = is_matrix ? scale_inv.size(1) : -1;
  STD_TORCH_CHECK((r == rows && (c == 1 || c == tiles_of(cols))) ||
                      (r == tiles_of(rows) && c == tiles_of(cols)),
                  "dequantize: scale_inv fits no granularity");
  return {data,
          cols,
          r == rows ? 1 : kTile,
          c == 1 ? std::max<int64_t>(1, cols) : kTile,
          scale_inv.stride(0),
          scale_inv.stride(1)};
}

Tensor dequantize_op(Tensor data, Tensor scale_inv, ScalarType type) {
  Dtype from = dtype_of(data, "dequantize: data");
  Dtype to = dtype_of(type, "dequantize: dtype");
  STD_TORCH_CHECK(from != Dtype::f32 && from != Dtype::f64 && data.is_cuda(),
                  "dequantize: data must be fp8, fp16 or bf16 on a CUDA device");
  STD_TORCH_CHECK(is_float(to), "dequantize: dtype must be fp32, bf16 or fp16");
  STD_TORCH_CHECK(scale_inv.scalar_type() == ScalarType::Float && on_device_of(scale_inv, data),
                  "dequantize: scale_inv must be fp32 on data's device");

  OnDevice device(data);
  data = row_major(data);
  auto [rows, cols] = as_matrix(data);
  Tensor out = empty_on(data, data.sizes(), type);
  check_launch(dequantize(from, to, data.const_data_ptr(), out.mutable_data_ptr(), data.numel(),
                          grid_of(scale_inv, rows, cols), device.sms, device.stream),
               "dequantize");
  return out;
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("amax", TORCH_BOX(&mixprec::cuda::amax_op));
  m.impl("quantize", TORCH_BOX(&mixprec::cuda::quantize_op));
  m.impl("dequantize", TORCH_BOX(&mixprec::cuda::dequantize_op));
}
