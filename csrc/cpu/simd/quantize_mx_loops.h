// Loops of quantize_mx. Included once per instruction set, after those of pack and of Philox.
//
// A chunk of a row, which stays in the L1 cache, goes through loops that do one thing each and
// vectorise: values in fp32, largest magnitudes, scales, a byte for every code, two codes a byte.

constexpr int64_t kMxChunk = 1024;  // elements
constexpr int64_t kMxRows = 256, kMxCols = 32;

struct MxBuffers {
  alignas(64) float values[kMxChunk];
  alignas(64) uint64_t words[kMxChunk / 4];  // random bits
  alignas(64) uint8_t codes[kMxChunk];
  alignas(64) uint32_t largest[kMxChunk / 16];
  float factor[kMxChunk / 16];
  uint8_t scale[kMxChunk / 16];
};

// Without the pragmas GCC unrolls loops over 16 elements before it could vectorise them.
template <class E, int block>
void encode_block(const float* __restrict x, float factor, uint8_t* __restrict codes) {
#pragma GCC unroll 1
  for (int i = 0; i < block; ++i) codes[i] = encode_element<E>(x[i] * factor);
}

template <class E, int block>
void encode_block(const float* __restrict x, float factor, const uint64_t* words,
                  uint8_t* __restrict codes) {
  typedef uint16_t Half __attribute__((may_alias));
  const Half* __restrict random = reinterpret_cast<const Half*>(words);
#pragma GCC unroll 1
  for (int i = 0; i < block; ++i) codes[i] = encode_element<E>(x[i] * factor, random[i]);
}

template <int block>
uint32_t largest_of(const float* __restrict x, int64_t blocks, uint32_t* __restrict largest) {
  uint32_t most = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    uint32_t seen = 0;
#pragma GCC unroll 1
    for (int i = 0; i < block; ++i) {
      uint32_t u = float_bits(x[b * block + i]) & 0x7FFFFFFFu;
      seen = u > seen ? u : seen;
    }
    largest[b] = seen;
    most = seen > most ? seen : most;
  }
  return most;
}

inline void scales_of(const ScaleRule& rule, int64_t blocks, MxBuffers& b) {
  if (rule.nvfp4) {
    for (int64_t i = 0; i < blocks; ++i) {
      BlockScale s = nvfp4_scale(b.largest[i], rule);
      b.scale[i] = s.code;
      b.factor[i] = s.factor;
    }
  } else {
    for (int64_t i = 0; i < blocks; ++i) {
      BlockScale s = mx_scale(b.largest[i], rule);
      b.scale[i] = s.code;
      b.factor[i] = s.factor;
    }
  }
}

// n elements of x, of which those beyond `n` up to a whole block are 0.
template <class E, int block>
uint32_t quantize_chunk(const BlockCastRule& rule, const float* x, int64_t n, int64_t element,
                        MxBuffers& b, uint8_t* q, uint8_t* scale_inv) {
  int64_t blocks = (n + block - 1) / block;
  uint32_t most = largest_of<block>(x, blocks, b.largest);
  scales_of(rule.scale, blocks, b);
  if (rule.stochastic) {
    random_words(element / 8, 0, rule.stream << 30, rule.seed, blocks * block / 8, b.words);
  }
  constexpr bool bytes = Element<E>::bits != 4;
  for (int64_t i = 0; i < blocks; ++i) {
    const float* in = x + i * block;
    uint8_t* codes = b.codes + i * block;
    if (is_nonfinite_bits(b.largest[i])) {
      __builtin_memset(codes, 0, block);
    } else if (rule.stochastic) {
      encode_block<E, block>(in, b.factor[i], b.words + i * block / 4, codes);
    } else {
      encode_block<E, block>(in, b.factor[i], codes);
    }
  }
  if (bytes) {
    __builtin_memcpy(q, b.codes, static_cast<uint64_t>(n));
  } else {
    join_codes(4, b.codes, q, (n + 1) / 2);
  }
  __builtin_memcpy(scale_inv, b.scale, static_cast<uint64_t>(blocks));
  return most;
}

// f(Type<E>{}, Type<int[block size]>{})
template <class F>
void with_blocks(BlockFormat format, const F& f) {
  if (format == BlockFormat::nvfp4) return f(Type<E2m1>{}, Type<int[16]>{});
  with_element(format, [&](auto e) { f(Type<decltype(e)>{}, Type<int[32]>{}); });
}

uint32_t quantize_mx(const BlockCastRule& rule, const void* x, int64_t n, int64_t element,
                     uint8_t* q, uint8_t* scale_inv) {
  MxBuffers buffers;
  uint32_t most = 0;
  with_float(rule.x_dtype, [&](auto t) {
    with_blocks(rule.format, [&](auto e, auto size) {
      using X = typename decltype(t)::type;
      using E = typename decltype(e)::type;
      constexpr int block = sizeof(typename decltype(size)::type) / sizeof(int);
      const X* in = static_cast<const X*>(x);
      for (int64_t i = 0; i < n; i += kMxChunk) {
        int64_t count = n - i < kMxChunk ? n - i : kMxChunk;
        const float* values = buffers.values;
        if (sizeof(X) == 4 && count % block == 0) {
          values = reinterpret_cast<const float*>(in + i);
        } else {
          for (int64_t j = 0; j < count; ++j) buffers.values[j] = decode(in[i + j]);
          for (int64_t j = count; j % block != 0; ++j) buffers.values[j] = 0.0f;
        }
        uint32_t largest =
            quantize_chunk<E, block>(rule, values, count, element + i, buffers,
                                     q + block_bytes(rule.format, i), scale_inv + i / block);
        most = largest > most ? largest : most;
      }
    });
  });
  return most;
}

typedef float Floats4 __attribute__((vector_size(16)));
typedef int32_t Ints4 __attribute__((vector_size(16)));

// out[c * ld_out + r] = in[r * kMxCols + c] of 4 rows
inline void transpose_4(const float* in, float* out, int64_t ld_out) {
  for (int64_t c = 0; c < kMxCols; c += 4) {
    Floats4 a[4];
    for (int i = 0; i < 4; ++i) __builtin_memcpy(&a[i], in + i * kMxCols + c, sizeof a[i]);
    Floats4 low01 = __builtin_shuffle(a[0], a[1], Ints4{0, 4, 1, 5});
    Floats4 low23 = __builtin_shuffle(a[2], a[3], Ints4{0, 4, 1, 5});
    Floats4 high01 = __builtin_shuffle(a[0], a[1], Ints4{2, 6, 3, 7});
    Floats4 high23 = __builtin_shuffle(a[2], a[3], Ints4{2, 6, 3, 7});
    Floats4 turned[4] = {__builtin_shuffle(low01, low23, Ints4{0, 1, 4, 5}),
                         __builtin_shuffle(low01, low23, Ints4{2, 3, 6, 7}),
                         __builtin_shuffle(high01, high23, Ints4{0, 1, 4, 5}),
                         __builtin_shuffle(high01, high23, Ints4{2, 3, 6, 7})};
    for (int i = 0; i < 4; ++i) __builtin_memcpy(out + (c + i) * ld_out, &turned[i], sizeof a[i]);
  }
}

// The transpose in fp32, of rows up to a whole block: those beyond `rows` are 0.
template <class X>
void turn(const X* x, int64_t ld, int64_t rows, int64_t cols, float* out) {
  alignas(64) float four[4 * kMxCols] = {};
  int64_t n = cols;
  for (int64_t r = 0; r < (rows + 31) / 32 * 32; r += 4) {
    for (int64_t i = 0; i < 4; ++i) {
      float* __restrict row = four + i * kMxCols;
      if (r + i < rows) {
        const X* __restrict in = x + (r + i) * ld;
        for (int64_t c = 0; c < n; ++c) row[c] = decode(in[c]);
      } else {
        for (int64_t c = 0; c < kMxCols; ++c) row[c] = 0.0f;
      }
    }
    transpose_4(four, out + r, kMxRows);
  }
}

void quantize_mx_columns(const BlockCastRule& rule, const void* x, int64_t ld, int64_t rows,
                         int64_t cols, int64_t element, int64_t ld_element, uint8_t* q_t,
                         int64_t ld_q, uint8_t* scale_inv_t, int64_t ld_scale) {
  MxBuffers buffers;
  alignas(64) float turned[kMxCols * kMxRows];
  with_float(rule.x_dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    turn(static_cast<const X*>(x), ld, rows, cols, turned);
  });
  with_blocks(rule.format, [&](auto e, auto size) {
    using E = typename decltype(e)::type;
    constexpr int block = sizeof(typename decltype(size)::type) / sizeof(int);
    for (int64_t c = 0; c < cols; ++c) {
      quantize_chunk<E, block>(rule, turned + c * kMxRows, rows, element + c * ld_element, buffers,
                               q_t + c * ld_q, scale_inv_t + c * ld_scale);
    }
  });
}
