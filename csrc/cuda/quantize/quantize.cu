// amax, quantize and dequantize on CUDA tensors.
#include <string>
#include <tuple>

#include "cuda/common/on_device.h"
#include "cuda/quantize/dequantize.cuh"
#include "cuda/quantize/quantize.cuh"

namespace mixprec::cuda {

namespace {

Dtype check_input(const Tensor& x, const char* what) {
  Dtype dtype = dtype_of(x, what);
  STD_TORCH_CHECK(is_float(dtype) && x.is_cuda(), what,
                  " must be fp32, bf16 or fp16 on a CUDA device");
  return dtype;
}

float* fp32_of(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

Tensor words_on(const Tensor& x, int64_t count) { return empty_on(x, {count}, ScalarType::Int); }
uint32_t* words_of(const Tensor& t) { return static_cast<uint32_t*>(t.mutable_data_ptr()); }

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

Granularity granularity_of(const std::string& name) {
  if (name == "tensor") return Granularity::tensor;
  if (name == "row") return Granularity::row;
  if (name == "block1x128") return Granularity::block1x128;
  if (name == "block128x128") return Granularity::block128x128;
  STD_TORCH_CHECK(
      false, "quantize: granularity must be tensor, row, block1x128 or block128x128, got ", name);
}

// (M, K): leading dimensions flattened.
std::pair<int64_t, int64_t> as_matrix(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, x.dim() == 0 ? 1 : x.size(x.dim() - 1)};
}

int64_t tiles_of(int64_t size) { return (size + kTile - 1) / kTile; }

Tensor scales_on(const Tensor& x, Granularity granularity, int64_t rows, int64_t cols) {
  bool by_row = granularity != Granularity::block128x128;
  int64_t across = granularity == Granularity::row ? 1 : tiles_of(cols);
  return empty_on(x, {by_row ? rows : tiles_of(rows), across}, ScalarType::Float);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_op(Tensor x, ScalarType type,
                                                               MaybeTensor scale, bool transpose,
                                                               std::string granularity_name,
                                                               bool power_of_two_scale) {
  Dtype from = check_input(x, "quantize: x");
  Dtype to = dtype_of(type, "quantize: dtype");
  Granularity granularity = granularity_of(granularity_name);
  bool by_tensor = granularity == Granularity::tensor;
  STD_TORCH_CHECK(to != Dtype::f32 && to != Dtype::f64,
                  "quantize: dtype must be fp8, fp16 or bf16");
  STD_TORCH_CHECK(!transpose || x.dim() >= 2,
                  "quantize: transpose needs x of 2 or more dimensions");
  STD_TORCH_CHECK(by_tensor || (element_size(to) == 1 && !scale.has_value()),
                  "quantize: scales by rows or blocks are for fp8 and come from x");
  const float* given = scalar_on(scale, x, "quantize: scale");

  OnDevice device(x);
  x = row_major(x);
  auto [rows, cols] = as_matrix(x);
  Tensor data = empty_on(x, x.sizes(), type);
  Tensor data_t = empty_on(x, {transpose ? cols : 0, transpose ? rows : 0}, type);
  Tensor scale_inv =
      by_tensor ? empty_on(x, {}, ScalarType::Float) : scales_on(x, granularity, rows, cols);
  Tensor scale_inv_t = transpose && !by_tensor ? scales_on(x, granularity, cols, rows)
                                               : empty_on(x, {0}, ScalarType::Float);
  Tensor largest = empty_on(x, {}, ScalarType::Float);
  Quantize args = {from,
                   to,
                   granularity,
                   x.const_data_ptr(),
                   data.mutable_data_ptr(),
                   data_t.mutable_data_ptr(),
                   rows,
                   cols,
                   transpose,
                   power_of_two_scale,
                   given,
                   fp32_of(scale_inv),
                   fp32_of(scale_inv_t),
                   fp32_of(largest),
                   nullptr};
  Tensor scratch = words_on(x, scratch_words(args, device.sms));
  args.scratch = words_of(scratch);
  check_launch(quantize(args, device.sms, device.stream), "quantize");
  return {data, data_t, scale_inv, scale_inv_t, largest};
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
