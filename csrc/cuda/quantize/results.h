// What the launchers of quantize and the fused ops share: checks of arguments, tensors as arrays,
// and what they allocate and return.
#pragma once

#include "arguments/casts.h"
#include "cuda/common/on_device.h"
#include "cuda/quantize/quantize.cuh"
#include "math/mx.h"

namespace mixprec::cuda {

// x's shape, or [K], on x's device; row-major, or a copy that is.
inline Tensor checked(const Tensor& t, const Tensor& x, bool is_vector, const std::string& what) {
  bool fits = is_vector ? t.dim() == 1 && x.dim() > 0 && t.size(0) == x.size(x.dim() - 1)
                        : same_shape(t, x);
  float_dtype(t, what);
  STD_TORCH_CHECK(same_device(t, x), what, " must be on x's device");
  STD_TORCH_CHECK(fits, what,
                  is_vector ? " must be [K], x's last dimension" : " must be of x's shape");
  return row_major(t);
}

inline MaybeTensor checked(const MaybeTensor& t, const Tensor& x, bool is_vector,
                           const std::string& what) {
  return t.has_value() ? MaybeTensor(checked(*t, x, is_vector, what)) : std::nullopt;
}

inline Floats floats(const Tensor& t) { return {t.const_data_ptr(), dtype_of(t, "")}; }
inline Floats floats(const MaybeTensor& t) {
  return t.has_value() ? floats(*t) : Floats{nullptr, Dtype::f32};
}

// fp32 of `count` elements; none unless it is wanted.
inline Tensor vector_on(const Tensor& x, int64_t count, bool wanted) {
  return empty_on(x, {wanted ? count : 0}, ScalarType::Float);
}
inline float* vector_of(const Tensor& t, bool wanted) { return wanted ? fp32_of(t) : nullptr; }

inline Granularity granularity_of(const std::string& name, const char* op) {
  if (name == "tensor") return Granularity::tensor;
  if (name == "row") return Granularity::row;
  if (name == "block1x128") return Granularity::block1x128;
  if (name == "block128x128") return Granularity::block128x128;
  if (name == "mx") return Granularity::mx;
  STD_TORCH_CHECK(false, op,
                  ": granularity must be tensor, row, block1x128, block128x128 or mx, got ", name);
}

inline int64_t tiles_of(int64_t size) { return (size + kTile - 1) / kTile; }

inline Tensor scales_on(const Tensor& x, Granularity granularity, int64_t rows, int64_t cols) {
  if (granularity == Granularity::mx) {
    return empty_on(x, {rows, blocks_of(BlockFormat::mxfp8_e4m3, cols)}, ScalarType::Byte);
  }
  bool by_row = granularity != Granularity::block128x128;
  int64_t across = granularity == Granularity::row ? 1 : tiles_of(cols);
  return empty_on(x, {by_row ? rows : tiles_of(rows), across}, ScalarType::Float);
}

// A cast whose results are allocated.
struct CastOnDevice {
  Quantized results;
  Tensor scratch;
  Quantize args;
};

// The arguments of the kernels, but for the scratch memory.
inline Quantize args_of(const Tensor& x, const Cast& cast, Dtype to, Granularity granularity,
                        const float* given, void* data, void* data_t, float* scale_inv,
                        float* scale_inv_t, float* amax) {
  auto [rows, cols] = as_matrix(x);
  return {to,     granularity, data,           data_t,
          rows,   cols,        cast.transpose, cast.power_of_two_scale,
          given,  scale_inv,   scale_inv_t,    amax,
          nullptr};
}

// Of x's shape, on x's device. May be called before x has its values.
inline CastOnDevice allocated(const char* op, const Tensor& x, const Cast& cast, const Gpu& gpu) {
  Dtype to = check_cast(cast, x, op);
  Granularity granularity = granularity_of(cast.granularity, op);
  bool by_tensor = granularity == Granularity::tensor, transpose = cast.transpose;
  const float* given = scalar_on(cast.scale, x, op, "scale");

  auto [rows, cols] = as_matrix(x);
  Tensor data = empty_on(x, x.sizes(), cast.type);
  Tensor data_t = empty_on(x, {transpose ? cols : 0, transpose ? rows : 0}, cast.type);
  Tensor scale_inv =
      by_tensor ? empty_on(x, {}, ScalarType::Float) : scales_on(x, granularity, rows, cols);
  Tensor scale_inv_t = transpose && !by_tensor ? scales_on(x, granularity, cols, rows)
                                               : empty_on(x, {0}, scale_inv.scalar_type());
  Tensor largest =
      cast.record ? empty_on(x, {0}, ScalarType::Float) : empty_on(x, {}, ScalarType::Float);
  Quantize args =
      args_of(x, cast, to, granularity, given, data.mutable_data_ptr(), data_t.mutable_data_ptr(),
              fp32_of(scale_inv), fp32_of(scale_inv_t), cast.record ? nullptr : fp32_of(largest));
  if (cast.record) args.record = fp32_of(*cast.record);
  Tensor scratch = words_on(x, scratch_words(args, gpu));
  args.scratch = words_of(scratch);
  return {{data, data_t, scale_inv, scale_inv_t, largest}, scratch, args};
}

// Calls run(args), which returns the error of its launches.
template <class Run>
Quantized quantized(const char* op, const Tensor& x, const Cast& cast, const Gpu& gpu,
                    const Run& run) {
  CastOnDevice on_device = allocated(op, x, cast, gpu);
  check_launch(run(on_device.args), op);
  return on_device.results;
}

}  // namespace mixprec::cuda
