// Loops over gradients: unscale, grad_stats. Included once per instruction set.

inline double real(double x) { return x; }
template <class T>
inline float real(T x) {
  return decode(x);
}

// What a loop records about its elements, in `lanes` accumulators: whether all are finite...
template <int64_t lanes>
struct Finite {
  uint32_t bad[lanes] = {};

  template <class T>
  MIXPREC_HD void add(int64_t lane, T, typename Unscale<T>::Real unscaled) {
    bad[lane] |= static_cast<uint32_t>(is_nonfinite(unscaled));
  }
  MIXPREC_HD bool finish(uint32_t*) const {
    uint32_t any = 0;
    for (int64_t l = 0; l < lanes; ++l) any |= bad[l];
    return any != 0;
  }
};

// ...or how many there are of each GradKind.
template <int64_t lanes>
struct Kinds {
  uint32_t counts[4][lanes] = {};

  template <class T>
  MIXPREC_HD void add(int64_t lane, T g, typename Unscale<T>::Real unscaled) {
    GradKind kind = Unscale<T>::kind(real(g), unscaled);
    counts[0][lane] += kind.inf;
    counts[1][lane] += kind.nan;
    counts[2][lane] += kind.zero;
    counts[3][lane] += kind.subnormal;
  }
  MIXPREC_HD bool finish(uint32_t* totals) const {
    for (int k = 0; k < 4; ++k) {
      totals[k] = 0;
      for (int64_t l = 0; l < lanes; ++l) totals[k] += counts[k][l];
    }
    return (totals[0] | totals[1]) != 0;
  }
};

template <class Notes, class T>
bool unscale_row(T* g, typename Unscale<T>::Real inv_scale, int64_t n, uint32_t* counts) {
  Notes notes;
  for (int64_t i = 0; i < n; ++i) {
    T rounded = Unscale<T>::round(Unscale<T>::apply(g[i], inv_scale));
    notes.add(0, g[i], real(rounded));
    g[i] = rounded;
  }
  return notes.finish(counts);
}

// Sixteen partial sums, reduced pairwise at the end: the order depends only on n, not on the
// instruction set or the number of threads.
constexpr int64_t kPartialSums = 16;

template <class Notes, class T>
bool sum_of_squares(const T* g, typename Unscale<T>::Real inv_scale, int64_t n, double* sum_sq,
                    uint32_t* counts) {
  using Real = typename Unscale<T>::Real;
  double sums[kPartialSums] = {};
  Notes notes;
  auto add = [&](int64_t l, T x) {
    Real value = Unscale<T>::apply(x, inv_scale);
    notes.add(l, x, value);
    sums[l] += static_cast<double>(value) * static_cast<double>(value);
  };
  int64_t i = 0;
  for (; i + kPartialSums <= n; i += kPartialSums) {
    for (int64_t l = 0; l < kPartialSums; ++l) add(l, g[i + l]);
  }
  for (int64_t l = 0; i < n; ++i, ++l) add(l, g[i]);
  for (int64_t half = kPartialSums / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  *sum_sq = sums[0];
  return notes.finish(counts);
}

// f(Type<T>{}) for the gradient's dtype.
template <class F>
bool with_grad(Dtype dtype, const F& f) {
  return dtype == Dtype::f64 ? f(Type<double>{}) : with_float(dtype, f);
}

bool unscale(Dtype dtype, void* g, float inv_scale, int64_t n, uint32_t* counts) {
  return with_grad(dtype, [&]<class T>(Type<T>) {
    T* x = static_cast<T*>(g);
    return counts ? unscale_row<Kinds<1>>(x, inv_scale, n, counts)
                  : unscale_row<Finite<1>>(x, inv_scale, n, counts);
  });
}

bool grad_stats(Dtype dtype, const void* g, float inv_scale, int64_t n, double* sum_sq,
                uint32_t* counts) {
  return with_grad(dtype, [&]<class T>(Type<T>) {
    const T* x = static_cast<const T*>(g);
    return counts ? sum_of_squares<Kinds<kPartialSums>>(x, inv_scale, n, sum_sq, counts)
                  : sum_of_squares<Finite<kPartialSums>>(x, inv_scale, n, sum_sq, counts);
  });
}
