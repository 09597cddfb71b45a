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
                      Text granularity, bool power_of_two_scale, MaybeTensor record) {
  Dtype from = float_dtype(x, "quantize: x");
  STD_TORCH_CHECK(type != ScalarType::Float && type != ScalarType::Double,
                  "quantize: dtype must be fp8, fp16 or bf16");
  STD_TORCH_CHECK(granularity != "mx", "quantize: granularity mx is that of quantize_mx");
  OnDevice device(x);
  x = row_major(x);
  Cast cast = {type, scale, transpose, granularity, power_of_two_scale, record};
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

std::vector<LayerCast> cast_for_layer(std::vector<ToCast> matrices) {
  const char* op = "linear";
  OnDevice device(matrices[0].x);
  std::vector<LayerCast> results;
  std::vector<Quantize> casts;
  constexpr int64_t apart = 4;  // words between scales
  int64_t words = apart * static_cast<int64_t>(matrices.size());
  for (ToCast& m : matrices) {
    Dtype to = check_cast(m.cast, m.x, op);
    Granularity granularity = granularity_of(m.cast.granularity, op);
    bool by_tensor = granularity == Granularity::tensor, transpose = m.cast.transpose;
    STD_TORCH_CHECK(same_device(m.x, matrices[0].x), op, ": x and weight must be on one device");
    STD_TORCH_CHECK(by_tensor || (m.given == nullptr && m.record == nullptr), op,
                    ": delayed scaling needs one scale for a tensor");
    m.x = row_major(m.x);
    auto [rows, cols] = as_matrix(m.x);
    LayerCast out = {empty_on(m.x, {rows, cols}, m.cast.type), {}, m.x, {}};
    if (transpose) out.data_t = empty_on(m.x, {cols, rows}, m.cast.type);
    if (!by_tensor) out.scale_inv = scales_on(m.x, granularity, rows, cols);
    if (!by_tensor && transpose) out.scale_inv_t = scales_on(m.x, granularity, cols, rows);
    auto pointer = [](MaybeTensor& t) { return t ? t->mutable_data_ptr() : nullptr; };
    casts.push_back(args_of(m.x, m.cast, to, granularity, m.given, out.data.mutable_data_ptr(),
                            pointer(out.data_t), by_tensor ? nullptr : fp32_of(out.scale_inv),
                            static_cast<float*>(pointer(out.scale_inv_t)), nullptr));
    casts.back().record = m.record;
    words += scratch_words(casts.back(), device);
    results.push_back(out);
  }
  // The scales of the tensors, an amax each, and the scratch memory.
  Tensor small = empty_on(matrices[0].x, {words}, ScalarType::Float);
  float* scale = fp32_of(small);
  float* scratch = scale + apart * static_cast<int64_t>(casts.size());
  for (size_t i = 0; i < casts.size(); ++i, scale += apart) {
    Quantize& a = casts[i];
    if (a.granularity == Granularity::tensor) {
      a.scale_inv = scale;
      results[i].scale_inv = torch::stable::select(small, 0, scale - fp32_of(small));
    }
    if (a.by_lines()) a.amax = scale + 1;
    a.scratch = reinterpret_cast<uint32_t*>(scratch);
    scratch += scratch_words(a, device);
  }
  auto dtype_of_x = [&](size_t i) { return float_dtype(matrices[i].x, "linear: x"); };
  bool together = casts.size() == 2 && dtype_of_x(0) == dtype_of_x(1) &&
                  casts[0].granularity == Granularity::tensor &&
                  casts[1].granularity == Granularity::tensor &&
                  casts[0].q_dtype == casts[1].q_dtype;
  for (size_t i = 0; i < casts.size(); ++i) {
    cudaError_t error = with_float(dtype_of_x(i), [&]<class X>(Type<X>) {
      auto source = [&](size_t i) {
        return Plain<X>{static_cast<const X*>(matrices[i].x.const_data_ptr())};
      };
      if (!together) return quantize_from(source(i), {{casts[i]}}, device);
      return with_low(casts[0].q_dtype, [&]<class Q>(Type<Q>) {
        return quantize_tensors<Q, Plain<X>, 2>({source(0), source(1)},
                                                {{{casts[0]}}, {{casts[1]}}}, device);
      });
    });
    check_launch(error, op);
    if (together) break;
  }
  return results;
}

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("amax", TORCH_BOX(&mixprec::cuda::amax_op));
  m.impl("quantize", TORCH_BOX(&mixprec::cuda::quantize_op));
  m.impl("dequantize", TORCH_BOX(&mixprec::cuda::dequantize_op));
}
