// The arguments of quantize_mx and dequantize_mx, on every device.
#pragma once

#include <string>

#include "arguments/check.h"
#include "math/mx.h"

namespace mixprec {

inline BlockFormat block_format(const std::string& name, const char* op) {
  if (name == "mxfp8_e4m3") return BlockFormat::mxfp8_e4m3;
  if (name == "mxfp8_e5m2") return BlockFormat::mxfp8_e5m2;
  if (name == "mxfp6_e3m2") return BlockFormat::mxfp6_e3m2;
  if (name == "mxfp6_e2m3") return BlockFormat::mxfp6_e2m3;
  if (name == "mxfp4") return BlockFormat::mxfp4;
  STD_TORCH_CHECK(name == "nvfp4", op, ": fmt must be one of the block formats");
  return BlockFormat::nvfp4;
}

inline ScaleMode scale_mode(const std::string& name, BlockFormat format) {
  STD_TORCH_CHECK(format != BlockFormat::nvfp4 || name == "rceil",
                  "quantize_mx: scale_mode must be rceil for nvfp4");
  if (name == "floor") return ScaleMode::floor;
  if (name == "ceil") return ScaleMode::ceil;
  if (name == "even") return ScaleMode::even;
  STD_TORCH_CHECK(name == "rceil", "quantize_mx: scale_mode must be floor, ceil, even or rceil");
  return ScaleMode::rceil;
}

inline ScalarType element_type(BlockFormat format) {
  return format == BlockFormat::mxfp8_e4m3   ? ScalarType::Float8_e4m3fn
         : format == BlockFormat::mxfp8_e5m2 ? ScalarType::Float8_e5m2
                                             : ScalarType::Byte;
}

inline ScalarType block_scale_type(BlockFormat format) {
  return format == BlockFormat::nvfp4 ? ScalarType::Float8_e4m3fn : ScalarType::Byte;
}

struct BlockFormatCast {
  Dtype x_dtype;
  BlockFormat format;
  ScaleMode mode;
};

// The checked arguments of quantize_mx.
inline BlockFormatCast check_block_cast(const Tensor& x, const std::string& fmt,
                                        const std::string& mode, bool transpose,
                                        const MaybeTensor& seed) {
  Dtype dtype = float_dtype(x, "quantize_mx: x");
  STD_TORCH_CHECK(!transpose || x.dim() >= 2,
                  "quantize_mx: transpose needs x of 2 or more dimensions");
  BlockFormat format = block_format(fmt, "quantize_mx");
  STD_TORCH_CHECK(
      !seed.has_value() || (seed->dim() == 1 && seed->numel() == 1 &&
                            seed->scalar_type() == ScalarType::Long && same_device(*seed, x)),
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

}  // namespace mixprec
