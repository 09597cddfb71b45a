// Loops of the training step: unscale, grad_stats, adamw. Included once per instruction set.

template <class T>
bool unscale_row(T* g, typename Unscale<T>::Real inv_scale, int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    T rounded = Unscale<T>::round(Unscale<T>::apply(g[i], inv_scale));
    bad |= static_cast<uint32_t>(Unscale<T>::bad(g[i])) |
           static_cast<uint32_t>(Unscale<T>::bad(rounded));
    g[i] = rounded;
  }
  return bad != 0;
}

bool unscale(Dtype dtype, void* g, float inv_scale, int64_t n) {
  if (dtype == Dtype::f64) return unscale_row(static_cast<double*>(g), inv_scale, n);
  bool bad = false;
  with_float(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    bad = unscale_row(static_cast<T*>(g), inv_scale, n);
  });
  return bad;
}

// Sixteen running sums, folded in halves at the end: the order depends on n alone, not on the
// instruction set or the number of threads.
template <class T>
bool sum_of_squares(const T* g, typename Unscale<T>::Real inv_scale, int64_t n, double* sum_sq) {
  using Real = typename Unscale<T>::Real;
  constexpr int64_t lanes = 16;
  double sums[lanes] = {};
  uint32_t bad[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int64_t l = 0; l < lanes; ++l) {
      Real value = Unscale<T>::apply(g[i + l], inv_scale);
      bad[l] |= static_cast<uint32_t>(Unscale<T>::bad(g[i + l])) |
                static_cast<uint32_t>(is_nonfinite(value));
      sums[l] += static_cast<double>(value) * static_cast<double>(value);
    }
  }
  for (int64_t l = 0; i < n; ++i, ++l) {
    Real value = Unscale<T>::apply(g[i], inv_scale);
    bad[l] |=
        static_cast<uint32_t>(Unscale<T>::bad(g[i])) | static_cast<uint32_t>(is_nonfinite(value));
    sums[l] += static_cast<double>(value) * static_cast<double>(value);
  }
  uint32_t any = 0;
  for (int64_t l = 0; l < lanes; ++l) any |= bad[l];
  for (int64_t half = lanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  *sum_sq = sums[0];
  return any != 0;
}

bool grad_stats(Dtype dtype, const void* g, float inv_scale, int64_t n, double* sum_sq) {
  if (dtype == Dtype::f64) {
    return sum_of_squares(static_cast<const double*>(g), inv_scale, n, sum_sq);
  }
  bool bad = false;
  with_float(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    bad = sum_of_squares(static_cast<const T*>(g), inv_scale, n, sum_sq);
  });
  return bad;
}

template <class P, class G>
void adamw_row(P* __restrict param, const G* __restrict grad, float* __restrict exp_avg,
               float* __restrict exp_avg_sq, int64_t n, const AdamWScalars<float> s) {
  for (int64_t i = 0; i < n; ++i) {
    float p = adamw(decode(param[i]), decode(grad[i]), exp_avg[i], exp_avg_sq[i], s);
    param[i] = Convert<P>::encode(p);
  }
}

template <class P, class G>
void adamw_master_row(P* __restrict param, const G* __restrict grad, float* __restrict exp_avg,
                      float* __restrict exp_avg_sq, float* __restrict master, int64_t n,
                      const AdamWScalars<float> s) {
  for (int64_t i = 0; i < n; ++i) {
    float p = adamw(master[i], decode(grad[i]), exp_avg[i], exp_avg_sq[i], s);
    master[i] = p;
    param[i] = Convert<P>::encode(p);
  }
}

void adamw(Dtype param_dtype, Dtype grad_dtype, const AdamWArrays& a, int64_t n,
           const AdamWScalars<float>& s) {
  with_float(param_dtype, [&](auto tp) {
    with_float(grad_dtype, [&](auto tg) {
      using P = typename decltype(tp)::type;
      using G = typename decltype(tg)::type;
      P* param = static_cast<P*>(a.param);
      const G* grad = static_cast<const G*>(a.grad);
      float* m = static_cast<float*>(a.exp_avg);
      float* v = static_cast<float*>(a.exp_avg_sq);
      if (a.master != nullptr) {
        adamw_master_row(param, grad, m, v, static_cast<float*>(a.master), n, s);
      } else {
        adamw_row(param, grad, m, v, n, s);
      }
    });
  });
}

void adamw_f64(const AdamWArrays& a, int64_t n, const AdamWScalars<double>& s) {
  double* truth = static_cast<double*>(a.master != nullptr ? a.master : a.param);
  double* m = static_cast<double*>(a.exp_avg);
  double* v = static_cast<double*>(a.exp_avg_sq);
  const double* grad = static_cast<const double*>(a.grad);
  double* param = static_cast<double*>(a.param);
  for (int64_t i = 0; i < n; ++i) {
    double p = adamw(truth[i], grad[i], m[i], v[i], s);
    truth[i] = p;
    param[i] = p;
  }
}
