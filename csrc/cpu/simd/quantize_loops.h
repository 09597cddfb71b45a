// Loops of amax, quantize and dequantize. Included once per instruction set, inside its namespace.

uint32_t amax(Dtype x_dtype, const void* x, int64_t n) {
  return with_float(x_dtype, [&]<class X>(Type<X>) {
    const X* in = static_cast<const X*>(x);
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      uint32_t u = float_bits(decode(in[i])) & 0x7FFFFFFFu;
      largest = u > largest ? u : largest;
    }
    return largest;
  });
}

template <bool known_finite, class X, class Q>
uint32_t quantize_row(const X* __restrict x, float scale, Q* __restrict q, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    float value = decode(x[i]);
    uint32_t u = float_bits(value) & 0x7FFFFFFFu;
    largest = u > largest ? u : largest;
    q[i] = Convert<Q>::template encode<known_finite>(value, scale);
  }
  return largest;
}

// Assumes that every value is finite, which is a third faster; the amax that it returns shows
// whether that was true.
template <class X, class Q>
uint32_t quantize_row(const X* x, float scale, Q* q, int64_t n) {
  uint32_t largest = quantize_row<true>(x, scale, q, n);
  if (is_nonfinite_bits(largest) || is_nonfinite(scale)) quantize_row<false>(x, scale, q, n);
  return largest;
}

uint32_t quantize(Dtype x_dtype, Dtype q_dtype, const void* x, float scale, void* q, int64_t n) {
  return with_float(x_dtype, [&]<class X>(Type<X>) {
    return with_low(q_dtype, [&]<class Q>(Type<Q>) {
      return quantize_row(static_cast<const X*>(x), scale, static_cast<Q*>(q), n);
    });
  });
}

template <class U, class S, int... lane>
struct VectorType {
  using Unsigned = U;
  using Signed = S;
  using Lanes = Indices<lane...>;
  static constexpr int count = sizeof...(lane);
};
// Of 16 bytes.
template <int element_size>
struct VectorOf : VectorType<Bytes16, void, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> {
};
template <>
struct VectorOf<2> : VectorType<Words8, Shorts8, 0, 1, 2, 3, 4, 5, 6, 7> {};
template <>
struct VectorOf<4> : VectorType<Uints4, Ints4, 0, 1, 2, 3> {};

// The elements of the low or the high halves of a and b in turn.
template <bool high, class V, int... lane>
inline V interleave(V a, V b, Indices<lane...>) {
  constexpr int n = sizeof...(lane), first = high ? n / 2 : 0;
  return __builtin_shuffle(a, b, V{(first + lane / 2 + lane % 2 * n)...});
}

// Transposes a square of 16 bytes a row, from rows ld apart to rows ld_t apart, in rounds that
// interleave halves.
template <class T>
void transpose_square(const T* in, int64_t ld, T* out, int64_t ld_t) {
  using V = typename VectorOf<sizeof(T)>::Unsigned;
  typename VectorOf<sizeof(T)>::Lanes lanes;
  constexpr int side = VectorOf<sizeof(T)>::count;
  V a[side], b[side];
#pragma GCC unroll 16
  for (int i = 0; i < side; ++i) __builtin_memcpy(&a[i], in + i * ld, 16);
#pragma GCC unroll 4
  for (int round = 1; round < side; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < side / 2; ++i) {
      b[2 * i] = interleave<false>(a[i], a[i + side / 2], lanes);
      b[2 * i + 1] = interleave<true>(a[i], a[i + side / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < side; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < side; ++i) __builtin_memcpy(out + i * ld_t, &a[i], 16);
}

// out[c * ld_t + r] = in[r * ld + c]
template <class T>
void transpose_tile(const T* in, int64_t ld, T* out, int64_t ld_t, int64_t rows, int64_t cols) {
  constexpr int64_t side = 16 / sizeof(T);
  int64_t full_rows = rows / side * side, full_cols = cols / side * side;
  for (int64_t r = 0; r < full_rows; r += side) {
    for (int64_t c = 0; c < full_cols; c += side) {
      transpose_square(in + r * ld + c, ld, out + c * ld_t + r, ld_t);
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = c < full_cols ? full_rows : 0; r < rows; ++r) {
      out[c * ld_t + r] = in[r * ld + c];
    }
  }
}

constexpr int64_t kTile = 64;           // fp8 elements in a cache line
constexpr int64_t kWide = 2 * kTile;    // the columns of a block
constexpr int64_t kStreamed = 1 << 20;  // bytes; smaller results should stay in the caches

// Copies n bytes; `in` is aligned to 64. A streaming store writes a full cache line without reading
// it first, which halves the memory traffic of large results.
inline void store_line(void* out, const void* in, uint64_t n, bool stream) {
#if defined(__SSE2__)
  if (stream && n == 64 && reinterpret_cast<uint64_t>(out) % 64 == 0) {
    for (int i = 0; i < 4; ++i) {
      _mm_stream_si128(static_cast<__m128i*>(out) + i, static_cast<const __m128i*>(in)[i]);
    }
    return;
  }
#endif
  (void)stream;
  __builtin_memcpy(out, in, n);
}

inline void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// One tile of at most 64 x 64, x and q with row stride `ld`. Rows of x, q and q_t are far apart,
// often by a power of two, and would evict each other from the L1 cache; tiles do not. The sizes of
// a full tile are constants, and the next tile of x is prefetched while this one is cast: each
// saves a third of the time (4M fp32 elements, one thread: 4.8 ms without, 1.2 ms with both and
// streaming).
template <bool full, bool known_finite, class X, class Q>
void quantize_tile(const X* x, float scale, Q* q, Q* q_t, int64_t rows, int64_t n, int64_t ld,
                   int64_t ld_t, bool stream, uint32_t* __restrict largest) {
  if (full) rows = n = kTile;
  alignas(64) Q tile[kTile * kTile], turned[kTile * kTile];
  for (int64_t r = 0; r < rows; ++r) {
    const X* __restrict in = x + r * ld;
    Q* __restrict out = tile + r * kTile;
    if (full) {
      const char* next = reinterpret_cast<const char*>(in + kTile);
      for (uint64_t b = 0; b < kTile * sizeof(X); b += 64) __builtin_prefetch(next + b);
    }
    for (int64_t i = 0; i < n; ++i) {
      float value = decode(in[i]);
      uint32_t u = float_bits(value) & 0x7FFFFFFFu;
      largest[i] = u > largest[i] ? u : largest[i];
      out[i] = Convert<Q>::template encode<known_finite>(value, scale);
    }
    store_line(q + r * ld, out, static_cast<uint64_t>(n) * sizeof(Q), stream);
  }
  // GCC 12 takes the tile for unwritten, since the loops above could have no iterations.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
  transpose_tile(tile, kTile, turned, kTile, rows, n);
#pragma GCC diagnostic pop
  for (int64_t k = 0; k < n; ++k) {
    store_line(q_t + k * ld_t, turned + k * kTile, static_cast<uint64_t>(rows) * sizeof(Q), stream);
  }
}

uint32_t quantize_transpose(Dtype x_dtype, Dtype q_dtype, const void* x, float scale, void* q,
                            void* q_t, int64_t rows, int64_t cols, int64_t ld, int64_t ld_t) {
  bool stream = ld * ld_t * element_size(q_dtype) >= kStreamed;
  uint32_t result = 0;
  with_float(x_dtype, [&]<class X>(Type<X>) {
    with_low(q_dtype, [&]<class Q>(Type<Q>) {
      for (int64_t c = 0; c < cols; c += kTile) {
        uint32_t largest[kTile] = {}, most = 0;
        int64_t n = cols - c < kTile ? cols - c : kTile;
        auto cast = [&](auto* tile) {
          tile(static_cast<const X*>(x) + c, scale, static_cast<Q*>(q) + c,
               static_cast<Q*>(q_t) + c * ld_t, rows, n, ld, ld_t, stream, largest);
        };
        bool full = n == kTile && rows == kTile;
        cast(full ? quantize_tile<true, true, X, Q> : quantize_tile<false, true, X, Q>);
        for (uint32_t u : largest) most = u > most ? u : most;
        if (is_nonfinite_bits(most) || is_nonfinite(scale)) cast(quantize_tile<false, false, X, Q>);
        result = most > result ? most : result;
      }
    });
  });
  if (stream) end_stream();
  return result;
}

// The hardware does not prefetch rows that are far apart, so a row is prefetched a few rows early
// (4M fp32 elements, scales per row, with the transpose, one thread, streaming stores: 8.7 ms
// without, 3.3 ms with).
template <int is_write = 0, class X>
inline void prefetch_row(const X* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / sizeof(X)) __builtin_prefetch(row + i, is_write);
}

constexpr int64_t kAhead = 8;  // rows

template <bool full, class X>
void amax_columns(const X* x, int64_t rows, int64_t cols, int64_t ld, uint32_t* largest) {
  if (full) cols = kWide;
  uint32_t* __restrict most = largest;
  for (int64_t r = 0; r < rows; ++r) {
    const X* __restrict in = x + r * ld;
    if (r + kAhead < rows) prefetch_row(in + kAhead * ld, cols);
    for (int64_t c = 0; c < cols; ++c) {
      uint32_t u = float_bits(decode(in[c])) & 0x7FFFFFFFu;
      most[c] = u > most[c] ? u : most[c];
    }
  }
}

void amax_columns(Dtype x_dtype, const void* x, int64_t rows, int64_t cols, int64_t ld,
                  uint32_t* largest) {
  with_float(x_dtype, [&]<class X>(Type<X>) {
    auto loop = cols == kWide ? amax_columns<true, X> : amax_columns<false, X>;
    loop(static_cast<const X*>(x), rows, cols, ld, largest);
  });
}

template <bool full, bool known_finite, class X, class Q>
void quantize_columns(const X* x, const float* __restrict scale, Q* q_t, int64_t rows, int64_t cols,
                      int64_t ld, int64_t ld_t, bool stream) {
  if (full) rows = kTile, cols = kWide;
  alignas(64) Q tile[kTile * kWide], turned[kWide * kTile];
  for (int64_t r = 0; r < rows; ++r) {
    const X* __restrict in = x + r * ld;
    Q* __restrict out = tile + r * kWide;
    if (r + kAhead < rows) prefetch_row(in + kAhead * ld, cols);
    for (int64_t c = 0; c < cols; ++c) {
      out[c] = Convert<Q>::template encode<known_finite>(decode(in[c]), scale[c]);
    }
  }
  transpose_tile(tile, kWide, turned, kTile, rows, cols);
  for (int64_t c = 0; c < cols; ++c) {
    store_line(q_t + c * ld_t, turned + c * kTile, static_cast<uint64_t>(rows) * sizeof(Q), stream);
  }
  if (stream) end_stream();
}

void quantize_columns(Dtype x_dtype, Dtype q_dtype, const void* x, const float* scale, void* q_t,
                      int64_t rows, int64_t cols, int64_t ld, int64_t ld_t, bool known_finite) {
  with_float(x_dtype, [&]<class X>(Type<X>) {
    with_low(q_dtype, [&]<class Q>(Type<Q>) {
      bool full = rows == kTile && cols == kWide, stream = ld * ld_t >= kStreamed;
      auto loop = !known_finite ? quantize_columns<false, false, X, Q>
                  : full        ? quantize_columns<true, true, X, Q>
                                : quantize_columns<false, true, X, Q>;
      loop(static_cast<const X*>(x), scale, static_cast<Q*>(q_t), rows, cols, ld, ld_t, stream);
    });
  });
}

void dequantize(Dtype q_dtype, Dtype out_dtype, const void* q, float scale_inv, void* out,
                int64_t n) {
  with_low(q_dtype, [&]<class Q>(Type<Q>) {
    with_float(out_dtype, [&]<class O>(Type<O>) {
      const Q* __restrict in = static_cast<const Q*>(q);
      O* __restrict result = static_cast<O*>(out);
      for (int64_t i = 0; i < n; ++i) {
        result[i] = Convert<O>::encode(decode(in[i]) * scale_inv);
      }
    });
  });
}
