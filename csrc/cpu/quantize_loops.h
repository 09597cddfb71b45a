// Loops of amax, quantize and dequantize. Included once per instruction set, inside its namespace.

template <class T>
uint32_t amax_bits(const T* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t u = float_bits(decode(x[i])) & 0x7FFFFFFFu;
    largest = u > largest ? u : largest;
  }
  return largest;
}

uint32_t amax(Dtype x_dtype, const void* x, int64_t n) {
  uint32_t result = 0;
  with_float(x_dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    result = amax_bits(static_cast<const X*>(x), n);
  });
  return result;
}

template <class X, class Q>
uint32_t quantize_row(const X* __restrict x, float scale, Q* __restrict q, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    float value = decode(x[i]);
    uint32_t u = float_bits(value) & 0x7FFFFFFFu;
    largest = u > largest ? u : largest;
    q[i] = Convert<Q>::encode(value, scale);
  }
  return largest;
}

uint32_t quantize(Dtype x_dtype, Dtype q_dtype, const void* x, float scale, void* q, int64_t n) {
  uint32_t result = 0;
  with_float(x_dtype, [&](auto tx) {
    with_low(q_dtype, [&](auto tq) {
      using X = typename decltype(tx)::type;
      using Q = typename decltype(tq)::type;
      result = quantize_row(static_cast<const X*>(x), scale, static_cast<Q*>(q), n);
    });
  });
  return result;
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// 16 x 16 bytes from rows ld apart to rows ld_t apart: four rounds that interleave halves.
inline void transpose_16x16(const uint8_t* in, int64_t ld, uint8_t* out, int64_t ld_t) {
  Bytes16 a[16], b[16];
  for (int i = 0; i < 16; ++i) __builtin_memcpy(&a[i], in + i * ld, 16);
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = __builtin_shuffle(
          a[i], a[i + 8], Bytes16{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
      b[2 * i + 1] = __builtin_shuffle(
          a[i], a[i + 8], Bytes16{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
  for (int i = 0; i < 16; ++i) __builtin_memcpy(out + i * ld_t, &a[i], 16);
}

// out[c * ld_t + r] = in[r * ld + c]
template <class Q>
void transpose_tile(const Q* in, int64_t ld, Q* out, int64_t ld_t, int64_t rows, int64_t cols) {
  int64_t full_rows = 0, full_cols = 0;
  if constexpr (sizeof(Q) == 1) {
    full_rows = rows & ~int64_t{15};
    full_cols = cols & ~int64_t{15};
    for (int64_t c = 0; c < full_cols; c += 16) {
      for (int64_t r = 0; r < full_rows; r += 16) {
        transpose_16x16(reinterpret_cast<const uint8_t*>(in + r * ld + c), ld,
                        reinterpret_cast<uint8_t*>(out + c * ld_t + r), ld_t);
      }
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = c < full_cols ? full_rows : 0; r < rows; ++r) out[c * ld_t + r] = in[r * ld + c];
  }
}

template <class X, class Q>
uint32_t quantize_transpose_rows(const X* x, float scale, Q* q, Q* q_t, int64_t rows, int64_t cols,
                                 int64_t ld_t) {
  // 64 columns at a time: the tile just written is still in the first cache when it is read back,
  // and for fp8 each of its columns fills one cache line of the transpose.
  constexpr int64_t width = 64;
  uint32_t largest = 0;
  for (int64_t c = 0; c < cols; c += width) {
    int64_t n = cols - c < width ? cols - c : width;
    for (int64_t r = 0; r < rows; ++r) {
      uint32_t row = quantize_row(x + r * cols + c, scale, q + r * cols + c, n);
      largest = row > largest ? row : largest;
    }
    transpose_tile(q + c, cols, q_t + c * ld_t, ld_t, rows, n);
  }
  return largest;
}

uint32_t quantize_transpose(Dtype x_dtype, Dtype q_dtype, const void* x, float scale, void* q,
                            void* q_t, int64_t rows, int64_t cols, int64_t ld_t) {
  uint32_t result = 0;
  with_float(x_dtype, [&](auto tx) {
    with_low(q_dtype, [&](auto tq) {
      using X = typename decltype(tx)::type;
      using Q = typename decltype(tq)::type;
      result = quantize_transpose_rows(static_cast<const X*>(x), scale, static_cast<Q*>(q),
                                       static_cast<Q*>(q_t), rows, cols, ld_t);
    });
  });
  return result;
}

void dequantize(Dtype q_dtype, Dtype out_dtype, const void* q, float scale_inv, void* out,
                int64_t n) {
  with_low(q_dtype, [&](auto tq) {
    with_float(out_dtype, [&](auto to) {
      using Q = typename decltype(tq)::type;
      using O = typename decltype(to)::type;
      const Q* __restrict in = static_cast<const Q*>(q);
      O* __restrict result = static_cast<O*>(out);
      for (int64_t i = 0; i < n; ++i) {
        result[i] = Convert<O>::encode(decode(in[i]) * scale_inv);
      }
    });
  });
}
