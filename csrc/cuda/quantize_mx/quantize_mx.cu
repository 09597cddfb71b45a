// quantize_mx and dequantize_mx on CUDA tensors.
#include "arguments/casts.h"
#include "cuda/common/on_device.h"
#include "cuda/quantize_mx/dequantize_mx.cuh"
#include "cuda/quantize_mx/quantize_mx.cuh"

namespace mixprec::cuda {

namespace {

// data, data_t, scale_inv, scale_inv_t, tensor_scale_inv, amax
using QuantizedMx = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

uint8_t* bytes_of(const Tensor& t) { return static_cast<uint8_t*>(t.mutable_data_ptr()); }

QuantizedMx quantize_mx_op(Tensor x, Text fmt, Text mode, bool transpose, MaybeTensor seed,
                           bool swizzled, bool with_amax) {
  auto [dtype, format, how] = check_block_cast(x, fmt, mode, transpose, seed);
  OnDevice device(x);
  x = row_major(x);
  auto [m, k] = as_matrix(x);
  ScalarType codes = element_type(format), scales = block_scale_type(format);
  bool nvfp4 = format == BlockFormat::nvfp4;
  std::vector<int64_t> shape_t = {0, 0}, scales_t = {0}, scalar, nothing = {0};
  if (transpose) {
    shape_t = {k, block_bytes(format, m)};
    scales_t = block_scale_shape(k, blocks_of(format, m), swizzled);
  }
  Tensor data = empty_on(x, with_last(x, block_bytes(format, k)), codes);
  Tensor data_t = empty_on(x, shape_t, codes);
  Tensor scale_inv = empty_on(x, block_scale_shape(m, blocks_of(format, k), swizzled), scales);
  Tensor scale_inv_t = empty_on(x, scales_t, scales);
  Tensor tensor_scale_inv = empty_on(x, nvfp4 ? scalar : nothing, ScalarType::Float);
  bool wanted = nvfp4 || with_amax;
  Tensor largest = empty_on(x, wanted ? scalar : nothing, ScalarType::Float);
  Tensor scratch = words_on(x, partials_for(device));
  QuantizeMx args = {
      format,
      nvfp4 ? ScaleRule{} : scale_rule(format, how, 0.0f, false),
      {bytes_of(data), bytes_of(scale_inv), m, k, kParamStream},
      {bytes_of(data_t), bytes_of(scale_inv_t), k, m, kFirstStateStream},
      transpose,
      swizzled,
      seed.has_value() ? static_cast<const int64_t*>(seed->const_data_ptr()) : nullptr,
      wanted ? fp32_of(largest) : nullptr,
      fp32_of(tensor_scale_inv),
      words_of(scratch)};
  cudaError_t error = with_float(dtype, [&]<class X>(Type<X>) {
    auto* data = static_cast<const X*>(x.const_data_ptr());
    return quantize_mx(data, args, device);
  });
  check_launch(error, "quantize_mx");
  return {data, data_t, scale_inv, scale_inv_t, tensor_scale_inv, largest};
}

Tensor dequantize_mx_op(Tensor data, Tensor scale_inv, MaybeTensor tensor_scale_inv, Text fmt,
                        int64_t columns, ScalarType type) {
  Dtype dtype = float_dtype(type, "dequantize_mx: dtype");
  BlockFormat format = block_format(fmt, "dequantize_mx");
  auto [rows, cols] = check_blocks(data, scale_inv, tensor_scale_inv, format, columns);
  OnDevice device(data);
  data = row_major(data);
  scale_inv = row_major(scale_inv);
  Tensor out = empty_on(data, with_last(data, cols), type);
  DequantizeMx args = {format,
                       static_cast<const uint8_t*>(data.const_data_ptr()),
                       static_cast<const uint8_t*>(scale_inv.const_data_ptr()),
                       scalar_on(tensor_scale_inv, data, "dequantize_mx", "tensor_scale_inv"),
                       rows,
                       cols};
  check_launch(dequantize_mx(dtype, args, out.mutable_data_ptr(), device), "dequantize_mx");
  return out;
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("quantize_mx", TORCH_BOX(&mixprec::cuda::quantize_mx_op));
  m.impl("dequantize_mx", TORCH_BOX(&mixprec::cuda::dequantize_mx_op));
}
