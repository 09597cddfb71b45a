// Packing for gemm in words of one fp32, and transpositions. Included once per instruction set,
// which defines Vec (a vector of floats) and LaneIndices.

template <class T>
uint32_t word(T x) {
  return float_bits(decode(x));
}

// 8 words of fp32; decode_f16c.h has it for the other formats.
template <class T>
inline void decode_8(const T* __restrict x, uint32_t* __restrict out) {
  for (int i = 0; i < 8; ++i) out[i] = word(x[i]);
}

// A panel whose rows are adjacent in memory (stride_i = 1): copy while decoding.
template <int width, class T>
void pack_adjacent(const T* src, int64_t stride_k, int64_t words, uint32_t* __restrict out) {
  int64_t w = 0;
  if constexpr (width > 4) {
    // Words beyond the panel come from this row or the next one, which overwrites them.
    constexpr int whole = (width + 7) / 8 * 8;
    static_assert(whole <= 2 * width);
    for (; w + 1 < words && stride_k + width >= whole; ++w, out += width) {
#pragma GCC unroll 4
      for (int i = 0; i < whole; i += 8) decode_8(src + w * stride_k + i, out + i);
    }
  }
  for (; w < words; ++w, out += width) {
    const T* __restrict row = src + w * stride_k;
    for (int i = 0; i < width; ++i) out[i] = word(row[i]);
  }
}

constexpr int kWords = sizeof(Vec) / sizeof(uint32_t);
typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));

// Steps of a transposition, which the processors have as one instruction each. Words or pairs of
// words of a and b in turn, from the low or the high half of each group of four; even or odd
// groups.
enum class Step { low_words, high_words, low_pairs, high_pairs, even_groups, odd_groups };

constexpr int source(Step step, int lane) {
  int group = lane / 4 * 4, place = lane % 4, half = kWords / 2;
  switch (step) {
    case Step::low_words:
    case Step::high_words:
      return group + place / 2 + 2 * (step == Step::high_words) + place % 2 * kWords;
    case Step::low_pairs:
    case Step::high_pairs:
      return group + place % 2 + 2 * (step == Step::high_pairs) + place / 2 * kWords;
    default:
      return group % half * 2 + 4 * (step == Step::odd_groups) + place + lane / half * kWords;
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
inline void transpose_words(Words (&x)[kWords]) {
#pragma GCC unroll 8
  for (int i = 0; i < kWords; i += 2) pick_both<Step::low_words, Step::high_words>(x[i], x[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < kWords; i += 4) {
    pick_both<Step::low_pairs, Step::high_pairs>(x[i], x[i + 2]);
    pick_both<Step::low_pairs, Step::high_pairs>(x[i + 1], x[i + 3]);
    Words third = x[i + 1];  // of the words of the four: they come in the order 0, 2, 1, 3
    x[i + 1] = x[i + 2], x[i + 2] = third;
  }
  // Group l of x[4 * g + c] holds the words 4 * l + c of the vectors 4 * g to 4 * g + 3.
  if constexpr (kWords == 8) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) pick_both<Step::even_groups, Step::odd_groups>(x[c], x[4 + c]);
  } else if constexpr (kWords == 16) {
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
  constexpr int whole = kWords - (kWords - 1) / rows;  // the others reach beyond the block
  Words x[kWords] = {};
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) __builtin_memcpy(&x[i], in + i * ld_in, sizeof x[i]);
  transpose_words(x);
#pragma GCC unroll 16
  for (int j = 0; j < kWords; ++j) {
    __builtin_memcpy(out + j * ld_out, &x[j], j < whole ? sizeof x[j] : rows * sizeof(uint32_t));
  }
}

// A panel that is contiguous along K (stride_k = 1): decode 16 words of each row, then transpose
// the block, which fits in the L1 cache.
template <int width, class T>
void pack_transposed(const T* src, int64_t stride_i, int64_t words, uint32_t* __restrict out) {
  constexpr int block = 16, side = width < kWords ? width : kWords;
  static_assert(width % side == 0 && block % kWords == 0);
  uint32_t tile[width][block];
  for (int64_t w = 0; w < words; w += block, out += block * width) {
    for (int i = 0; i < width; ++i) {
      for (int j = 0; j < block; j += 8) decode_8(src + i * stride_i + w + j, tile[i] + j);
    }
    for (int j = 0; j < block; j += kWords) {
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
      out[i] = word(i < rows ? src[i * stride_i + at * stride_k] : T{});
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
  with_low(dtype, [&](auto t) {
    const auto* x = static_cast<const typename decltype(t)::type*>(src);
    for (int64_t first = 0; first < k; first += step) {
      for (int64_t row = 0; row < rows; row += width) {
        pack_panel<width>(x + row * stride_i + first * stride_k, stride_i, stride_k, rows - row,
                          k - first < step ? k - first : step, out + row * words + first * width);
      }
    }
  });
  return false;
}
