// Loops of act_quantize and act_backward. Included once per instruction set, after step_loops.h and
// side_by_side.h. As there, a piece is processed in blocks: what is narrower than fp32 is widened
// first.

constexpr int64_t kPart = 480;  // elements of a block: whole numbers of Several and of cache lines

// n elements of x in fp32: x itself, or in the buffer.
inline const float* in_fp32(Dtype dtype, const void* x, int64_t i, int64_t n, float* buffer) {
  if (dtype == Dtype::f32) return static_cast<const float*>(x) + i;
  if (dtype == Dtype::bf16) {
    widen(static_cast<const Bf16*>(x) + i, buffer, n);
  } else {
    widen(static_cast<const Fp16*>(x) + i, buffer, n);
  }
  return buffer;
}

// f(Type-like constant) for the kind.
template <Activation kind>
struct Kind {
  static constexpr Activation value = kind;
};

template <class F>
inline void with_kind(Activation kind, F&& f) {
  switch (kind) {
    case Activation::silu:
      return f(Kind<Activation::silu>{});
    case Activation::gelu:
      return f(Kind<Activation::gelu>{});
    case Activation::gelu_tanh:
      return f(Kind<Activation::gelu_tanh>{});
    default:
      return f(Kind<Activation::relu2>{});
  }
}

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

template <Activation kind, bool near>
__attribute__((noinline, flatten)) void activate(const float* __restrict x, float* __restrict y,
                                                 int64_t n) {
  for_numbers<by_several<kind, near>>(
      n, [&](auto at, auto set) { set(y, activation<kind, near>(at(x)).value); });
}

template <Activation kind, bool near>
__attribute__((noinline, flatten)) void activate_up(const float* __restrict x,
                                                    const float* __restrict up, float* __restrict y,
                                                    int64_t n) {
  for_numbers<by_several<kind, near>>(
      n, [&](auto at, auto set) { set(y, activation<kind, near>(at(x)).value * at(up)); });
}

template <Activation kind, bool near>
__attribute__((noinline, flatten)) void derive(const float* __restrict g, const float* __restrict x,
                                               float* __restrict dx, int64_t n) {
  for_numbers<by_several<kind, near>>(
      n, [&](auto at, auto set) { set(dx, at(g) * activation<kind, near>(at(x)).slope); });
}

template <Activation kind, bool near>
__attribute__((noinline, flatten)) void derive_up(const float* __restrict g,
                                                  const float* __restrict x,
                                                  const float* __restrict up, float* __restrict dx,
                                                  float* __restrict dup, int64_t n) {
  for_numbers<by_several<kind, near>>(n, [&](auto at, auto set) {
    auto a = activation<kind, near>(at(x));
    auto of_y = at(g);
    set(dx, (of_y * at(up)) * a.slope);
    set(dup, of_y * a.value);
  });
}

// Whether all |x| <= limit.
__attribute__((noinline)) bool is_near(const float* __restrict x, float limit, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t magnitude = static_cast<int32_t>(float_bits(x[i]) & 0x7FFFFFFFu);
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest <= static_cast<int32_t>(float_bits(limit));
}

void act(Activation kind, Dtype dtype, const void* x, const void* up, float* y, int64_t n) {
  alignas(64) float buffer[2][kPart];
  with_kind(kind, [&](auto k) {
    for (int64_t i = 0; i < n; i += kPart) {
      int64_t count = n - i < kPart ? n - i : kPart;
      const float* wide = in_fp32(dtype, x, i, count, buffer[0]);
      bool near = kind == Activation::relu2 || is_near(wide, activation_near(kind), count);
      if (up == nullptr) {
        auto loop = near ? activate<k.value, true> : activate<k.value, false>;
        loop(wide, y + i, count);
      } else {
        auto loop = near ? activate_up<k.value, true> : activate_up<k.value, false>;
        loop(wide, in_fp32(dtype, up, i, count, buffer[1]), y + i, count);
      }
    }
  });
}

void act_backward(Activation kind, Dtype g_dtype, Dtype dtype, const void* g, const void* x,
                  const void* up, float* dx, float* dup, int64_t n) {
  alignas(64) float buffer[3][kPart];
  with_kind(kind, [&](auto k) {
    for (int64_t i = 0; i < n; i += kPart) {
      int64_t count = n - i < kPart ? n - i : kPart;
      const float* of_y = in_fp32(g_dtype, g, i, count, buffer[0]);
      const float* wide = in_fp32(dtype, x, i, count, buffer[1]);
      bool near = kind == Activation::relu2 || is_near(wide, activation_near(kind), count);
      if (up == nullptr) {
        auto loop = near ? derive<k.value, true> : derive<k.value, false>;
        loop(of_y, wide, dx + i, count);
      } else {
        auto loop = near ? derive_up<k.value, true> : derive_up<k.value, false>;
        loop(of_y, wide, in_fp32(dtype, up, i, count, buffer[2]), dx + i, dup + i, count);
      }
    }
  });
}
