// norm_quantize and norm_backward.
#include "cpu/quantize.h"
#include "cpu/simd/loops.h"
#include "math/norm.h"

namespace mixprec::cpu {

namespace {

// fp32, bf16 or fp16, of x's shape.
Dtype check_rows(const Tensor& t, const Tensor& x, const std::string& what) {
  STD_TORCH_CHECK(x.dim() > 0, what, " must have 1 or more dimensions");
  STD_TORCH_CHECK(same_shape(t, x), what, " must have x's shape");
  return float_dtype(t, what);
}

// weight or bias [k] in fp32; without one, the number that changes nothing.
std::vector<float> vector_of(const MaybeTensor& t, int64_t k, float otherwise,
                             const std::string& what) {
  if (t.has_value()) float_dtype(*t, what);
  STD_TORCH_CHECK(!t || (t->dim() == 1 && t->size(0) == k), what, " must have shape [K]");
  return vector_in_fp32(t, k, otherwise);
}

float* row_buffer(int64_t floats) {
  static thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
  return memory.data();
}

// sums[j] = 0 + the j-th elements of `bands` rows of k.
void add_bands(const std::vector<float>& rows, int64_t bands, int64_t k, float* sums) {
  for_ranges(k, kPiece / 16, [&](int64_t first, int64_t n) {
    std::fill(sums + first, sums + first + n, 0.0f);
    for (int64_t b = 0; b < bands; ++b) {
      const float* row = rows.data() + b * k;
      for (int64_t j = first; j < first + n; ++j) sums[j] += row[j];
    }
  });
}

}  // namespace

// x [..., K]; residual of x's shape and dtype; weight, bias [K] -> the results of a cast: those of
// quantize, or of quantize_mx without tensor_scale_inv; total (x's shape, or [0] without residual),
// mean [M] (or [0]) and rstd [M], fp32
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> norm_quantize(
    Tensor x, MaybeTensor residual, MaybeTensor weight, MaybeTensor bias, double eps,
    bool subtract_mean, ScalarType type, MaybeTensor scale, bool transpose, Text granularity,
    bool power_of_two_scale, MaybeTensor record) {
  Dtype dtype = check_rows(x, x, "norm_quantize: x");
  auto [m, k] = as_matrix(x);
  std::vector<float> w = vector_of(weight, k, 1.0f, "norm_quantize: weight");
  std::vector<float> b = vector_of(bias, k, -0.0f, "norm_quantize: bias");
  Tensor total = empty({0}, x.scalar_type());
  x = row_major(x);
  const void *rows = x.const_data_ptr(), *added = nullptr;
  void* sums = nullptr;
  if (residual.has_value()) {
    check_rows(*residual, x, "norm_quantize: residual");
    STD_TORCH_CHECK(residual->scalar_type() == x.scalar_type(),
                    "norm_quantize: residual must have x's dtype");
    residual = row_major(*residual);
    total = empty(x.sizes(), x.scalar_type());
    added = residual->const_data_ptr();
    sums = total.mutable_data_ptr();
  }
  Tensor mean = empty({subtract_mean ? m : 0}, ScalarType::Float);
  Tensor rstd = empty({m}, ScalarType::Float);
  float *means = fp32_of(mean), *rstds = fp32_of(rstd);

  auto produce = [&, k = k](int64_t first, int64_t count, float* const* out, bool again) {
    float* buffer = row_buffer(k);
    for (int64_t r = first; r < first + count; ++r) {
      const float* wide = buffer;
      RowStatistics row;
      if (added != nullptr && !again) {
        loops().add_residual(dtype, at(rows, dtype, r * k), at(added, dtype, r * k),
                             at(sums, dtype, r * k), buffer, k);
      } else {
        wide = loops().wide_row(dtype, at(added != nullptr ? sums : rows, dtype, r * k), buffer, k);
      }
      if (again) {
        row = {subtract_mean ? means[r] : 0.0f, rstds[r]};
      } else {
        row = loops().row_statistics(wide, k, static_cast<float>(eps), subtract_mean);
        if (subtract_mean) means[r] = row.mean;
        rstds[r] = row.rstd;
      }
      loops().normalize(wide, row, w.data(), b.data(), out[0] + (r - first) * k, k);
    }
  };
  Cast cast = {type, scale, transpose, granularity, power_of_two_scale, record};
  auto casts = cast_rows("norm_quantize", x, cast, 1, produce);
  return std::tuple_cat(casts[0], std::make_tuple(total, mean, rstd));
}

// g, x, g_total [..., K]; weight [K]; mean [M] (or [0]), rstd [M] fp32 -> dx of x's shape and
// dtype, dweight and dbias fp32 [K] (or [0])
std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor g, Tensor x, MaybeTensor weight,
                                                 Tensor mean, Tensor rstd, MaybeTensor g_total,
                                                 bool with_bias) {
  auto [m, k] = as_matrix(x);
  std::vector<float> w = vector_of(weight, k, 1.0f, "norm_backward: weight");
  NormGrads grads = {check_rows(x, x, "norm_backward: x"),
                     check_rows(g, x, "norm_backward: g"),
                     Dtype::f32,
                     w.data(),
                     mean.numel() > 0,
                     k};
  STD_TORCH_CHECK(mean.dim() == 1 && rstd.dim() == 1 && rstd.size(0) == m &&
                      (mean.size(0) == m || mean.size(0) == 0) &&
                      mean.scalar_type() == ScalarType::Float &&
                      rstd.scalar_type() == ScalarType::Float,
                  "norm_backward: mean and rstd must be fp32 [M] (or mean [0])");
  x = row_major(x);
  g = row_major(g);
  mean = row_major(mean);
  rstd = row_major(rstd);
  if (g_total.has_value()) {
    grads.total_dtype = check_rows(*g_total, x, "norm_backward: g_total");
    g_total = row_major(*g_total);
  }
  Tensor dx = empty(x.sizes(), x.scalar_type());
  Tensor dweight = empty({weight.has_value() ? k : 0}, ScalarType::Float);
  Tensor dbias = empty({with_bias ? k : 0}, ScalarType::Float);

  int64_t bands = ceil_div(m, kNormBand);
  std::vector<float> weight_bands(bands * k), bias_bands(with_bias ? bands * k : 0);
  const float *means = read_fp32(mean), *rstds = read_fp32(rstd);
  for_ranges(m, kNormBand, [&, m = m, k = k](int64_t first, int64_t count) {
    float *buffer = row_buffer(4 * k), *band_weight = weight_bands.data() + first / kNormBand * k;
    float* band_bias = with_bias ? bias_bands.data() + first / kNormBand * k : nullptr;
    for (int64_t r = first; r < first + count; ++r) {
      const void* total_row =
          g_total.has_value() ? at(g_total->const_data_ptr(), grads.total_dtype, r * k) : nullptr;
      loops().norm_backward_row(grads, at(g.const_data_ptr(), grads.g_dtype, r * k),
                                at(x.const_data_ptr(), grads.dtype, r * k), total_row,
                                {grads.subtract_mean ? means[r] : 0.0f, rstds[r]},
                                at(dx.mutable_data_ptr(), grads.dtype, r * k), band_weight,
                                band_bias, buffer);
    }
  });
  if (weight.has_value()) add_bands(weight_bands, bands, k, fp32_of(dweight));
  if (with_bias) add_bands(bias_bands, bands, k, fp32_of(dbias));
  return {dx, dweight, dbias};
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("norm_quantize", TORCH_BOX(&mixprec::cpu::norm_quantize));
  m.impl("norm_backward", TORCH_BOX(&mixprec::cpu::norm_backward));
}
