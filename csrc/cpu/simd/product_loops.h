// Loops of products whose words hold kPair numbers: the micro-kernel of gemm, and attention, with
// its softmax of words of one fp32 number. Included once per instruction set and kind of word,
// after definitions of Vec, kPair, multiply_add(acc, word of a, words of b) and
// store_numbers(words, vectors, how many).

constexpr int kRows = kAttentionRows, kVecs = 2;  // of attention's micro-kernel

// acc += words of `mr` rows of a times words of nv vectors of b, ldb apart. The rows of a word of a
// are adjacent, words lda apart; or the other way round.
template <bool adjacent, bool prefetches, int mr, int nv>
__attribute__((always_inline)) inline void add_words(Vec (&acc)[mr][nv], int64_t words,
                                                     const uint32_t* a, int64_t lda,
                                                     const uint32_t* b, int64_t ldb) {
  for (int64_t w = 0; w < words; ++w, a += adjacent ? lda : 1, b += ldb) {
    if constexpr (prefetches) prefetch<mr, nv>(a, b);
    Vec row[nv];
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) row[j] = load(reinterpret_cast<const float*>(b) + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < mr; ++i) {
      Vec x = broadcast(bits_float(a[adjacent ? i : i * lda]));
#pragma GCC unroll 4
      for (int j = 0; j < nv; ++j) acc[i][j] = multiply_add(acc[i][j], x, row[j]);
    }
  }
}

// c = or += a panel of a times one of b.
template <int mr, int nv>
void panel_micro(int64_t words, const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
                 bool accumulate) {
  Vec acc[mr][nv];
#pragma GCC unroll 16
  for (int i = 0; i < mr; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) {
      acc[i][j] = accumulate ? load(c + i * ldc + j * kLanes) : Vec{};
    }
  }
  add_words<true, true>(acc, words, a, mr, b, nv * kLanes);
#pragma GCC unroll 16
  for (int i = 0; i < mr; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) store(c + i * ldc + j * kLanes, acc[i][j]);
  }
}

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
void tile_micro(const TileProduct& p, int64_t row, int64_t col, int64_t first, int64_t last) {
  Vec acc[kRows][vecs] = {};
  float* c = p.c + row * p.ldc + col;
  for (int i = 0; p.chained && i < kRows; ++i) {
    for (int j = 0; j < vecs; ++j) acc[i][j] = load(c + i * p.ldc + j * kLanes);
  }
  const uint32_t* a = transposed ? p.a + first * p.lda + row : p.a + row * p.lda + first;
  add_words<transposed, false>(acc, last - first, a, p.lda, p.b + first * p.ldb + col, p.ldb);
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
        tile_micro<transposed, kVecs>(p, row, col, first, last);
      } else {
        tile_micro<transposed, 1>(p, row, col, first, last);
      }
    }
  }
}

void product(const TileProduct& p) { p.transposed ? product_of<true>(p) : product_of<false>(p); }

void mask_scores(Dtype dtype, const void* mask, int64_t stride, float least, const uint8_t* lowest,
                 const TileShape& tile, float* scores) {
  constexpr float hidden = -__builtin_inff();
  auto row_of = [&]<class T>(Type<T>, int64_t r, const auto& masked) {
    const T* __restrict x = static_cast<const T*>(mask) + r * stride;
    float* __restrict row = scores + r * kTileLd;
    for (int64_t i = 0; i < tile.keys; ++i) row[i] = masked(row[i], x[i]);
  };
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (dtype == Dtype::u8) {
      row_of(Type<uint8_t>{}, r, [](float score, uint8_t sees) { return sees ? score : hidden; });
      continue;
    }
    with_float(dtype, [&]<class T>(Type<T> type) {
      if (lowest != nullptr && lowest[r]) {
        return row_of(type, r, [](float, T x) { return decode(x) == hidden ? hidden : 0.0f; });
      }
      row_of(type, r, [least](float score, T x) {
        const float added = score + decode(x);
        return decode(x) <= least ? hidden : added;
      });
    });
  }
}

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
constexpr int64_t kHeadRowsAhead = 4;

void zero_words(uint32_t* out, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) out[i] = 0;
}

void pack(Dtype dtype, const void* src, int64_t stride, int64_t rows, int64_t d, uint32_t* out,
          int64_t ld, int64_t padded) {
  int64_t full = d / kPair, width = ((d + kPair - 1) / kPair + 15) / 16 * 16;
  with_operand(dtype, [&]<class T>(Type<T>) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* __restrict x = static_cast<const T*>(src) + r * stride;
      prefetch_row(x + kHeadRowsAhead * stride, d);
      uint32_t* __restrict words = out + r * ld;
      if constexpr (kPair == 2) {
        __builtin_memcpy(words, x, full * sizeof *words);
      } else {
        for (int64_t i = 0; i < d; ++i) words[i] = float_bits(decode(x[i]));
      }
      if (d % kPair != 0) words[full] = word_of(x[d - 1], T{});
      zero_words(words, (d + kPair - 1) / kPair, width);
    }
  });
  for (int64_t r = rows; r < padded; ++r) zero_words(out + r * ld, 0, width);
}

void pack_by_rows(Dtype dtype, const void* src, int64_t stride, int64_t rows, int64_t d,
                  uint32_t* out, int64_t ld, int64_t padded) {
  int64_t full = rows / kPair, width = (d + 15) / 16 * 16;
  with_operand(dtype, [&]<class T>(Type<T>) {
    for (int64_t w = 0; w < (rows + kPair - 1) / kPair; ++w) {
      const T* __restrict x = static_cast<const T*>(src) + w * kPair * stride;
      prefetch_row(x + kHeadRowsAhead * stride, d);
      uint32_t* __restrict words = out + w * ld;
      if (w < full) {
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
  for (int64_t w = 0; w < words; w += kLanes) {  // `in` is padded to a multiple of 16 words
    for (int64_t r = 0; r < kTileSide; r += kLanes) {
      transpose_block<kLanes>(in + r * ld + w, ld, out + w * kTileLd + r, kTileLd);
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

// x <- e^x: exp_fp32 with fused multiply-adds, and 0 where the result is subnormal. Several vectors
// side by side, because each is a long chain of operations.
template <int count>
inline void exponentials(Vec (&x)[count]) {
  using E = ExpTerms;
  const Vec least = broadcast(-87.0f), most = broadcast(89.0f),
            to_integer = broadcast(E::to_integer);
  Vec t[count], n[count], q[count];
  Ints power[count];
  auto each = [](const auto& f) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) f(i);
  };
  each([&](int i) { t[i] = most < x[i] ? most : x[i]; });  // NaN compares false
  each([&](int i) { t[i] = least > t[i] ? least : t[i]; });
  each([&](int i) { n[i] = fma(t[i], broadcast(E::log2_e), to_integer); });
  each([&](int i) { power[i] = ((Ints)n[i] + 127) << 23; });  // of the integer in the low bits
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
  with_float(dtype, [&]<class T>(Type<T>) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* __restrict from = x + r * ld;
      T* __restrict to = static_cast<T*>(out) + r * stride;
      prefetch_row<1>(to + kHeadRowsAhead * stride, d);
      const float by = factor == nullptr ? 1.0f : factor[r];
      scale_row(from, by, to, d);
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
    shift[r] = largest_of(row, padded, maximum[r]);
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

constexpr int kSide = 32 / kLanes < 4 ? 32 / kLanes : 4;  // vectors at a time

// kPair rows at a time, kSide vectors of each.
void softmax(const TileShape& tile, float* scores, float* maximum, float* sum, float* factor,
             uint32_t* weights) {
  float shift[kTileSide + 1];
  shift[tile.rows] = 0.0f;
  subtrahends(tile, scores, maximum, factor, shift);
  for (int64_t r = 0; r < tile.rows; r += kPair) {
    // Of all of these rows: where the second sees one more, the first sees an odd number.
    int64_t padded = (tile.seen(r) + 31) / 32 * 32;
    Vec totals[kPair] = {};
    for (int64_t i = 0; i < padded; i += kSide * kLanes) {
      Vec x[kPair * kSide];
#pragma GCC unroll 4
      for (int j = 0; j < kPair * kSide; ++j) {
        int64_t row = r + j / kSide;
        x[j] = load(scores + row * kTileLd + i + j % kSide * kLanes) - broadcast(shift[row]);
      }
      exponentials(x);
#pragma GCC unroll 4
      for (int j = 0; j < kPair * kSide; ++j) totals[j / kSide] = totals[j / kSide] + x[j];
#pragma GCC unroll 2
      for (int j = 0; j < kPair; ++j) {
        store_numbers(weights + (r + j) * kTileLd + i / kPair, x + j * kSide, kSide);
      }
    }
    for (int64_t j = 0; j < kPair; ++j) {
      zero_words(weights + (r + j) * kTileLd, padded / kPair, kTileSide / kPair);
      if (r + j < tile.rows) sum[r + j] = sum[r + j] * factor[r + j] + total_of(totals[j]);
    }
  }
}

// For words of one number.
inline void softmax_backward(const TileShape& tile, float* scores, float* weight_grads,
                             const float* logsumexp, const float* shared, float scale, float*,
                             uint32_t*, uint32_t*, uint32_t*) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float *weight = scores + r * kTileLd, *grad = weight_grads + r * kTileLd;
    int64_t seen = tile.seen(r);
    const Vec lse = broadcast(logsumexp[r]), shared_row = broadcast(shared[r]),
              by = broadcast(scale);
    for (int64_t i = 0; i < seen; i += kSide * kLanes) {
      Vec x[kSide];
#pragma GCC unroll 4
      for (int j = 0; j < kSide; ++j) x[j] = load(weight + i + j * kLanes) - lse;
      exponentials(x);
#pragma GCC unroll 4
      for (int j = 0; j < kSide; ++j) {
        int64_t at = i + j * kLanes;
        store(weight + at, x[j]);
        store(grad + at, x[j] * (load(grad + at) - shared_row) * by);
      }
    }
    for (int64_t i = seen; i < kTileSide; ++i) weight[i] = grad[i] = 0.0f;
  }
}
