// Loops of quantize_mx. Included once per instruction set, after those of Philox and pack and
// quantize_mx_columns.h.

template <class E, int block>
void encode_block(const float* __restrict x, float factor, const uint64_t* words,
                  uint8_t* __restrict codes) {
  typedef uint16_t Half __attribute__((may_alias));
  const Half* __restrict random = reinterpret_cast<const Half*>(words);
#pragma GCC unroll 1  // 16 elements would be unrolled before they could be vectorised
  for (int i = 0; i < block; ++i) codes[i] = encode_element<E>(x[i] * factor, random[i]);
}

// The same, rounded stochastically.
template <class E, int block, class X>
void encode_stochastic(const BlockCastRule& rule, const X* x, int64_t n, int64_t element,
                       MxBuffers& b, uint8_t* q) {
  random_words(element / 8, 0, rule.stream << 30, rule.seed, n / 8, b.words);
  for (int64_t i = 0; i < n; ++i) b.values[i] = decode(x[i]);
  constexpr bool pairs = Element<E>::bits == 4;
  for (int64_t i = 0; i < n / block; ++i) {
    uint8_t* codes = (pairs ? b.codes : q) + i * block;
    if (is_nonfinite_bits(b.largest[i])) {
      __builtin_memset(codes, 0, block);
    } else {
      encode_block<E, block>(b.values + i * block, b.factor[i], b.words + i * block / 4, codes);
    }
  }
  if (pairs) join_codes(4, b.codes, q, n / 2);
}

// At most kMxPiece elements in whole groups.
template <class E, int block, class X>
uint32_t quantize_groups(const BlockCastRule& rule, const X* x, int64_t n, int64_t element,
                         MxBuffers& b, uint8_t* q, uint8_t* scale_inv) {
  uint32_t most = largest_of<block>(x, n / block, b.largest);
  scales_of(rule.scale, n / block, b);
  __builtin_memcpy(scale_inv, b.scale, static_cast<uint64_t>(n / block));
  if (rule.stochastic) {
    encode_stochastic<E, block>(rule, x, n, element, b, q);
  } else {
    encode_groups<Registers, E, block>(x, n / kMxGroup, most, b, q);
  }
  return most;
}

// n elements of a row; the last group in a copy.
template <class E, int block, class X>
uint32_t quantize_row(const BlockCastRule& rule, const X* x, int64_t n, int64_t element,
                      MxBuffers& b, uint8_t* q, uint8_t* scale_inv) {
  int64_t last = n % kMxGroup, whole = n - last;
  uint32_t most = 0;
  for (int64_t i = 0; i < whole; i += kMxPiece) {
    int64_t count = whole - i < kMxPiece ? whole - i : kMxPiece;
    uint32_t largest = quantize_groups<E, block>(
        rule, x + i, count, element + i, b, q + block_bytes(rule.format, i), scale_inv + i / block);
    most = largest > most ? largest : most;
  }
  if (last > 0) {
    X copy[kMxGroup] = {};
    uint8_t codes[kMxGroup], scales[kMxGroup / block];
    __builtin_memcpy(copy, x + whole, static_cast<uint64_t>(last) * sizeof(X));
    uint32_t largest =
        quantize_groups<E, block>(rule, copy, kMxGroup, element + whole, b, codes, scales);
    most = largest > most ? largest : most;
    uint64_t bytes = static_cast<uint64_t>(block_bytes(rule.format, last));
    __builtin_memcpy(q + block_bytes(rule.format, whole), codes, bytes);
    __builtin_memcpy(scale_inv + whole / block, scales,
                     static_cast<uint64_t>(blocks_of(rule.format, last)));
  }
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
      most =
          quantize_row<E, block>(rule, static_cast<const X*>(x), n, element, buffers, q, scale_inv);
    });
  });
  return most;
}

// The transpose of a tile, with zeros beyond `rows`. Rows of x are fetched early, also those of the
// next tile below.
template <class X>
void turn(const X* x, int64_t ld, int64_t rows, int64_t cols, X* turned, int64_t ld_turned) {
  for (int64_t r = 0; r < rows; r += kAhead) {
    for (int64_t i = r + 2 * kAhead; i < r + 3 * kAhead; ++i) prefetch_row(x + i * ld, cols);
    int64_t count = rows - r < kAhead ? rows - r : kAhead;
    transpose_tile(x + r * ld, ld, turned + r, ld_turned, count, cols);
  }
  for (int64_t c = 0; rows < ld_turned && c < cols; ++c) {
    uint64_t bytes = static_cast<uint64_t>(ld_turned - rows) * sizeof(X);
    __builtin_memset(static_cast<void*>(turned + c * ld_turned + rows), 0, bytes);
  }
}

void quantize_mx_columns(const BlockCastRule& rule, const void* x, int64_t ld, int64_t rows,
                         int64_t cols, int64_t element, int64_t ld_element, uint8_t* q_t,
                         int64_t ld_q, uint8_t* scale_inv_t, int64_t ld_scale) {
  MxBuffers buffers;
  with_float(rule.x_dtype, [&](auto t) {
    with_blocks(rule.format, [&](auto e, auto size) {
      using X = typename decltype(t)::type;
      using E = typename decltype(e)::type;
      constexpr int block = sizeof(typename decltype(size)::type) / sizeof(int);
      if (!rule.stochastic && rows % kMxGroup == 0 && cols % 32 == 0) {
        if (quantize_side_by_side<Registers, E, block>(rule, static_cast<const X*>(x), ld, rows,
                                                       cols, q_t, ld_q, scale_inv_t, ld_scale)) {
          return;
        }
      }
      alignas(64) X turned[kMxCols * kMxRows];
      alignas(64) uint8_t codes[kMxPiece], scales[kMxPiece / block];
      int64_t whole = (rows + kMxGroup - 1) / kMxGroup * kMxGroup;
      turn(static_cast<const X*>(x), ld, rows, cols, turned, whole);
      bool stream = ld * ld_q >= kStreamed;
      int64_t at_once = rule.stochastic ? 1 : kMxPiece / whole;  // columns: random bits have gaps
      for (int64_t c = 0; c < cols; c += at_once) {
        int64_t count = cols - c < at_once ? cols - c : at_once;
        quantize_groups<E, block>(rule, turned + c * whole, count * whole, element + c * ld_element,
                                  buffers, codes, scales);
        for (int64_t i = 0; i < count; ++i) {
          store_codes(q_t + (c + i) * ld_q, codes + i * block_bytes(rule.format, whole),
                      block_bytes(rule.format, rows), stream);
          __builtin_memcpy(scale_inv_t + (c + i) * ld_scale, scales + i * (whole / block),
                           static_cast<uint64_t>(blocks_of(rule.format, rows)));
        }
      }
      if (stream) end_stream();
    });
  });
}
