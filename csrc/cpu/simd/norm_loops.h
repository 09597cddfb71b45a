// Loops of norm_quantize, norm_backward and rotary over one row. Included once per instruction set,
// after activation_loops.h.

// sums[k] = the sum of f's k-th number over i < n, in the order that math/norm.h defines. A quarter
// of the partial sums or less is in registers at a time. f(at, k): of at(row), one element of a row
// or a vector of them.
template <int count, class F>
inline void row_sums(int64_t n, const F& f, float* sums) {
  auto vector = [&](int64_t i, int k) { return f([i](const float* x) { return load(x + i); }, k); };
  constexpr int vecs = 4 / count, half = kNormLanes / 2;
  alignas(64) float last[count][kNormLanes], partial[count][half];
  int64_t full = n - n % kNormLanes;
  for (int k = 0; k < count; ++k) {
    if (full == n) continue;
    for (int64_t j = 0; full + j < n; ++j) {
      last[k][j] = f([i = full + j](const float* x) { return x[i]; }, k);
    }
    for (int64_t j = n - full; j < kNormLanes; ++j) last[k][j] = 0.0f;
  }
  for (int c = 0; c < half; c += vecs * kLanes) {
    Vec low[count][vecs] = {}, high[count][vecs] = {};
    for (int64_t i = c; i < full; i += kNormLanes) {
#pragma GCC unroll 8
      for (int v = 0; v < vecs * count; ++v) {
        low[v % count][v / count] += vector(i + v / count * kLanes, v % count);
        high[v % count][v / count] += vector(i + half + v / count * kLanes, v % count);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < vecs * count; ++v) {
      int k = v % count, at = c + v / count * kLanes;
      if (full != n) {
        low[k][v / count] += load(last[k] + at);
        high[k][v / count] += load(last[k] + half + at);
      }
      store(partial[k] + at, low[k][v / count] + high[k][v / count]);
    }
  }
  for (int k = 0; k < count; ++k) {
#pragma GCC unroll 8
    for (int s = half / 2; s > 0; s /= 2) {
      for (int j = 0; j < s; ++j) partial[k][j] += partial[k][j + s];
    }
    sums[k] = partial[k][0];
  }
}

// The row after x: row_sums reads a row in an order that the hardware does not prefetch (2048
// numbers in 200 ns instead of 260). Rows of 16 bits are widened from left to right before.
inline void prefetch_next(Dtype dtype, const void* x, int64_t n) {
  if (dtype == Dtype::f32) prefetch_row(static_cast<const float*>(x) + n, n);
}

RowStatistics row_statistics(const float* x, int64_t n, float eps, bool subtract_mean) {
  float k = static_cast<float>(n), sum = 0.0f, squares;
  if (subtract_mean) row_sums<1>(n, [&](auto at, int) { return at(x); }, &sum);
  float mean = subtract_mean ? norm_mean(sum, k) : 0.0f;
  auto square = [&](auto at, int) { return (at(x) - mean) * (at(x) - mean); };  // norm_square
  row_sums<1>(n, square, &squares);
  return {mean, norm_rstd(squares, k, eps)};
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
  with_float(dtype, [&]<class T>(Type<T>) {
    add_rounded(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<T*>(total),
                wide, n);
  });
}

const float* wide_row(Dtype dtype, const void* x, float* buffer, int64_t n) {
  prefetch_next(dtype, x, n);
  return in_fp32(dtype, x, 0, n, buffer);
}

// dx, and what the row adds to dweight and, if it is not null, to dbias.
template <bool with_bias>
__attribute__((noinline)) void norm_dx_row(const float* __restrict g, const float* __restrict x,
                                           const float* __restrict weight, RowStatistics row,
                                           const float* c, float* __restrict dx,
                                           float* __restrict dweight, float* __restrict dbias,
                                           int64_t n) {
  float c1 = c[0], c2 = c[1];
  for (int64_t i = 0; i < n; ++i) {
    float xhat = norm_xhat(x[i], row.mean, row.rstd);
    dx[i] = norm_dx(g[i] * weight[i], xhat, c1, c2, row.rstd);
    dweight[i] += g[i] * xhat;
    if (with_bias) dbias[i] += g[i];
  }
}

__attribute__((noinline)) void add_to(const float* __restrict x, float* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

void norm_backward_row(const NormGrads& a, const void* g, const void* x, const void* g_total,
                       RowStatistics row, void* dx, float* dweight, float* dbias, float* buffer) {
  int64_t n = a.n;
  prefetch_next(a.g_dtype, g, n);
  prefetch_next(a.dtype, x, n);
  const float* grad_y = in_fp32(a.g_dtype, g, 0, n, buffer);
  const float* wide = in_fp32(a.dtype, x, 0, n, buffer + n);
  float c[2] = {}, k = static_cast<float>(n);
  auto products = [&](auto at, int k) {  // gw * norm_xhat and gw
    auto gw = at(grad_y) * at(a.weight);
    return k == 1 ? gw : gw * ((at(wide) - row.mean) * row.rstd);
  };
  if (a.subtract_mean) {
    row_sums<2>(n, products, c);
  } else {
    row_sums<1>(n, products, c);
  }
  c[0] /= k;
  c[1] = a.subtract_mean ? c[1] / k : 0.0f;
  float* out = a.dtype == Dtype::f32 ? static_cast<float*>(dx) : buffer + 2 * n;
  auto loop = dbias == nullptr ? norm_dx_row<false> : norm_dx_row<true>;
  loop(grad_y, wide, a.weight, row, c, out, dweight, dbias, n);
  if (g_total != nullptr) add_to(in_fp32(a.total_dtype, g_total, 0, n, buffer + 3 * n), out, n);
  if (a.dtype == Dtype::bf16) narrow(out, static_cast<Bf16*>(dx), n);
  if (a.dtype == Dtype::f16) narrow(out, static_cast<Fp16*>(dx), n);
}

// The pairs are (i, i + pairs) or, interleaved, (2i, 2i + 1); `step`: between their factors.
template <bool interleaved, int step, class T>
void rotary_row(const T* __restrict x, const RotaryFactors& f, T* __restrict y, int64_t pairs) {
  constexpr int next = interleaved ? 2 : 1;
  const int64_t other = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    float x1 = decode(x[i * next]), x2 = decode(x[i * next + other]);
    float sin1 = f.sign * f.sin1[i * step], sin2 = f.sign * f.sin2[i * step];
    y[i * next] = Convert<T>::encode(rotary_first(x1, x2, f.cos1[i * step], sin1));
    y[i * next + other] = Convert<T>::encode(rotary_second(x1, x2, f.cos2[i * step], sin2));
  }
}

void rotary(Dtype dtype, bool interleaved, const void* x, const RotaryFactors& factors, void* y,
            int64_t d) {
  with_float(dtype, [&]<class T>(Type<T>) {
    auto* row = !interleaved        ? rotary_row<false, 1, T>
                : factors.step == 1 ? rotary_row<true, 1, T>
                                    : rotary_row<true, 2, T>;
    row(static_cast<const T*>(x), factors, static_cast<T*>(y), d / 2);
  });
}
