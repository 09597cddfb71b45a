// amax, quantize and dequantize, which go over pieces, rows and blocks; the loops within one are in
// simd/quantize_loops.h.
#include "cpu/quantize.h"

#include "cpu/simd/loops.h"
#include "math/scale.h"

namespace mixprec::cpu {

namespace {

uint32_t amax_bits(const void* x, Dtype dtype, int64_t n) {
  std::atomic<uint32_t> largest{0};
  for_ranges(n, kPiece, [&](int64_t i, int64_t count) {
    raise_to(largest, loops().amax(dtype, at(x, dtype, i), count));
  });
  return largest;
}

// x itself if its memory order does not matter or is row-major, else a row-major copy.
Tensor dense(const Tensor& x) { return is_dense(x) ? x : to_contiguous(x); }

constexpr int64_t kHalf = 64;  // rows per call of the loops with a transpose

float scale_of(const BlockCast& c, uint32_t amax) {
  return scale_from_amax(bits_float(amax), format_max(c.to), 1.0f, c.power_of_two, 1.0f);
}

// All of x with one scale.
uint32_t as_one(const BlockCast& c, void* q, float* scale_inv, void* q_t) {
  int64_t n = c.rows * c.cols;
  float scale = c.given;
  if (scale == 0.0f) {  // not given, or not initialised yet
    scale = is_fp8(c.to) ? scale_of(c, amax_bits(c.x, c.from, n)) : 1.0f;
  } else {
    scale = checked_scale(scale);
  }
  std::atomic<uint32_t> largest{0};
  if (c.transpose) {
    // kHalf rows: full cache lines of each row of the transpose
    for_each(ceil_div(c.rows, kHalf), kHalf * c.cols, [&](int64_t i) {
      int64_t row = i * kHalf, first = row * c.cols;
      raise_to(largest,
               loops().quantize_transpose(c.from, c.to, at(c.x, c.from, first), scale,
                                          at(q, c.to, first), at(q_t, c.to, row),
                                          std::min(kHalf, c.rows - row), c.cols, c.cols, c.ld_t));
    });
  } else {
    for_ranges(n, kPiece, [&](int64_t i, int64_t count) {
      raise_to(largest,
               loops().quantize(c.from, c.to, at(c.x, c.from, i), scale, at(q, c.to, i), count));
    });
  }
  *scale_inv = 1.0f / scale;
  return largest;
}

// f(band) for bands of 128 rows or columns on all threads.
template <class F>
void for_bands(int64_t length, int64_t breadth, const F& f) {
  for_each(ceil_div(length, kBlock), kBlock * breadth, f);
}

// Each row in pieces of `width` elements, each with its own scale.
uint32_t by_rows(const BlockCast& c, int64_t width, void* q, float* scale_inv) {
  std::atomic<uint32_t> largest{0};
  // An empty row still has a scale.
  int64_t across = width == c.cols ? 1 : ceil_div(c.cols, width);
  for_each(c.rows, c.cols, [&](int64_t r) {
    for (int64_t piece = 0; piece < across; ++piece) {
      int64_t i = r * c.cols + piece * width, n = std::min(width, c.cols - piece * width);
      uint32_t amax = loops().amax(c.from, at(c.x, c.from, i), n);
      float scale = scale_of(c, amax);
      loops().quantize(c.from, c.to, at(c.x, c.from, i), scale, at(q, c.to, i), n);
      scale_inv[r * across + piece] = 1.0f / scale;
      raise_to(largest, amax);
    }
  });
  return largest;
}

uint32_t by_squares(const BlockCast& c, void* q, float* scale_inv, void* q_t, float* scale_inv_t) {
  std::atomic<uint32_t> largest{0};
  int64_t down = ceil_div(c.ld_t, kBlock), across = ceil_div(c.cols, kBlock);
  for_bands(c.rows, c.cols, [&](int64_t band) {
    int64_t row = band * kBlock, height = std::min(kBlock, c.rows - row);
    for (int64_t b = 0; b < across; ++b) {
      int64_t col = b * kBlock, n = std::min(kBlock, c.cols - col);
      uint32_t columns[kBlock] = {}, amax = 0;
      loops().amax_columns(c.from, at(c.x, c.from, row * c.cols + col), height, n, c.cols, columns);
      for (uint32_t u : columns) amax = std::max(amax, u);
      float scale = scale_of(c, amax);
      scale_inv[band * across + b] = 1.0f / scale;
      if (c.transpose) scale_inv_t[b * down + band] = 1.0f / scale;
      int64_t step = c.transpose ? kHalf : 1;
      for (int64_t r = row; r < row + height; r += step) {
        int64_t i = r * c.cols + col;
        if (c.transpose) {
          loops().quantize_transpose(c.from, c.to, at(c.x, c.from, i), scale, at(q, c.to, i),
                                     at(q_t, c.to, col * c.ld_t + r),
                                     std::min(kHalf, row + height - r), n, c.cols, c.ld_t);
        } else {
          loops().quantize(c.from, c.to, at(c.x, c.from, i), scale, at(q, c.to, i), n);
        }
      }
      raise_to(largest, amax);
    }
  });
  return largest;
}

// q_t of x's rows [row, row + height) and columns [col, col + n), with one scale per column from
// its amax. The inverse scales go to scale_inv_t[i * step].
void cast_columns(const BlockCast& c, const uint32_t* amax, void* q_t, float* scale_inv_t,
                  int64_t step, int64_t row, int64_t height, int64_t col, int64_t n) {
  float scale[kBlock];
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    scale[i] = scale_of(c, amax[i]);
    scale_inv_t[i * step] = 1.0f / scale[i];
    most = std::max(most, amax[i]);
  }
  for (int64_t r = row; r < row + height; r += kHalf) {
    loops().quantize_columns(c.from, c.to, at(c.x, c.from, r * c.cols + col), scale,
                             at(q_t, c.to, col * c.ld_t + r), std::min(kHalf, row + height - r), n,
                             c.cols, c.ld_t, !is_nonfinite_bits(most));
  }
}

// x^T with a scale per row, or per 128 elements of a row, which are rows of one column of x.
// Processed down the columns, so that each row of q_t is written from left to right.
void by_columns(const BlockCast& c, bool per_row, void* q_t, float* scale_inv_t) {
  int64_t length = per_row ? c.rows : kBlock, down = per_row ? 1 : ceil_div(c.rows, kBlock);
  int64_t step = per_row ? 1 : ceil_div(c.ld_t, kBlock);
  for_bands(c.cols, c.rows, [&](int64_t band) {
    int64_t col = band * kBlock, n = std::min(kBlock, c.cols - col);
    for (int64_t b = 0; b < down; ++b) {
      int64_t row = b * length, height = std::min(length, c.rows - row);
      uint32_t amax[kBlock] = {};
      loops().amax_columns(c.from, at(c.x, c.from, row * c.cols + col), height, n, c.cols, amax);
      cast_columns(c, amax, q_t, scale_inv_t + col * step + b, step, row, height, col, n);
    }
  });
}

}  // namespace

uint32_t quantize_by_blocks(const BlockCast& cast, const Blocks& blocks, void* q, float* scale_inv,
                            void* q_t, float* scale_inv_t) {
  if (blocks.rows == 0) return as_one(cast, q, scale_inv, q_t);
  if (blocks.rows == kBlock) return by_squares(cast, q, scale_inv, q_t, scale_inv_t);
  bool per_row = blocks.cols == 0;
  if (cast.transpose) by_columns(cast, per_row, q_t, scale_inv_t);
  return by_rows(cast, per_row ? cast.cols : kBlock, q, scale_inv);
}

// x: any shape, fp32/bf16/fp16 -> fp32 []
Tensor amax(Tensor x) {
  Dtype dtype = float_dtype(x, "amax: x");
  x = dense(x);
  return empty_scalar(bits_float(amax_bits(x.const_data_ptr(), dtype, x.numel())));
}

CastMatrix cast_matrix(Tensor x, ScalarType type, float given, bool transpose, const Blocks& blocks,
                       bool power_of_two_scale) {
  Dtype from = dtype_of(x, "quantize: x"), to = dtype_of(type, "quantize");
  x = row_major(x);
  auto [rows, cols] = as_matrix(x);
  bool whole = blocks.rows == 0;
  Tensor scale_inv = whole ? empty({}, ScalarType::Float) : scales_of(blocks, rows, cols);
  CastMatrix out = {empty(x.sizes(), type), {}, scale_inv, {}, 0.0f};
  if (transpose) out.data_t = empty({cols, rows}, type);
  if (transpose && !whole) out.scale_inv_t = scales_of(blocks, cols, rows);
  BlockCast cast = {from, to, x.const_data_ptr(), rows, cols, transpose, power_of_two_scale, given};
  out.amax =
      bits_float(quantize_by_blocks(cast, blocks, out.data.mutable_data_ptr(), fp32_of(scale_inv),
                                    transpose ? out.data_t->mutable_data_ptr() : nullptr,
                                    out.scale_inv_t ? fp32_of(*out.scale_inv_t) : nullptr));
  return out;
}

// x [..., K] -> data (x's shape), data_t [K, M] (or [0, 0]), scale_inv, scale_inv_t (shapes by the
// granularity), amax [] (or [0])
Quantized quantize(Tensor x, ScalarType type, MaybeTensor scale, bool transpose, Text granularity,
                   bool power_of_two_scale, MaybeTensor record) {
  float_dtype(x, "quantize: x");
  Dtype to =
      check_cast({type, scale, transpose, granularity, power_of_two_scale, record}, x, "quantize");
  STD_TORCH_CHECK(to != Dtype::f32, "quantize: dtype must be fp8, fp16 or bf16");
  float given = read_scalar(scale, 0.0f, "quantize", "scale");
  CastMatrix cast =
      cast_matrix(x, type, given, transpose, blocks_of(granularity), power_of_two_scale);
  auto or_nothing = [](MaybeTensor& t, std::initializer_list<int64_t> shape, ScalarType type) {
    return t ? std::move(*t) : empty({shape.begin(), shape.size()}, type);
  };
  return {cast.data, or_nothing(cast.data_t, {0, 0}, type), *cast.scale_inv,
          or_nothing(cast.scale_inv_t, {0}, ScalarType::Float), recorded(record, cast.amax)};
}

// data: any shape; scale_inv: fp32, of any granularity -> data's shape
Tensor dequantize(Tensor data, Tensor scale_inv, ScalarType type) {
  Dtype from = dtype_of(data, "dequantize: data");
  Dtype to = float_dtype(type, "dequantize: dtype");
  STD_TORCH_CHECK(from != Dtype::f32 && from != Dtype::f64,
                  "dequantize: data must be fp8, fp16 or bf16");
  auto [rows, cols] = as_matrix(data);
  auto [rows_each, cols_each] = check_scale_inv(scale_inv, data, rows, cols);

  data = row_major(data);
  Tensor out = empty(data.sizes(), type);
  const void* src = data.const_data_ptr();
  void* dst = out.mutable_data_ptr();
  if (scale_inv.numel() == 1) {
    float s = *read_fp32(scale_inv);
    for_ranges(data.numel(), kPiece, [&](int64_t i, int64_t count) {
      loops().dequantize(from, to, at(src, from, i), s, at(dst, to, i), count);
    });
    return out;
  }
  for_each(rows, cols, [&](int64_t r) {
    const float* scales = read_fp32(scale_inv) + r / rows_each * scale_inv.stride(0);
    for (int64_t c = 0; c < cols; c += cols_each) {
      int64_t i = r * cols + c;
      loops().dequantize(from, to, at(src, from, i), scales[c / cols_each * scale_inv.stride(1)],
                         at(dst, to, i), std::min(cols_each, cols - c));
    }
  });
  return out;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("amax", TORCH_BOX(&mixprec::cpu::amax));
  m.impl("quantize", TORCH_BOX(&mixprec::cpu::quantize));
  m.impl("dequantize", TORCH_BOX(&mixprec::cpu::dequantize));
}
