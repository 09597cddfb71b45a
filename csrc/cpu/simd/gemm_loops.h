// Loops of gemm: packing in words of one fp32, transpositions, and the store of a tile. Included
// once per instruction set, which defines LaneIndices, decode_8 and the tile MR x NV.

// A panel whose rows are adjacent in memory (stride_i = 1): copy while decoding.
template <int width, class T>
void pack_adjacent(const T* src, int64_t stride_k, int64_t words, uint32_t* __restrict out) {
  int64_t w = 0;
  if constexpr (width > 4) {
    // Words beyond the panel come from this row or the next one, which overwrites them.
    constexpr int padded = (width + 7) / 8 * 8;
    static_assert(padded <= 2 * width);
    for (; w + 1 < words && stride_k + width >= padded; ++w, out += width) {
#pragma GCC unroll 4
      for (int i = 0; i < padded; i += 8) decode_8(src + w * stride_k + i, out + i);
    }
  }
  for (; w < words; ++w, out += width) {
    const T* __restrict row = src + w * stride_k;
    for (int i = 0; i < width; ++i) out[i] = float_bits(decode(row[i]));
  }
}

// Steps of a transposition, which the processors have as one instruction each. Words or pairs of
// words of a and b in turn, from the low or the high half of each group of four; even or odd
// groups.
enum class Step { low_words, high_words, low_pairs, high_pairs, even_groups, odd_groups };

constexpr int source(Step step, int lane) {
  int group = lane / 4 * 4, place = lane % 4, half = kLanes / 2;
  switch (step) {
    case Step::low_words:
    case Step::high_words:
      return group + place / 2 + 2 * (step == Step::high_words) + place % 2 * kLanes;
    case Step::low_pairs:
    case Step::high_pairs:
      return group + place % 2 + 2 * (step == Step::high_pairs) + place / 2 * kLanes;
    default:
      return group % half * 2 + 4 * (step == Step::odd_groups) + place + lane / half * kLanes;
  }
}

template <Step step, int... lane>
inline Words pick(Words a, Words b, Indices<lane...>) {
  constexpr Words index = {static_cast<uint32_t>(source(step, lane))...};
  return __builtin_shuffle(a, b, index);
}

// x, y <- their words as `low` and as `high` takes them
template <Step low, Step high>
inline void pick_both(Words& x, Words& y) {
  Words first = pick<low>(x, y, LaneIndices{});
  y = pick<high>(x, y, LaneIndices{});
  x = first;
}

// x[j] <- the words j of all vectors
inline void transpose_words(Words (&x)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) pick_both<Step::low_words, Step::high_words>(x[i], x[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    pick_both<Step::low_pairs, Step::high_pairs>(x[i], x[i + 2]);
    pick_both<Step::low_pairs, Step::high_pairs>(x[i + 1], x[i + 3]);
    Words third = x[i + 1];  // of the words of the four: they come in the order 0, 2, 1, 3
    x[i + 1] = x[i + 2], x[i + 2] = third;
  }
  // Group l of x[4 * g + c] holds the words 4 * l + c of the vectors 4 * g to 4 * g + 3.
  if constexpr (kLanes == 8) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) pick_both<Step::even_groups, Step::odd_groups>(x[c], x[4 + c]);
  } else if constexpr (kLanes == 16) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      pick_both<Step::even_groups, Step::odd_groups>(x[c], x[4 + c]);
      pick_both<Step::even_groups, Step::odd_groups>(x[8 + c], x[12 + c]);
      pick_both<Step::even_groups, Step::odd_groups>(x[c], x[8 + c]);
      pick_both<Step::even_groups, Step::odd_groups>(x[4 + c], x[12 + c]);
    }
  }
}

// out[j * ld_out + i] = in[i * ld_in + j] for `rows` rows of a vector of words. A row of out is
// stored as a whole vector, whose surplus the next rows overwrite, but for the last rows.
template <int rows>
inline void transpose_block(const uint32_t* in, int64_t ld_in, uint32_t* out, int64_t ld_out) {
  constexpr int inside = kLanes - (kLanes - 1) / rows;  // the others reach beyond the block
  Words x[kLanes] = {};
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) __builtin_memcpy(&x[i], in + i * ld_in, sizeof x[i]);
  transpose_words(x);
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) {
    __builtin_memcpy(out + j * ld_out, &x[j], j < inside ? sizeof x[j] : rows * sizeof(uint32_t));
  }
}

// A panel that is contiguous along K (stride_k = 1): decode 16 words of each row, then transpose
// the block, which fits in the L1 cache.
template <int width, class T>
void pack_transposed(const T* src, int64_t stride_i, int64_t words, uint32_t* __restrict out) {
  constexpr int block = 16, side = width < kLanes ? width : kLanes;
  static_assert(width % side == 0 && block % kLanes == 0);
  uint32_t tile[width][block];
  for (int64_t w = 0; w < words; w += block, out += block * width) {
    for (int i = 0; i < width; ++i) {
      for (int j = 0; j < block; j += 8) decode_8(src + i * stride_i + w + j, tile[i] + j);
    }
    for (int j = 0; j < block; j += kLanes) {
      for (int i = 0; i < width; i += side) {
        transpose_block<side>(&tile[i][j], block, out + j * width + i, width);
      }
    }
  }
}

// Any strides and any remainder; zeros outside.
template <int width, class T>
void pack_general(const T* src, int64_t stride_i, int64_t stride_k, int64_t rows, int64_t k,
                  uint32_t* __restrict out) {
  for (int64_t at = 0; at < k; ++at, out += width) {
    for (int64_t i = 0; i < width; ++i) {
      out[i] = float_bits(decode(i < rows ? src[i * stride_i + at * stride_k] : T{}));
    }
  }
}

template <int width, class T>
void pack_panel(const T* src, int64_t stride_i, int64_t stride_k, int64_t rows, int64_t k,
                uint32_t* out) {
  int64_t done = 0;  // of k
  if (rows >= width && stride_i == 1) {
    done = k;
    pack_adjacent<width>(src, stride_k, done, out);
  } else if (rows >= width && stride_k == 1) {
    done = k / 16 * 16;
    pack_transposed<width>(src, stride_i, done, out);
  }
  pack_general<width>(src + done * stride_k, stride_i, stride_k, rows, k - done,
                      out + done * width);
}

template <int width>
bool pack(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows, int64_t k,
          uint32_t* out, int64_t words, int64_t /*width*/) {
  // Where panels are narrow pieces of the same rows of memory, they are packed while these are in
  // the cache.
  const int64_t step = stride_i == 1 && k > 64 ? 64 : k;
  auto pack_all = [&]<class T>(Type<T>) {
    const T* x = static_cast<const T*>(src);
    for (int64_t first = 0; first < k; first += step) {
      for (int64_t row = 0; row < rows; row += width) {
        pack_panel<width>(x + row * stride_i + first * stride_k, stride_i, stride_k, rows - row,
                          k - first < step ? k - first : step, out + row * words + first * width);
      }
    }
  };
  dtype == Dtype::f32 ? pack_all(Type<float>{}) : with_low(dtype, pack_all);
  return false;
}

static_assert(MR <= kMaxRows && NR <= kMaxCols);

constexpr int kWordsAhead = 32;  // words of K, the time in which data comes from the L3 cache

template <int mr, int nv>
inline void prefetch(const uint32_t* a, const uint32_t* b) {
  constexpr int per_line = 16, width = nv * sizeof(Vec) / sizeof(uint32_t);
  __builtin_prefetch(a + kWordsAhead * mr);
#pragma GCC unroll 4
  for (int i = 0; i < width; i += per_line) __builtin_prefetch(b + kWordsAhead * width + i);
}

// The epilogue of n sums. Where n is 16, GCC would unroll the loops before it could vectorise them.
template <class T>
inline void store_sums(const float* __restrict sum, float a_scale_inv,
                       const float* __restrict b_scale_inv, const float* __restrict bias,
                       T* __restrict out, int64_t n) {
  if (bias != nullptr) {
#pragma GCC unroll 1
    for (int64_t j = 0; j < n; ++j) {
      out[j] = Convert<T>::encode(sum[j] * a_scale_inv * b_scale_inv[j] + bias[j]);
    }
  } else {
#pragma GCC unroll 1
    for (int64_t j = 0; j < n; ++j) {
      out[j] = Convert<T>::encode(sum[j] * a_scale_inv * b_scale_inv[j]);
    }
  }
}

// out = x * by; for bf16 on some processors also in gemm_bf16_loops.h.
template <class T>
inline void scale_row(const float* __restrict x, float by, T* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = Convert<T>::encode(x[i] * by);
}

void store_tile(Dtype out_dtype, const SumTile& sums, const Epilogue& e, void* out, int64_t ld) {
  with_float(out_dtype, [&]<class T>(Type<T>) {
    T* to = static_cast<T*>(out);
    const float* sum = sums.data;
    for (int64_t i = 0; i < sums.rows; ++i, sum += sums.ld, to += ld) {
      if (sums.cols == NR) {
        store_sums(sum, e.a_scale_inv[i], e.b_scale_inv, e.bias, to, NR);
      } else {
        store_sums(sum, e.a_scale_inv[i], e.b_scale_inv, e.bias, to, sums.cols);
      }
    }
  });
}

void accumulate_tile(const SumTile& sums, const Epilogue& e, float* out, int64_t stride_i,
                     int64_t stride_j) {
  const float* __restrict b_scale_inv = e.b_scale_inv;
  for (int64_t i = 0; i < sums.rows; ++i) {
    const float* __restrict sum = sums.data + i * sums.ld;
    float* __restrict to = out + i * stride_i;
    float a_scale_inv = e.a_scale_inv[i];
    if (stride_j == 1) {
      for (int64_t j = 0; j < sums.cols; ++j) to[j] += sum[j] * a_scale_inv * b_scale_inv[j];
    } else {
      for (int64_t j = 0; j < sums.cols; ++j) {
        to[j * stride_j] += sum[j] * a_scale_inv * b_scale_inv[j];
      }
    }
  }
}
