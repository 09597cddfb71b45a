// amax, quantize and dequantize on CUDA tensors.
#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/cast.h"
#include "cuda/quantize/dequantize.cuh"
#include "cuda/quantize/quantize.cuh"
#include "cuda/quantize/results.h"

namespace mixprec::cuda {

namespace {

Tensor amax_op(Tensor x) {
  Dtype dtype = float_dtype(x, "amax: x");
  OnDevice device(x);
  x = dense(x);
  Tensor result = empty_on(x, {}, ScalarType::Float);
  Tensor partials = words_on(x, partials_for(device));
  cudaError_t error = with_float(dtype, [&]<class X>(Type<X>) {
    auto* data = static_cast<const X*>(x.const_data_ptr());
    return amax(data, x.numel(), words_of(partials), fp32_of(result), device);
  });
  check_launch(error, "amax");
  return result;
}

Quantized quantize_op(Tensor x, ScalarType type, MaybeTensor scale, bool transpose,
                      Text granularity, bool power_of_two_scale) {
  Dtype from = float_dtype(x, "quantize: x");
  STD_TORCH_CHECK(type != ScalarType::Float && type != ScalarType::Double,
                  "quantize: dtype must be fp8, fp16 or bf16");
  STD_TORCH_CHECK(granularity != "mx", "quantize: granularity mx is that of quantize_mx");
  OnDevice device(x);
  x = row_major(x);
  Cast cast = {type, scale, transpose, granularity, power_of_two_scale};
  return quantized("quantize", x, cast, device, [&](const Quantize& args) {
    return with_float(from, [&]<class X>(Type<X>) {
      Plain<X> source = {static_cast<const X*>(x.const_data_ptr())};
      return quantize_from(source, {{args}}, device);
    });
  });
}

ScaleGrid grid_of(const Tensor& scale_inv, const Tensor& data) {
  auto [rows, cols] = as_matrix(data);
  auto [rows_each, cols_each] = check_scale_inv(scale_inv, data, rows, cols);
  if (scale_inv.numel() == 1) return {read_fp32(scale_inv), cols, 0, 0, 0, 0};
  return {read_fp32(scale_inv), cols, rows_each, cols_each, scale_inv.stride(0),
          scale_inv.stride(1)};
}

Tensor dequantize_op(Tensor data, Tensor scale_inv, ScalarType type) {
  Dtype from = dtype_of(data, "dequantize: data");
  Dtype to = float_dtype(type, "dequantize: dtype");
  STD_TORCH_CHECK(from != Dtype::f32 && from != Dtype::f64,
                  "dequantize: data must be fp8, fp16 or bf16");
  ScaleGrid grid = grid_of(scale_inv, data);

  OnDevice device(data);
  data = row_major(data);
  Tensor out = empty_on(data, data.sizes(), type);
  check_launch(dequantize(from, to, data.const_data_ptr(), out.mutable_data_ptr(), data.numel(),
                          grid, device),
               "dequantize");
  return out;
}

}  // namespace

LayerCast cast_for_layer(Tensor x, const Cast& cast) {
  const char* op = "linear";
  Dtype from = float_dtype(x, "linear: x"), to = check_cast(cast, x, op);
  Granularity granularity = granularity_of(cast.granularity, op);
  const float* given = scalar_on(cast.scale, x, op, "scale");
  OnDevice device(x);
  x = row_major(x);
  auto [rows, cols] = as_matrix(x);
  LayerCast out = {empty_on(x, {rows, cols}, cast.type), {}, x, {}, x};
  if (cast.transpose) out.data_t = empty_on(x, {cols, rows}, cast.type);
  bool by_tensor = granularity == Granularity::tensor;
  if (!by_tensor) {
    out.scale_inv = scales_on(x, granularity, rows, cols);
    if (cast.transpose) out.scale_inv_t = scales_on(x, granularity, cols, rows);
  }
  auto pointer = [](MaybeTensor& t) { return t ? t->mutable_data_ptr() : nullptr; };
  Quantize args = args_of(x, cast, to, granularity, given, out.data.mutable_data_ptr(),
                          pointer(out.data_t), by_tensor ? nullptr : fp32_of(out.scale_inv),
                          static_cast<float*>(pointer(out.scale_inv_t)), nullptr);
  // The scale of the tensor, the amax, and the scratch memory, whose first word has 8 bytes.
  Tensor small = empty_on(x, {2 + scratch_words(args, device)}, ScalarType::Float);
  if (by_tensor) {
    args.scale_inv = fp32_of(small);
    out.scale_inv = torch::stable::select(small, 0, 0);
  }
  args.amax = fp32_of(small) + 1;
  out.amax = torch::stable::select(small, 0, 1);
  args.scratch = reinterpret_cast<uint32_t*>(fp32_of(small) + 2);
  check_launch(with_float(from,
                          [&]<class X>(Type<X>) {
                            Plain<X> source = {static_cast<const X*>(x.const_data_ptr())};
                            return quantize_from(source, {{args}}, device);
                          }),
               op);
  return out;
}

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("amax", TORCH_BOX(&mixprec::cuda::amax_op));
  m.impl("quantize", TORCH_BOX(&mixprec::cuda::quantize_op));
  m.impl("dequantize", TORCH_BOX(&mixprec::cuda::dequantize_op));
}
