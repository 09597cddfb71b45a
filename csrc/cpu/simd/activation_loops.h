// Loops of act_quantize and act_backward. Included once per instruction set, after step_loops.h. As
// there, a piece is processed in blocks: what is narrower than fp32 is widened first. Formulas that
// are long chains of operations are computed for several vectors as one number: each operation for
// all of them before the next. Callers are `flatten`: the formula lies between them and the
// operators of such a number, which it cannot inline itself, being compiled for any processor.

constexpr int kVectors = 3;  // more leave too few of AVX2's registers for constants

struct Several {
  static constexpr int64_t count = kVectors * kLanes;
  Vec v[kVectors];
};

template <class F>
inline Several each_vector(const F& f) {
  Several r;
#pragma GCC unroll 3
  for (int i = 0; i < kVectors; ++i) r.v[i] = f(i);
  return r;
}

inline Several load_several(const float* p) {
  return each_vector([&](int i) { return load(p + i * kLanes); });
}

inline void store_several(float* p, const Several& a) {
#pragma GCC unroll 3
  for (int i = 0; i < kVectors; ++i) store(p + i * kLanes, a.v[i]);
}

inline Vec vector_of(const Several& a, int i) { return a.v[i]; }
inline Vec vector_of(float a, int) { return broadcast(a); }

template <class A, class B>
concept HasSeveral = __is_same(A, Several) || __is_same(B, Several);  // the other may be a float

template <class A, class B>
  requires HasSeveral<A, B>
inline Several operator+(const A& a, const B& b) {
  return each_vector([&](int i) { return vector_of(a, i) + vector_of(b, i); });
}
template <class A, class B>
  requires HasSeveral<A, B>
inline Several operator-(const A& a, const B& b) {
  return each_vector([&](int i) { return vector_of(a, i) - vector_of(b, i); });
}
template <class A, class B>
  requires HasSeveral<A, B>
inline Several operator*(const A& a, const B& b) {
  return each_vector([&](int i) { return vector_of(a, i) * vector_of(b, i); });
}
template <class A, class B>
  requires HasSeveral<A, B>
inline Several operator/(const A& a, const B& b) {
  return each_vector([&](int i) { return vector_of(a, i) / vector_of(b, i); });
}
inline Several operator-(const Several& a) {
  return each_vector([&](int i) { return -a.v[i]; });
}

// The functions with bits of math/activation.h.
inline Several times_power(const Several& y, const Several& shifted) {
  return each_vector([&](int i) { return (Vec)((Ints)y.v[i] + ((Ints)shifted.v[i] << 23)); });
}
inline Several magnitude(const Several& x) {
  return each_vector([&](int i) { return (Vec)((Ints)x.v[i] & 0x7FFFFFFF); });
}
inline Several high_part(const Several& x) {
  return each_vector([&](int i) { return (Vec)(((Ints)x.v[i] + 0x800) & ~0xFFF); });
}
template <class Then>
inline Several if_negative(const Several& x, const Then& then, const Several& otherwise) {
  return each_vector([&](int i) { return x.v[i] < 0.0f ? vector_of(then, i) : otherwise.v[i]; });
}

constexpr int64_t kPart = 480;  // elements of a block: whole numbers of Several and of cache lines

template <Activation kind, bool near>
constexpr bool by_several = near && kind != Activation::relu2;

// f(numbers at i) for all i < n, several vectors at a time if that is possible.
template <bool several, class F>
inline void for_numbers(int64_t n, const F& f) {
  int64_t i = 0;
  if constexpr (several) {
    for (; i + Several::count <= n; i += Several::count) {
      f([i](const float* x) { return load_several(x + i); },
        [i](float* y, const Several& a) { store_several(y + i, a); });
    }
  }
  for (; i < n; ++i) {
    f([i](const float* x) { return x[i]; }, [i](float* y, float a) { y[i] = a; });
  }
}

template <Activation kind, bool near, bool gated>
__attribute__((noinline, flatten)) void activate(const float* __restrict x,
                                                 const float* __restrict up, float* __restrict y,
                                                 int64_t n) {
  for_numbers<by_several<kind, near>>(n, [&](auto at, auto set) {
    auto value = activation<kind, near>(at(x)).value;
    if constexpr (gated) value = value * at(up);
    set(y, value);
  });
}

template <Activation kind, bool near, bool gated>
__attribute__((noinline, flatten)) void derive(const float* __restrict g, const float* __restrict x,
                                               const float* __restrict up, float* __restrict dx,
                                               float* __restrict dup, int64_t n) {
  for_numbers<by_several<kind, near>>(n, [&](auto at, auto set) {
    auto a = activation<kind, near>(at(x));
    auto grad_y = at(g);
    if constexpr (gated) {
      set(dx, (grad_y * at(up)) * a.slope);
      set(dup, grad_y * a.value);
    } else {
      set(dx, grad_y * a.slope);
    }
  });
}

// Whether `near` may be set for these x.
inline bool is_near(Activation kind, const float* x, int64_t n) {
  return kind == Activation::relu2 || largest_magnitude(x, n) <= float_bits(activation_near(kind));
}

template <auto... constants>
struct Constants {};

// f(Constants<kind, near>{})
template <class F>
inline void with_form(Activation kind, bool near, const F& f) {
  auto with_kind = [&]<Activation k>(Constants<k>) {
    near ? f(Constants<k, true>{}) : f(Constants<k, false>{});
  };
  switch (kind) {
    case Activation::silu:
      return with_kind(Constants<Activation::silu>{});
    case Activation::gelu:
      return with_kind(Constants<Activation::gelu>{});
    case Activation::gelu_tanh:
      return with_kind(Constants<Activation::gelu_tanh>{});
    default:
      return with_kind(Constants<Activation::relu2>{});
  }
}

void act(Activation kind, Dtype dtype, const void* x, const void* up, float* y, int64_t n) {
  alignas(64) float buffer[2][kPart];
  for (int64_t i = 0; i < n; i += kPart) {
    int64_t count = n - i < kPart ? n - i : kPart;
    const float* wide = in_fp32(dtype, x, i, count, buffer[0]);
    const float* factor = up == nullptr ? nullptr : in_fp32(dtype, up, i, count, buffer[1]);
    with_form(kind, is_near(kind, wide, count), [&]<Activation k, bool near>(Constants<k, near>) {
      auto* loop = up == nullptr ? activate<k, near, false> : activate<k, near, true>;
      loop(wide, factor, y + i, count);
    });
  }
}

void act_backward(Activation kind, Dtype g_dtype, Dtype dtype, const void* g, const void* x,
                  const void* up, float* dx, float* dup, int64_t n) {
  alignas(64) float buffer[3][kPart];
  for (int64_t i = 0; i < n; i += kPart) {
    int64_t count = n - i < kPart ? n - i : kPart;
    const float* grad_y = in_fp32(g_dtype, g, i, count, buffer[0]);
    const float* wide = in_fp32(dtype, x, i, count, buffer[1]);
    const float* factor = up == nullptr ? nullptr : in_fp32(dtype, up, i, count, buffer[2]);
    float* grad_up = up == nullptr ? nullptr : dup + i;
    with_form(kind, is_near(kind, wide, count), [&]<Activation k, bool near>(Constants<k, near>) {
      auto* loop = up == nullptr ? derive<k, near, false> : derive<k, near, true>;
      loop(grad_y, wide, factor, dx + i, grad_up, count);
    });
  }
}
