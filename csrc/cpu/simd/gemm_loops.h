// Loops of gemm: packing, the store of a row, and the fp32 micro-kernel. Included once per
// instruction set, which defines Vec (a vector of floats), fma(a, b, c), and the tile MR x NV.

template <class T>
uint32_t word(T x) {  // one fp32
  return float_bits(decode(x));
}

template <class T>
uint32_t word(T low, T high) {  // a pair of bf16; exact for bf16, E4M3 and E5M2
  return (float_bits(decode(low)) >> 16) | (float_bits(decode(high)) & 0xFFFF0000u);
}

// 8 words of fp32; decode_f16c.h has it for the other formats.
template <class T>
inline void decode_8(const T* __restrict x, uint32_t* __restrict out) {
  for (int i = 0; i < 8; ++i) out[i] = word(x[i]);
}

// Whether the bf16 dot product would read x as zero because it is subnormal. (fp8 values are normal
// in bf16.)
template <int pair, class T>
uint32_t is_lost(T x) {
  if constexpr (pair == 2 && sizeof(T) == 2) return (x.bits & 0x7FFFu) - 1u < 0x7Fu;
  return 0;
}

// The packing functions return whether an element would be read as zero.
//
// A panel whose rows are adjacent in memory (stride_i = 1): copy while decoding.
template <int pair, int width, class T>
uint32_t pack_adjacent(const T* src, int64_t stride_k, int64_t words, uint32_t* __restrict out) {
  uint32_t lost = 0;
  int64_t w = 0;
  if constexpr (pair == 1 && width > 4) {
    // Words beyond the panel come from this row or the next one, which overwrites them.
    constexpr int whole = (width + 7) / 8 * 8;
    static_assert(whole <= 2 * width);
    for (; w + 1 < words && stride_k + width >= whole; ++w, out += width) {
#pragma GCC unroll 4
      for (int i = 0; i < whole; i += 8) decode_8(src + w * stride_k + i, out + i);
    }
  }
  for (; w < words; ++w, out += width) {
    const T* __restrict row = src + w * pair * stride_k;
    if constexpr (pair == 1) {
      for (int i = 0; i < width; ++i) out[i] = word(row[i]);
    } else {
      const T* __restrict next = row + stride_k;
      for (int i = 0; i < width; ++i) {
        out[i] = word(row[i], next[i]);
        lost |= is_lost<pair>(row[i]) | is_lost<pair>(next[i]);
      }
    }
  }
  return lost;
}

// The 16 words of one row of a block, decoded element by element so that the loop vectorises.
template <int pair, class T>
inline uint32_t decode_words(const T* __restrict row, uint32_t* __restrict words) {
  uint32_t lost = 0;
  if constexpr (pair == 1) {
    for (int j = 0; j < 16; j += 8) decode_8(row + j, words + j);
  } else {
    uint16_t halves[32];
    for (int j = 0; j < 32; ++j) {
      halves[j] = static_cast<uint16_t>(float_bits(decode(row[j])) >> 16);
      lost |= is_lost<pair>(row[j]);
    }
    __builtin_memcpy(words, halves, sizeof halves);
  }
  return lost;
}

constexpr int kWords = sizeof(Vec) / sizeof(uint32_t);
typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));

// The steps of a transposition: in each block of 2 * side rows and columns, the upper right quarter
// and the lower left one trade places.
template <int side, int... lane>
inline void exchange(Words (&x)[kWords], Indices<lane...>) {
  constexpr Words upper = {(lane & side ? lane - side + kWords : lane)...};
  constexpr Words lower = {(lane & side ? lane + kWords : lane + side)...};
#pragma GCC unroll 16
  for (int i = 0; i < kWords; ++i) {
    if ((i & side) != 0) continue;
    Words a = x[i], b = x[i + side];
    x[i] = __builtin_shuffle(a, b, upper);
    x[i + side] = __builtin_shuffle(a, b, lower);
  }
  if constexpr (side > 1) exchange<side / 2>(x, LaneIndices{});
}

// out[j * ld_out + i] = in[i * ld_in + j] for `rows` rows of a vector of words. A row of out is
// stored as a whole vector, whose surplus the next rows overwrite, but for the last rows.
template <int rows>
inline void transpose_block(const uint32_t* in, int64_t ld_in, uint32_t* out, int64_t ld_out) {
  constexpr int whole = kWords - (kWords - 1) / rows;  // the others reach beyond the block
  Words x[kWords] = {};
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) __builtin_memcpy(&x[i], in + i * ld_in, sizeof x[i]);
  exchange<kWords / 2>(x, LaneIndices{});
#pragma GCC unroll 16
  for (int j = 0; j < kWords; ++j) {
    __builtin_memcpy(out + j * ld_out, &x[j], j < whole ? sizeof x[j] : rows * sizeof(uint32_t));
  }
}

// A panel that is contiguous along K (stride_k = 1): decode 16 words of each row, then transpose
// the block, which fits in the L1 cache.
template <int pair, int width, class T>
uint32_t pack_transposed(const T* src, int64_t stride_i, int64_t words, uint32_t* __restrict out) {
  constexpr int block = 16, side = width < kWords ? width : kWords;
  static_assert(width % side == 0 && block % kWords == 0);
  uint32_t tile[width][block], lost = 0;
  for (int64_t w = 0; w < words; w += block, out += block * width) {
    for (int i = 0; i < width; ++i) {
      lost |= decode_words<pair>(src + i * stride_i + w * pair, tile[i]);
    }
    for (int j = 0; j < block; j += kWords) {
      for (int i = 0; i < width; i += side) {
        transpose_block<side>(&tile[i][j], block, out + j * width + i, width);
      }
    }
  }
  return lost;
}

// Any strides and any remainder; zeros outside.
template <int pair, int width, class T>
uint32_t pack_general(const T* src, int64_t stride_i, int64_t stride_k, int64_t rows, int64_t k,
                      uint32_t* __restrict out) {
  uint32_t lost = 0;
  for (int64_t first = 0; first < k; first += pair, out += width) {
    for (int64_t i = 0; i < width; ++i) {
      const T* x = src + i * stride_i + first * stride_k;
      T low{}, high{};
      if (i < rows) low = *x;
      if (i < rows && first + 1 < k && pair == 2) high = x[stride_k];
      if constexpr (pair == 1) {
        out[i] = word(low);
      } else {
        out[i] = word(low, high);
        lost |= is_lost<pair>(low) | is_lost<pair>(high);
      }
    }
  }
  return lost;
}

template <int pair, int width, class T>
uint32_t pack_panel(const T* src, int64_t stride_i, int64_t stride_k, int64_t rows, int64_t k,
                    uint32_t* out) {
  int64_t done = 0;  // of k
  uint32_t lost = 0;
  if (rows == width && stride_i == 1) {
    done = k / pair * pair;
    lost = pack_adjacent<pair, width>(src, stride_k, done / pair, out);
  } else if (rows == width && stride_k == 1) {
    done = k / (16 * pair) * (16 * pair);
    lost = pack_transposed<pair, width>(src, stride_i, done / pair, out);
  }
  return lost | pack_general<pair, width>(src + done * stride_k, stride_i, stride_k, rows, k - done,
                                          out + done / pair * width);
}

template <int pair, int width>
bool pack(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows, int64_t k,
          uint32_t* out) {
  return with_low(dtype, [&](auto t) {
    const auto* x = static_cast<const typename decltype(t)::type*>(src);
    return pack_panel<pair, width>(x, stride_i, stride_k, rows, k, out) != 0;
  });
}

constexpr int kWordsAhead = 32;  // words of K, the time in which data comes from the L3 cache

template <int mr, int nv>
inline void prefetch(const uint32_t* a, const uint32_t* b) {
  constexpr int per_line = 16, width = nv * sizeof(Vec) / sizeof(uint32_t);
  __builtin_prefetch(a + kWordsAhead * mr);
#pragma GCC unroll 4
  for (int i = 0; i < width; i += per_line) __builtin_prefetch(b + kWordsAhead * width + i);
}

template <int mr, int nv>
void micro_f32(int64_t words, const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
               bool accumulate) {
  constexpr int lanes = sizeof(Vec) / sizeof(float);
  Vec acc[mr][nv];
#pragma GCC unroll 16
  for (int i = 0; i < mr; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) {
      acc[i][j] = accumulate ? load(c + i * ldc + j * lanes) : Vec{};
    }
  }
  for (int64_t w = 0; w < words; ++w, a += mr, b += nv * lanes) {
    prefetch<mr, nv>(a, b);
    Vec row[nv];
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) row[j] = load(reinterpret_cast<const float*>(b) + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < mr; ++i) {
      Vec x = broadcast(bits_float(a[i]));
#pragma GCC unroll 4
      for (int j = 0; j < nv; ++j) acc[i][j] = fma(x, row[j], acc[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < mr; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) store(c + i * ldc + j * lanes, acc[i][j]);
  }
}

void store_row(Dtype out_dtype, const float* acc, const Epilogue& e, void* out, int64_t n) {
  with_float(out_dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    T* __restrict result = static_cast<T*>(out);
    const float a_scale_inv = e.a_scale_inv;
    const float* __restrict b_scale_inv = e.b_scale_inv;
    if (e.bias != nullptr) {
      const float* __restrict bias = e.bias;
      for (int64_t i = 0; i < n; ++i) {
        result[i] = Convert<T>::encode(acc[i] * a_scale_inv * b_scale_inv[i] + bias[i]);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        result[i] = Convert<T>::encode(acc[i] * a_scale_inv * b_scale_inv[i]);
      }
    }
  });
}

void accumulate_row(const float* __restrict acc, const Epilogue& e, float* __restrict out,
                    int64_t stride, int64_t n) {
  const float a_scale_inv = e.a_scale_inv;
  const float* __restrict b_scale_inv = e.b_scale_inv;
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) out[i] += acc[i] * a_scale_inv * b_scale_inv[i];
  } else {
    for (int64_t i = 0; i < n; ++i) out[i * stride] += acc[i] * a_scale_inv * b_scale_inv[i];
  }
}
