// The loop of rotary. Included once per instruction set.

// The pairs are (i, i + pairs) or, interleaved, (2i, 2i + 1).
template <bool interleaved, class T>
void rotary_row(const T* __restrict x, const float* __restrict cos, const float* __restrict sin,
                T* __restrict y, int64_t pairs) {
  constexpr int step = interleaved ? 2 : 1;
  const int64_t other = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    float x1 = decode(x[i * step]), x2 = decode(x[i * step + other]);
    y[i * step] = Convert<T>::encode(rotary_first(x1, x2, cos[i], sin[i]));
    y[i * step + other] = Convert<T>::encode(rotary_second(x1, x2, cos[i], sin[i]));
  }
}

void rotary(Dtype dtype, bool interleaved, const void* x, const float* cos, const float* sin,
            void* y, int64_t d) {
  with_float(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    if (interleaved) {
      rotary_row<true>(from, cos, sin, to, d / 2);
    } else {
      rotary_row<false>(from, cos, sin, to, d / 2);
    }
  });
}
