// Loops of attention. Included once per instruction set and kind of word, after definitions of Vec,
// kPair (numbers in a word), kRows x (kVecs vectors) (the micro-kernel's tile of c) and
// multiply_add(acc, word of a, words of b); before attention_softmax_f32.h or _bf16.h.

constexpr int kLanes = sizeof(Vec) / sizeof(float);

// c = acc * alpha, or c * factor[row] + acc * alpha.
template <bool adds, int vecs>
inline void finish(const Vec (&acc)[kRows][vecs], float alpha, const float* factor, float* c,
                   int64_t ldc) {
  const Vec by = broadcast(alpha);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i, c += ldc) {
#pragma GCC unroll 4
    for (int j = 0; j < vecs; ++j) {
      Vec sum = acc[i][j] * by;
      if constexpr (adds) sum = load(c + j * kLanes) * broadcast(factor[i]) + sum;
      store(c + j * kLanes, sum);
    }
  }
}

template <bool transposed, int vecs>
void micro(const TileProduct& p, int64_t row, int64_t col, int64_t first, int64_t last) {
  Vec acc[kRows][vecs] = {};
  const int64_t lda = p.lda, ldb = p.ldb;
  const uint32_t* a = transposed ? p.a + first * lda + row : p.a + row * lda + first;
  const uint32_t* b = p.b + first * ldb + col;
  for (int64_t w = first; w < last; ++w, a += transposed ? lda : 1, b += ldb) {
    Vec words[vecs];
#pragma GCC unroll 4
    for (int j = 0; j < vecs; ++j) words[j] = load(reinterpret_cast<const float*>(b) + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      Vec x = broadcast(bits_float(a[transposed ? i : i * lda]));
#pragma GCC unroll 4
      for (int j = 0; j < vecs; ++j) acc[i][j] = multiply_add(acc[i][j], x, words[j]);
    }
  }
  float* c = p.c + row * p.ldc + col;
  if (p.factor == nullptr) {
    finish<false>(acc, p.alpha, nullptr, c, p.ldc);
  } else {
    finish<true>(acc, p.alpha, p.factor + row, c, p.ldc);
  }
}

template <bool transposed>
void product_of(const TileProduct& p) {
  for (int64_t col = 0; col < p.cols; col += kVecs * kLanes) {
    for (int64_t row = 0; row < p.rows; row += kRows) {
      int64_t first = 0, last = p.words, end = row + kRows + p.shift;
      if (p.seen == Seen::columns && col >= end) continue;
      if (p.seen == Seen::until && (end + kPair - 1) / kPair < last) {
        last = (end + kPair - 1) / kPair;
      }
      if (p.seen == Seen::from && row > p.shift) first = (row - p.shift) / kPair;
      if (p.cols - col > kLanes) {
        micro<transposed, kVecs>(p, row, col, first, last);
      } else {
        micro<transposed, 1>(p, row, col, first, last);
      }
    }
  }
}

void product(const TileProduct& p) { p.transposed ? product_of<true>(p) : product_of<false>(p); }

template <class T>
inline uint32_t word_of(T low, T high) {
  if constexpr (kPair == 1) {
    return float_bits(decode(low));
  } else {
    return low.bits | static_cast<uint32_t>(high.bits) << 16;
  }
}

// f(Type of the operands): words of two hold bf16 numbers.
template <class F>
inline void with_operand(Dtype dtype, F&& f) {
  if constexpr (kPair == 2) {
    f(Type<Bf16>{});
  } else {
    with_float(dtype, f);
  }
}

// Rows of a head lie apart in memory, too short for the processor to foresee the next one.
template <int is_write, class T>
inline void prefetch_row(const T* row, int64_t d) {
  for (int64_t i = 0; i < d; i += 64 / sizeof(T)) __builtin_prefetch(row + i, is_write);
}

constexpr int64_t kHeadRowsAhead = 4;

void zero_words(uint32_t* out, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) out[i] = 0;
}

void pack(Dtype dtype, const void* src, int64_t stride, int64_t rows, int64_t d, uint32_t* out,
          int64_t ld, int64_t padded) {
  int64_t whole = d / kPair, width = ((d + kPair - 1) / kPair + 15) / 16 * 16;
  with_operand(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for (int64_t r = 0; r < rows; ++r) {
      const T* __restrict x = static_cast<const T*>(src) + r * stride;
      prefetch_row<0>(x + kHeadRowsAhead * stride, d);
      uint32_t* __restrict words = out + r * ld;
      if constexpr (kPair == 2) {
        __builtin_memcpy(words, x, whole * sizeof *words);
      } else {
        for (int64_t i = 0; i < d; ++i) words[i] = float_bits(decode(x[i]));
      }
      if (d % kPair != 0) words[whole] = word_of(x[d - 1], T{});
      zero_words(words, (d + kPair - 1) / kPair, width);
    }
  });
  for (int64_t r = rows; r < padded; ++r) zero_words(out + r * ld, 0, width);
}

void pack_by_rows(Dtype dtype, const void* src, int64_t stride, int64_t rows, int64_t d,
                  uint32_t* out, int64_t ld, int64_t padded) {
  int64_t whole = rows / kPair, width = (d + 15) / 16 * 16;
  with_operand(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for (int64_t w = 0; w < (rows + kPair - 1) / kPair; ++w) {
      const T* __restrict x = static_cast<const T*>(src) + w * kPair * stride;
      prefetch_row<0>(x + kHeadRowsAhead * stride, d);
      uint32_t* __restrict words = out + w * ld;
      if (w < whole) {
        for (int64_t i = 0; i < d; ++i) words[i] = word_of(x[i], x[i + (kPair - 1) * stride]);
      } else {
        for (int64_t i = 0; i < d; ++i) words[i] = word_of(x[i], T{});
      }
      zero_words(words, d, width);
    }
  });
  for (int64_t w = (rows + kPair - 1) / kPair; w < padded / kPair; ++w) {
    zero_words(out + w * ld, 0, width);
  }
}

void transpose(const uint32_t* in, int64_t ld, int64_t words, uint32_t* out) {
  for (int64_t w = 0; w < words; w += kWords) {  // `in` is padded to a multiple of 16 words
    for (int64_t r = 0; r < kTileSide; r += kWords) {
      transpose_block<kWords>(in + r * ld + w, ld, out + w * kTileLd + r, kTileLd);
    }
  }
}

template <class F>
inline float reduce(Vec v, const F& f) {
  float lanes[kLanes];
  store(lanes, v);
#pragma GCC unroll 4
  for (int n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) lanes[i] = f(lanes[i], lanes[i + n]);
  }
  return lanes[0];
}

// The larger of two; not a NaN, which the weights will hold.
inline float largest(const float* x, int64_t n, float least) {  // n: a multiple of 16
  Vec best = broadcast(least);
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec v = load(x + i);
    best = v > best ? v : best;
  }
  return reduce(best, [](float a, float b) { return a > b ? a : b; });
}

typedef int32_t Whole __attribute__((vector_size(sizeof(Vec))));

// x <- e^x: exp_fp32 with fused multiply-adds, and 0 where the result is subnormal. Several vectors
// side by side, because each is a long chain of operations.
template <int count>
inline void exponentials(Vec (&x)[count]) {
  using E = ExpTerms;
  const Vec least = broadcast(-87.0f), most = broadcast(89.0f),
            to_integer = broadcast(E::to_integer);
  Vec t[count], n[count], q[count];
  Whole power[count];
  auto each = [](const auto& f) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) f(i);
  };
  each([&](int i) { t[i] = most < x[i] ? most : x[i]; });  // NaN compares false
  each([&](int i) { t[i] = least > t[i] ? least : t[i]; });
  each([&](int i) { n[i] = fma(t[i], broadcast(E::log2_e), to_integer); });
  each([&](int i) { power[i] = ((Whole)n[i] + 127) << 23; });  // of the integer in the low bits
  each([&](int i) { n[i] = n[i] - to_integer; });
  each([&](int i) { t[i] = fma(n[i], broadcast(-E::ln2_high), t[i]); });
  each([&](int i) { t[i] = fma(n[i], broadcast(-E::ln2_low), t[i]); });
  each([&](int i) { q[i] = fma(broadcast(E::q4), t[i], broadcast(E::q3)); });
  each([&](int i) { q[i] = fma(q[i], t[i], broadcast(E::q2)); });
  each([&](int i) { q[i] = fma(q[i], t[i], broadcast(E::q1)); });
  each([&](int i) { q[i] = fma(q[i], t[i], broadcast(E::q0)); });
  each([&](int i) { q[i] = fma(q[i], t[i] * t[i], t[i]) + broadcast(1.0f); });
  each([&](int i) { q[i] = q[i] * (Vec)power[i]; });
  each([&](int i) { x[i] = x[i] < least ? Vec{} : q[i]; });
}

// In the order of `product`, so that what is equal there is equal here.
void row_dots(const uint32_t* x, const uint32_t* y, int64_t words, float* out) {
  for (int64_t row = 0; row < kTileSide; row += kLanes) {
    Vec acc = {};
    for (int64_t w = 0; w < words; ++w) {
      int64_t at = w * kTileLd + row;
      acc = multiply_add(acc, load(reinterpret_cast<const float*>(x) + at),
                         load(reinterpret_cast<const float*>(y) + at));
    }
    store(out + row, load(out + row) + acc);
  }
}

template <class T>
inline void store_remainder(const float* __restrict x, float factor, const T* __restrict rounded,
                            Bf16* __restrict remainder, int64_t d) {
  for (int64_t i = 0; i < d; ++i) {
    remainder[i] = Convert<Bf16>::encode(x[i] * factor - decode(rounded[i]));
  }
}

void store_rows(Dtype dtype, const float* x, int64_t ld, const float* factor, int64_t rows,
                int64_t d, void* out, int64_t stride, Bf16* remainder) {
  with_float(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for (int64_t r = 0; r < rows; ++r) {
      const float* __restrict from = x + r * ld;
      T* __restrict to = static_cast<T*>(out) + r * stride;
      prefetch_row<1>(to + kHeadRowsAhead * stride, d);
      const float by = factor == nullptr ? 1.0f : factor[r];
      for (int64_t i = 0; i < d; ++i) to[i] = Convert<T>::encode(from[i] * by);
      if (remainder != nullptr) store_remainder(from, by, to, remainder + r * stride, d);
    }
  });
}

// What softmax subtracts from each row: its new maximum. Numbers that a row does not see become
// -inf up to a multiple of 32. One step after the other for all rows: within a row each waits for
// the one before.
inline void subtrahends(const TileShape& tile, float* scores, float* maximum, float* factor,
                        float* shift) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* row = scores + r * kTileLd;
    int64_t seen = tile.seen(r), padded = (seen + 31) / 32 * 32;
    for (int64_t i = seen; i < padded; ++i) row[i] = -__builtin_inff();
    shift[r] = largest(row, padded, maximum[r]);
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    float most = shift[r];
    // A row that has seen nothing but -inf has weights of 0 instead of NaN until it sees another.
    shift[r] = most == -__builtin_inff() ? 0.0f : most;
    factor[r] = exp_fp32(maximum[r] - shift[r]);
    maximum[r] = most;
  }
}

inline float total_of(Vec v) {
  return reduce(v, [](float a, float b) { return a + b; });
}
