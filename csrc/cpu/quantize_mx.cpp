// quantize_mx and dequantize_mx, which go over pieces of rows and tiles; the loops are in
// simd/quantize_mx_loops.h and dequantize_mx_loops.h.
#include "cpu/quantize.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

constexpr int64_t kRows = 128, kCols = 64;  // of x in a tile of the transpose
constexpr int64_t kGroup = 32;              // elements that are cast together

// f(row, first column, columns) for pieces of all rows, on all threads.
template <class F>
void for_pieces_of_rows(int64_t rows, int64_t cols, const F& f) {
  int64_t across = ceil_div(cols, kPiece);
  for_each(rows * across, std::min(cols, kPiece), [&](int64_t i) {
    int64_t col = i % across * kPiece;
    f(i / across, col, std::min(kPiece, cols - col));
  });
}

int64_t in_whole_blocks(BlockFormat f, int64_t k) { return blocks_of(f, k) * block_size(f); }

// What fmt says after the name of the stored format: see _reference/block_formats.py.
struct Variant {
  bool squares;
  Nvfp4Scales scales;

  explicit Variant(const Text& fmt) {
    Text parts = fmt.substr(std::min(fmt.find('/'), fmt.size())) + "/";
    std::ptrdiff_t known = 0;
    auto has = [&](const Text& part) {
      bool found = parts.find("/" + part + "/") != Text::npos;
      known += found;
      return found;
    };
    squares = has("16x16") || has("32x32");
    scales.nearest = has("nearest");
    scales.adaptive = has("mae") ? Adaptive::mae : has("mse") ? Adaptive::mse : Adaptive::none;
    scales.bound = has("max256") ? 256.0f : 448.0f;
    scales.factor = has("x1.0625") ? 1.0625f : 1.0f;
    STD_TORCH_CHECK(std::count(parts.begin(), parts.end(), '/') == 1 + known,
                    "quantize_mx: no kernel has been written for fmt ", fmt);
  }
};

// The amaxes of the square blocks of x [rows, cols], as bits, with zeros up to whole groups.
std::vector<uint32_t> amaxes_of_squares(Dtype dtype, const void* x, int64_t rows, int64_t cols,
                                        int64_t block, int64_t ld) {
  int64_t down = ceil_div(rows, kGroup) * kGroup / block;
  std::vector<uint32_t> amaxes(static_cast<size_t>(down * ld));
  for_each(ceil_div(rows, block), block * cols, [&](int64_t i) {
    std::vector<uint32_t> columns(static_cast<size_t>(cols));
    loops().amax_columns(dtype, at(x, dtype, i * block * cols), std::min(block, rows - i * block),
                         cols, cols, columns.data());
    for (int64_t c = 0; c < cols; ++c) {
      uint32_t& most = amaxes[static_cast<size_t>(i * ld + c / block)];
      most = std::max(most, columns[static_cast<size_t>(c)]);
    }
  });
  return amaxes;
}

// Scales [rows, blocks] in the swizzled layout. A copy: it is for GPUs, and here small beside x.
Tensor swizzled_copy(const Tensor& scales) {
  int64_t rows = scales.size(0), blocks = scales.size(1);
  Tensor out = empty(block_scale_shape(rows, blocks, true), scales.scalar_type());
  uint8_t *from = bytes_of(scales), *to = bytes_of(out);
  std::fill_n(to, out.numel(), uint8_t{0});
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < blocks; ++i) to[swizzled_at(row, i, blocks)] = from[row * blocks + i];
  }
  return out;
}

}  // namespace

uint32_t mx_by_rows(Dtype dtype, const BlockCastRule& rule, const void* x, int64_t rows,
                    int64_t cols, const Tensor& q, const Tensor& scale_inv) {
  std::atomic<uint32_t> largest{0};
  BlockFormat f = rule.format;
  for_pieces_of_rows(rows, cols, [&](int64_t row, int64_t col, int64_t count) {
    raise_to(largest, loops().quantize_mx(
                          dtype, rule.at(row, col), at(x, dtype, row * cols + col), count,
                          row * in_whole_blocks(f, cols) + col,
                          bytes_of(q) + row * block_bytes(f, cols) + block_bytes(f, col),
                          bytes_of(scale_inv) + row * blocks_of(f, cols) + blocks_of(f, col)));
  });
  return largest;
}

// Down the columns, so that each row of the results is written from left to right.
void mx_by_columns(Dtype dtype, const BlockCastRule& rule, const void* x, int64_t rows,
                   int64_t cols, uint8_t* q, uint8_t* scale_inv, int64_t ld, int64_t first) {
  BlockFormat f = rule.format;
  int64_t ld_q = block_bytes(f, ld), ld_scale = blocks_of(f, ld);
  int64_t ld_element = in_whole_blocks(f, ld), down = ceil_div(rows, kRows);
  for_each(ceil_div(cols, kCols) * down, kPiece, [&](int64_t i) {
    int64_t col = i / down * kCols, row = i % down * kRows, to = first + row;
    loops().quantize_mx_columns(dtype, rule.at(row, col), at(x, dtype, row * cols + col), cols,
                                std::min(kRows, rows - row), std::min(kCols, cols - col),
                                col * ld_element + to, ld_element,
                                q + col * ld_q + block_bytes(f, to), ld_q,
                                scale_inv + col * ld_scale + blocks_of(f, to), ld_scale);
  });
}

// x [..., K], seed: int64 [1] -> data [..., bytes of K], data_t [K, bytes of M] (or [0, 0]),
// scale_inv [M, blocks of K], scale_inv_t [K, blocks of M] (or [0]), swizzled or not,
// tensor_scale_inv [] (or [0]), amax [] (or [0])
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_mx(Tensor x, Text fmt,
                                                                       Text mode, bool transpose,
                                                                       MaybeTensor seed,
                                                                       bool swizzled,
                                                                       bool with_amax) {
  Variant variant(fmt);
  auto [dtype, f, how] = check_block_cast(x, fmt.substr(0, fmt.find('/')), mode, transpose, seed);
  x = row_major(x);
  auto [m, k] = as_matrix(x);
  Tensor data = empty(with_last(x, block_bytes(f, k)), element_type(f));
  Tensor scale_inv = empty({m, blocks_of(f, k)}, block_scale_type(f));
  int64_t m_t = transpose ? m : 0, k_t = transpose ? k : 0;
  Tensor data_t = empty({k_t, block_bytes(f, m_t)}, element_type(f));
  Tensor scale_inv_t = transpose ? empty({k, blocks_of(f, m)}, block_scale_type(f))
                                 : empty({0}, block_scale_type(f));
  bool nvfp4 = f == BlockFormat::nvfp4;
  float tensor_amax = 0.0f;
  if (nvfp4) tensor_amax = *read_fp32(amax(x));
  bool stochastic = seed.has_value();
  STD_TORCH_CHECK(!variant.squares || !(stochastic || variant.scales.adaptive != Adaptive::none),
                  "quantize_mx: no kernel has been written for these squares");
  BlockCastRule rule = {f,
                        nvfp4 ? nvfp4_rule(tensor_amax, stochastic, variant.scales)
                              : scale_rule(f, how, 0.0f, stochastic),
                        stochastic, 0, 0};
  std::vector<uint32_t> squares;
  if (variant.squares) {
    rule.ld_squares = ceil_div(k, kGroup) * kGroup / block_size(f);
    squares = amaxes_of_squares(dtype, x.const_data_ptr(), m, k, block_size(f), rule.ld_squares);
    rule.squares = squares.data();
  }
  if (stochastic) {
    rule.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr()));
  }
  uint32_t largest = mx_by_rows(dtype, rule, x.const_data_ptr(), m, k, data, scale_inv);
  if (transpose) {
    rule.stream = 1;
    mx_by_columns(dtype, rule, x.const_data_ptr(), m, k, bytes_of(data_t), bytes_of(scale_inv_t), m,
                  0);
  }
  if (swizzled) {
    scale_inv = swizzled_copy(scale_inv);
    if (transpose) scale_inv_t = swizzled_copy(scale_inv_t);
  }
  auto scalar_if = [](bool wanted, float value) {
    return wanted ? empty_scalar(value) : empty({0}, ScalarType::Float);
  };
  return {data,
          data_t,
          scale_inv,
          scale_inv_t,
          scalar_if(nvfp4, rule.scale.tensor_inv),
          scalar_if(nvfp4 || with_amax, bits_float(largest))};
}

// data, scale_inv and tensor_scale_inv of quantize_mx -> [..., columns]
Tensor dequantize_mx(Tensor data, Tensor scale_inv, MaybeTensor tensor_scale_inv, Text fmt,
                     int64_t columns, ScalarType type) {
  BlockFormat f = block_format(fmt, "dequantize_mx");
  Dtype to = float_dtype(type, "dequantize_mx: dtype");
  int64_t rows = check_blocks(data, scale_inv, tensor_scale_inv, f, columns).first;

  data = row_major(data);
  scale_inv = row_major(scale_inv);
  Tensor out = empty(with_last(data, columns), type);
  const uint8_t *q = bytes_of(data), *scales = bytes_of(scale_inv);
  const float* tensor_scale = tensor_scale_inv.has_value() ? read_fp32(*tensor_scale_inv) : nullptr;
  void* result = out.mutable_data_ptr();
  for_pieces_of_rows(rows, columns, [&](int64_t row, int64_t col, int64_t count) {
    loops().dequantize_mx(f, to, q + row * block_bytes(f, columns) + block_bytes(f, col),
                          scales + row * blocks_of(f, columns) + blocks_of(f, col), tensor_scale,
                          at(result, to, row * columns + col), count);
  });
  return out;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("quantize_mx", TORCH_BOX(&mixprec::cpu::quantize_mx));
  m.impl("dequantize_mx", TORCH_BOX(&mixprec::cpu::dequantize_mx));
}
