// The arguments and results of the casts, on every device: quantize, dequantize and the ops that
// cast what they compute; quantize_mx and dequantize_mx; pack and unpack.
#pragma once

#include "arguments/check.h"
#include "math/activation.h"
#include "math/mx.h"
#include "math/pack.h"

namespace mixprec {

// data, data_t, scale_inv, scale_inv_t, amax
using Quantized = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct Cast {
  ScalarType type;  // fp32, for ops that compute values: the values as they are
  MaybeTensor scale;
  bool transpose;
  std::string granularity;
  bool power_of_two_scale;
  MaybeTensor record = {};  // raised to the amax, which is then no result
};

inline Dtype check_cast(const Cast& cast, const Tensor& x, const char* op) {
  Dtype to = dtype_of(cast.type, op);
  bool given = cast.scale.has_value(), records = cast.record.has_value();
  STD_TORCH_CHECK(to != Dtype::f64 && (to != Dtype::f32 || !(cast.transpose || given)), op,
                  ": dtype must be fp8, fp16 or bf16, or fp32 without scale and transpose");
  STD_TORCH_CHECK(!cast.transpose || x.dim() >= 2, op,
                  ": transpose needs x of 2 or more dimensions");
  STD_TORCH_CHECK(cast.granularity == "tensor" || (is_fp8(to) && !given && !records), op,
                  ": scales by rows or blocks are for fp8 and come from x");
  if (records) check_scalar(*cast.record, ScalarType::Float, x, op, "record");
  return to;
}

constexpr int64_t kScaleBlock = 128;

// How many rows and columns of data [m, k] share a scale, which the shape of scale_inv tells.
inline std::pair<int64_t, int64_t> check_scale_inv(const Tensor& scale_inv, const Tensor& data,
                                                   int64_t m, int64_t k) {
  STD_TORCH_CHECK(scale_inv.scalar_type() == ScalarType::Float && same_device(scale_inv, data),
                  "dequantize: scale_inv must be fp32 on data's device");
  if (scale_inv.numel() == 1) return {std::max<int64_t>(1, m), std::max<int64_t>(1, k)};
  auto blocks_in = [](int64_t n) { return (n + kScaleBlock - 1) / kScaleBlock; };
  bool is_matrix = scale_inv.dim() == 2;
  int64_t r = is_matrix ? scale_inv.size(0) : -1, c = is_matrix ? scale_inv.size(1) : -1;
  STD_TORCH_CHECK(
      (r == m && (c == 1 || c == blocks_in(k))) || (r == blocks_in(m) && c == blocks_in(k)),
      "dequantize: scale_inv fits no granularity");
  return {r == m ? 1 : kScaleBlock, c == 1 ? std::max<int64_t>(1, k) : kScaleBlock};
}

inline Activation activation_of(const std::string& name, const char* op) {
  return enum_of<Activation>({"silu", "gelu", "gelu_tanh", "relu2"}, name, op,
                             ": kind must be silu, gelu, gelu_tanh or relu2");
}

inline BlockFormat block_format(const std::string& name, const char* op) {
  return enum_of<BlockFormat>(
      {"mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4"}, name, op,
      ": fmt must be one of the block formats");
}

inline ScaleMode scale_mode(const std::string& name, BlockFormat format) {
  STD_TORCH_CHECK(format != BlockFormat::nvfp4 || name == "rceil",
                  "quantize_mx: scale_mode must be rceil for nvfp4");
  return enum_of<ScaleMode>({"floor", "ceil", "even", "rceil"}, name, "quantize_mx",
                            ": scale_mode must be floor, ceil, even or rceil");
}

inline ScalarType element_type(BlockFormat format) {
  return format == BlockFormat::mxfp8_e4m3   ? ScalarType::Float8_e4m3fn
         : format == BlockFormat::mxfp8_e5m2 ? ScalarType::Float8_e5m2
                                             : ScalarType::Byte;
}

inline ScalarType block_scale_type(BlockFormat format) {
  return format == BlockFormat::nvfp4 ? ScalarType::Float8_e4m3fn : ScalarType::Byte;
}

// The checked arguments of quantize_mx: the dtype of x, its format and mode.
inline std::tuple<Dtype, BlockFormat, ScaleMode> check_block_cast(const Tensor& x,
                                                                  const std::string& fmt,
                                                                  const std::string& mode,
                                                                  bool transpose,
                                                                  const MaybeTensor& seed) {
  Dtype dtype = float_dtype(x, "quantize_mx: x");
  STD_TORCH_CHECK(!transpose || x.dim() >= 2,
                  "quantize_mx: transpose needs x of 2 or more dimensions");
  BlockFormat format = block_format(fmt, "quantize_mx");
  STD_TORCH_CHECK(!seed.has_value() || is_int64(*seed, x),
                  "quantize_mx: seed must be int64 [1] on x's device");
  return {dtype, format, scale_mode(mode, format)};
}

// The shape of the scales of `rows` rows of `blocks` blocks; swizzled: see math/mx.h.
inline std::vector<int64_t> block_scale_shape(int64_t rows, int64_t blocks, bool swizzled) {
  if (!swizzled) return {rows, blocks};
  return {swizzle_tiles(rows, kSwizzleRows), swizzle_tiles(blocks, kSwizzleBlocks), 32, 16};
}

// The shape of x, or of its codes, with another last dimension; that of one element stays.
inline std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  if (!shape.empty()) shape.back() = last;
  return shape;
}

// Returns [M, K] and checks that data and scale_inv are those of such a tensor.
inline std::pair<int64_t, int64_t> check_blocks(const Tensor& data, const Tensor& scale_inv,
                                                const std::optional<Tensor>& tensor_scale_inv,
                                                BlockFormat format, int64_t columns) {
  STD_TORCH_CHECK(data.scalar_type() == element_type(format) && same_device(scale_inv, data) &&
                      scale_inv.scalar_type() == block_scale_type(format),
                  "dequantize_mx: data and scale_inv must have the dtypes of fmt, on one device");
  auto [rows, size] = as_matrix(data);
  STD_TORCH_CHECK(columns >= 0 && size == block_bytes(format, columns),
                  "dequantize_mx: columns must fit the last dimension of data");
  STD_TORCH_CHECK(scale_inv.dim() == 2 && scale_inv.size(0) == rows &&
                      scale_inv.size(1) == blocks_of(format, columns),
                  "dequantize_mx: scale_inv must be [M, blocks of columns]");
  STD_TORCH_CHECK(!tensor_scale_inv.has_value() ||
                      (format == BlockFormat::nvfp4 && tensor_scale_inv->numel() == 1 &&
                       tensor_scale_inv->scalar_type() == ScalarType::Float &&
                       same_device(*tensor_scale_inv, data)),
                  "dequantize_mx: tensor_scale_inv must be one fp32 on data's device, of nvfp4");
  return {rows, columns};
}

inline void check_bits(int64_t bits, const char* op) {
  STD_TORCH_CHECK(bits == 8 || bits == 4 || bits == 2, op, ": bits must be 8, 4 or 2");
}

// What is added to the counter of pack: int64 [1] on x's device, or nothing. Null for nothing.
inline const int64_t* check_offset(const MaybeTensor& offset, const Tensor& x) {
  if (!offset.has_value()) return nullptr;
  STD_TORCH_CHECK(is_int64(*offset, x), "pack: offset must be int64 [1] on x's device");
  return static_cast<const int64_t*>(offset->const_data_ptr());
}

// Returns the number of elements of `shape`.
inline int64_t check_packed(const Tensor& codes, const Tensor& ranges, int64_t bits,
                            const std::vector<int64_t>& shape) {
  check_bits(bits, "unpack");
  int64_t n = 1;
  for (int64_t size : shape) {
    STD_TORCH_CHECK(size >= 0, "unpack: shape must have no negative size");
    n *= size;
  }
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.dim() == 1 &&
                      codes.numel() == packed_bytes(n, bits) && same_device(codes, ranges),
                  "unpack: codes must be uint8, of the size of the packed shape, beside ranges");
  STD_TORCH_CHECK(ranges.scalar_type() == ScalarType::BFloat16 && ranges.dim() == 2 &&
                      ranges.size(0) == packed_groups(n) && ranges.size(1) == 2,
                  "unpack: ranges must be bf16 [groups, 2], of the packed shape");
  return n;
}

}  // namespace mixprec
