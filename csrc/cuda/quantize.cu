// amax, quantize and dequantize on CUDA tensors.
#include <tuple>

#include "cuda/dequantize.cuh"
#include "cuda/on_device.h"
#include "cuda/quantize.cuh"

namespace mixprec::cuda {

namespace {

Dtype check_input(const Tensor& x, const char* what) {
  Dtype dtype = dtype_of(x, what);
  STD_TORCH_CHECK(is_float(dtype) && x.is_cuda(), what,
                  " must be fp32, bf16 or fp16 on a CUDA device");
  return dtype;
}

float* fp32_of(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

// Two fp32: room for an AmaxState, cleared. Two more for the op's own use.
Tensor scratch_for_amax(const Tensor& x, cudaStream_t stream, const char* op) {
  Tensor scratch = empty_on(x, {4}, ScalarType::Float);
  check_launch(cudaMemsetAsync(scratch.mutable_data_ptr(), 0, sizeof(AmaxState), stream), op);
  return scratch;
}

Tensor amax_op(Tensor x) {
  Dtype dtype = check_input(x, "amax: x");
  OnDevice device(x);
  x = dense(x);
  Tensor result = empty_on(x, {}, ScalarType::Float);
  Tensor scratch = scratch_for_amax(x, device.stream, "amax");
  auto* state = static_cast<AmaxState*>(scratch.mutable_data_ptr());
  check_launch(amax(dtype, x.const_data_ptr(), x.numel(), state, fp32_of(result), ScaleOut{},
                    device.sms, device.stream),
               "amax");
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_op(Tensor x, ScalarType type, MaybeTensor scale,
                                                       bool transpose, bool power_of_two_scale) {
  Dtype from = check_input(x, "quantize: x");
  Dtype to = dtype_of(type, "quantize: dtype");
  STD_TORCH_CHECK(to != Dtype::f32 && to != Dtype::f64,
                  "quantize: dtype must be fp8, fp16 or bf16");
  STD_TORCH_CHECK(!transpose || x.dim() >= 2,
                  "quantize: transpose needs x of 2 or more dimensions");
  const float* given = scalar_on(scale, x, "quantize: scale");

  OnDevice device(x);
  x = row_major(x);
  int64_t cols = transpose ? x.size(x.dim() - 1) : x.numel();
  int64_t rows = 1;
  for (int64_t d = 0; transpose && d + 1 < x.dim(); ++d) rows *= x.size(d);
  Tensor data = empty_on(x, x.sizes(), type);
  Tensor data_t = empty_on(x, {transpose ? cols : 0, transpose ? rows : 0}, type);
  Tensor scale_inv = empty_on(x, {}, ScalarType::Float);
  Tensor largest = empty_on(x, {}, ScalarType::Float);
  Tensor scratch = scratch_for_amax(x, device.stream, "quantize");
  Quantize args = {from,
                   to,
                   x.const_data_ptr(),
                   data.mutable_data_ptr(),
                   data_t.mutable_data_ptr(),
                   rows,
                   cols,
                   transpose,
                   power_of_two_scale,
                   given,
                   fp32_of(scale_inv),
                   fp32_of(largest),
                   fp32_of(scratch) + 2,
                   static_cast<AmaxState*>(scratch.mutable_data_ptr())};
  check_launch(quantize(args, device.sms, device.stream), "quantize");
  return {data, data_t, scale_inv, largest};
}

Tensor dequantize_op(Tensor data, Tensor scale_inv, ScalarType type) {
  Dtype from = dtype_of(data, "dequantize: data");
  Dtype to = dtype_of(type, "dequantize: dtype");
  STD_TORCH_CHECK(from != Dtype::f32 && from != Dtype::f64 && data.is_cuda(),
                  "dequantize: data must be fp8, fp16 or bf16 on a CUDA device");
  STD_TORCH_CHECK(is_float(to), "dequantize: dtype must be fp32, bf16 or fp16");
  check_scalar_on(scale_inv, ScalarType::Float, data, "dequantize: scale_inv");

  OnDevice device(data);
  data = row_major(data);
  Tensor out = empty_on(data, data.sizes(), type);
  check_launch(
      dequantize(from, to, data.const_data_ptr(), out.mutable_data_ptr(), data.numel(),
                 static_cast<const float*>(scale_inv.const_data_ptr()), device.sms, device.stream),
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
