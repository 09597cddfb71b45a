// Loops of norm_quantize and norm_backward over one row in fp32. Included once per instruction set,
// after activation_loops.h.

// The sum of value(i), i < n, in the order that math/norm.h defines.
template <class F>
inline float row_sum(int64_t n, const F& value) {
  alignas(64) float partial[kNormLanes] = {};
  int64_t i = 0;
  for (; i + kNormLanes <= n; i += kNormLanes) {
    for (int j = 0; j < kNormLanes; ++j) partial[j] += value(i + j);
  }
  for (int64_t j = 0; i + j < n; ++j) partial[j] += value(i + j);
#pragma GCC unroll 8
  for (int s = kNormLanes / 2; s > 0; s /= 2) {
    for (int j = 0; j < s; ++j) partial[j] += partial[j + s];
  }
  return partial[0];
}

__attribute__((noinline)) float sum_of(const float* __restrict x, int64_t n) {
  return row_sum(n, [x](int64_t i) { return x[i]; });
}

__attribute__((noinline)) float squares_of(const float* __restrict x, float mean, int64_t n) {
  return row_sum(n, [x, mean](int64_t i) { return norm_square(x[i], mean); });
}

// In two loops over the row, which is in the L1 cache.
__attribute__((noinline)) float products_of(const float* __restrict g, const float* __restrict x,
                                            const float* __restrict weight, float mean, float rstd,
                                            int64_t n) {
  return row_sum(n, [=](int64_t i) { return (g[i] * weight[i]) * norm_xhat(x[i], mean, rstd); });
}

__attribute__((noinline)) float weighted_of(const float* __restrict g,
                                            const float* __restrict weight, int64_t n) {
  return row_sum(n, [=](int64_t i) { return g[i] * weight[i]; });
}

RowStatistics row_statistics(const float* x, int64_t n, float eps, bool subtract_mean) {
  float k = static_cast<float>(n), mean = subtract_mean ? norm_mean(sum_of(x, n), k) : 0.0f;
  return {mean, norm_rstd(squares_of(x, mean, n), k, eps)};
}

void normalize(const float* __restrict x, RowStatistics row, const float* __restrict weight,
               const float* __restrict bias, float* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    y[i] = norm_value(norm_xhat(x[i], row.mean, row.rstd), weight[i], bias[i]);
}

// total = T(x + residual), and in fp32.
template <class T>
__attribute__((noinline)) void add_rounded(const T* __restrict x, const T* __restrict residual,
                                           T* __restrict total, float* __restrict wide, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    T sum = Convert<T>::encode(decode(x[i]) + decode(residual[i]));
    total[i] = sum;
    wide[i] = decode(sum);
  }
}

void add_residual(Dtype dtype, const void* x, const void* residual, void* total, float* wide,
                  int64_t n) {
  with_float(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    add_rounded(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<T*>(total),
                wide, n);
  });
}

const float* wide_row(Dtype dtype, const void* x, float* buffer, int64_t n) {
  return in_fp32(dtype, x, 0, n, buffer);
}

// dx, and the row's part of dweight and dbias.
__attribute__((noinline)) void norm_dx_row(const float* __restrict g, const float* __restrict x,
                                           const float* __restrict weight, RowStatistics row,
                                           float c1, float c2, float* __restrict dx,
                                           float* __restrict dweight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float xhat = norm_xhat(x[i], row.mean, row.rstd);
    dx[i] = norm_dx(g[i] * weight[i], xhat, c1, c2, row.rstd);
    dweight[i] += g[i] * xhat;
  }
}

__attribute__((noinline)) void add_to(const float* __restrict x, float* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

void norm_backward_row(const NormGrads& a, const void* g, const void* x, const void* g_total,
                       RowStatistics row, void* dx, float* dweight, float* dbias, float* buffer) {
  int64_t n = a.n;
  const float* of_y = in_fp32(a.g_dtype, g, 0, n, buffer);
  const float* wide = in_fp32(a.dtype, x, 0, n, buffer + n);
  float k = static_cast<float>(n);
  float c1 = products_of(of_y, wide, a.weight, row.mean, row.rstd, n) / k;
  float c2 = a.subtract_mean ? weighted_of(of_y, a.weight, n) / k : 0.0f;
  float* out = a.dtype == Dtype::f32 ? static_cast<float*>(dx) : buffer + 2 * n;
  norm_dx_row(of_y, wide, a.weight, row, c1, c2, out, dweight, n);
  if (dbias != nullptr) add_to(of_y, dbias, n);
  if (g_total != nullptr) add_to(in_fp32(a.total_dtype, g_total, 0, n, buffer + 3 * n), out, n);
  if (a.dtype == Dtype::bf16) narrow(out, static_cast<Bf16*>(dx), n);
  if (a.dtype == Dtype::f16) narrow(out, static_cast<Fp16*>(dx), n);
}
