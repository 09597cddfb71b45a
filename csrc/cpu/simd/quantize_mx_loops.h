// Loops of quantize_mx. Included once per instruction set, after those of pack and
// quantize_mx_codes.h.

// Blocks of the transpose of x where vectors of 32 words are permuted as one: the blocks of 32
// columns are cast side by side, so that codes are transposed and not numbers.

constexpr int64_t kMxRows = 128, kMxCols = 64;  // of a tile

inline void store_codes(uint8_t* out, const uint8_t* codes, int64_t bytes, bool stream) {
  for (int64_t j = 0; j < bytes; j += 64) {
    store_line(out + j, codes + j, static_cast<uint64_t>(bytes - j < 64 ? bytes - j : 64), stream);
  }
}

// The largest magnitudes of 32 columns of a block, as bits of fp32. Fetches the rows below.
template <class R, int block, class X>
void largest_of_columns(const X* x, int64_t ld, uint32_t* largest) {
  if constexpr (sizeof(X) == 4) {
    Uints16 most[2] = {}, u;
    for (int r = 0; r < block; ++r, x += ld) {
      __builtin_prefetch(x + kMxGroup * ld);
      __builtin_prefetch(x + kMxGroup * ld + 16);
      for (int i = 0; i < 2; ++i) {
        __builtin_memcpy(&u, x + 16 * i, sizeof u);
        u &= 0x7FFFFFFF;
        most[i] = u > most[i] ? u : most[i];
      }
    }
    __builtin_memcpy(largest, most, sizeof most);
  } else {
    Words32 most = {}, u;
    for (int r = 0; r < block; ++r, x += ld) {
      __builtin_prefetch(x + kMxGroup * ld);
      __builtin_memcpy(&u, x, sizeof u);
      u &= 0x7FFF;
      most = u > most ? u : most;
    }
    X magnitudes[32];
    __builtin_memcpy(static_cast<void*>(magnitudes), &most, sizeof most);
    for (int i = 0; i < 32; ++i) largest[i] = float_bits(decode(magnitudes[i]));
  }
}

// Codes of a block's rows of 32 columns, in bytes of one or of two rows, ld_codes apart; 0 where
// the amax is not finite.
template <class R, class E, int block, class X>
void encode_columns(const X* x, int64_t ld, const MxBuffers& b, uint8_t* codes, int64_t ld_codes) {
  Floats16 factor[2];
  __builtin_memcpy(factor, b.factor, sizeof factor);
  Words32 finite;
  for (int i = 0; i < 32; ++i) finite[i] = is_nonfinite_bits(b.largest[i]) ? 0 : 0xFFFF;
  Shorts32 scale;
  bool words = true;  // all columns are finite then
  for (int i = 0; i < 32; ++i) {
    words &= encodes_words<block, X>(b.scale[i]);
    scale[i] = b.scale[i];
  }
  auto row = [&](int r) {
    if (words) {
      Words32 u;
      __builtin_memcpy(&u, x + r * ld, sizeof u);
      return encode_word<E>(u, scale);
    }
    Floats16 first = floats_16<R>(x + r * ld) * factor[0];
    Floats16 second = floats_16<R>(x + r * ld + 16) * factor[1];
    Words32 u = R::cut((Uints16)first, (Uints16)second);
    return encode_word<E>(u, Shorts32{} + int16_t{127}) & finite;
  };
  constexpr int bits = Element<E>::bits, step = bits == 4 ? 2 : 1;
  for (int r = 0; r < block; r += step, codes += ld_codes) {
    Words32 c = row(r);
    if constexpr (bits == 6) c = (c & 0x1F) | (c >> 2 & 0x20);
    if constexpr (bits == 4) {
      Words32 next = row(r + 1);
      c = ((c | c >> 4) & 15) | (((next | next >> 4) & 15) << 4);
    }
    Bytes32 bytes = R::narrow_bytes(c);
    __builtin_memcpy(codes, &bytes, sizeof bytes);
  }
}

// A tile of whole groups of rows and of columns, rounded to nearest. Returns false where vectors of
// 32 words are not permuted as one.
template <class R, class E, int block, class X>
bool quantize_side_by_side(const BlockCastRule& rule, const X* x, int64_t ld, int64_t rows,
                           int64_t cols, uint8_t* q_t, int64_t ld_q, uint8_t* scale_inv_t,
                           int64_t ld_scale) {
  if constexpr (!R::of_32_words) {
    return false;
  } else {
    constexpr int64_t in_byte = Element<E>::bits == 4 ? 2 : 1, length = kMxRows / in_byte;
    alignas(64) uint8_t codes[length * kMxCols], turned[kMxCols * length];
    uint8_t scales[kMxRows / block * kMxCols];
    MxBuffers b;
    for (int64_t r = 0; r < rows; r += block) {
      for (int64_t c = 0; c < cols; c += 32) {
        largest_of_columns<R, block>(x + r * ld + c, ld, b.largest);
        scales_of(rule.scale, 32, b);
        __builtin_memcpy(scales + r / block * kMxCols + c, b.scale, 32);
        encode_columns<R, E, block>(x + r * ld + c, ld, b, codes + r / in_byte * kMxCols + c,
                                    kMxCols);
      }
    }
    // GCC 12 takes the codes for unwritten, since the loops above could have no iterations.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
    transpose_tile(codes, kMxCols, turned, length, rows / in_byte, cols);
#pragma GCC diagnostic pop
    bool stream = ld * ld_q >= kStreamed;
    for (int64_t c = 0; c < cols; ++c) {
      store_codes(q_t + c * ld_q, turned + c * length, rows / in_byte, stream);
      for (int64_t i = 0; i < rows / block; ++i) {
        scale_inv_t[c * ld_scale + i] = scales[i * kMxCols + c];
      }
    }
    if (stream) end_stream();
    return true;
  }
}

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

// At most kMxPiece elements in whole groups. squares: the amaxes of their blocks, or none.
template <class E, int block, class X>
uint32_t quantize_groups(const BlockCastRule& rule, const X* x, int64_t n, int64_t element,
                         MxBuffers& b, uint8_t* q, uint8_t* scale_inv, const uint32_t* squares) {
  uint32_t most = largest_of<block>(x, n / block, b.largest);
  for (int64_t i = 0; squares != nullptr && i < n / block; ++i) {
    b.largest[i] = squares[i];
    most = squares[i] > most ? squares[i] : most;
  }
  scales_of(rule.scale, n / block, b);
  if constexpr (block == 16) {
    if (rule.scale.adaptive != Adaptive::none) choose_scales(x, rule.scale, n / block, b);
  }
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
  int64_t last = n % kMxGroup, full = n - last;
  uint32_t most = 0;
  auto cast = [&](const X* in, int64_t first, int64_t count, uint8_t* codes, uint8_t* scales) {
    uint32_t largest = quantize_groups<E, block>(rule, in, count, element + first, b, codes, scales,
                                                 rule.at(0, first).squares);
    most = largest > most ? largest : most;
  };
  for (int64_t i = 0; i < full; i += kMxPiece) {
    cast(x + i, i, full - i < kMxPiece ? full - i : kMxPiece, q + block_bytes(rule.format, i),
         scale_inv + i / block);
  }
  if (last > 0) {
    X copy[kMxGroup] = {};
    uint8_t codes[kMxGroup], scales[kMxGroup / block];
    __builtin_memcpy(copy, x + full, static_cast<uint64_t>(last) * sizeof(X));
    cast(copy, full, kMxGroup, codes, scales);
    uint64_t bytes = static_cast<uint64_t>(block_bytes(rule.format, last));
    __builtin_memcpy(q + block_bytes(rule.format, full), codes, bytes);
    __builtin_memcpy(scale_inv + full / block, scales,
                     static_cast<uint64_t>(blocks_of(rule.format, last)));
  }
  return most;
}

// f(Type<X>{}, E{}, Indices<block size>{})
template <class F>
void with_formats(Dtype dtype, BlockFormat format, const F& f) {
  with_float(dtype, [&](auto x) {
    if (format == BlockFormat::nvfp4) return f(x, E2m1{}, Indices<16>{});
    with_element(format, [&](auto e) { f(x, e, Indices<32>{}); });
  });
}

uint32_t quantize_mx(Dtype dtype, const BlockCastRule& rule, const void* x, int64_t n,
                     int64_t element, uint8_t* q, uint8_t* scale_inv) {
  MxBuffers b;
  uint32_t most = 0;
  with_formats(dtype, rule.format, [&]<class X, class E, int block>(Type<X>, E, Indices<block>) {
    most = quantize_row<E, block>(rule, static_cast<const X*>(x), n, element, b, q, scale_inv);
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

void quantize_mx_columns(Dtype dtype, const BlockCastRule& rule, const void* x, int64_t ld,
                         int64_t rows, int64_t cols, int64_t element, int64_t ld_element,
                         uint8_t* q_t, int64_t ld_q, uint8_t* scale_inv_t, int64_t ld_scale) {
  MxBuffers buffers;
  with_formats(dtype, rule.format, [&]<class X, class E, int block>(Type<X>, E, Indices<block>) {
    bool plain = rule.squares == nullptr && rule.scale.adaptive == Adaptive::none;
    if (plain && !rule.stochastic && rows % kMxGroup == 0 && cols % 32 == 0) {
      if (quantize_side_by_side<Registers, E, block>(rule, static_cast<const X*>(x), ld, rows, cols,
                                                     q_t, ld_q, scale_inv_t, ld_scale)) {
        return;
      }
    }
    alignas(64) X turned[kMxCols * kMxRows];
    alignas(64) uint8_t codes[kMxPiece], scales[kMxPiece / block];
    uint32_t squares[kMxPiece / block];
    int64_t padded = (rows + kMxGroup - 1) / kMxGroup * kMxGroup;
    turn(static_cast<const X*>(x), ld, rows, cols, turned, padded);
    bool stream = ld * ld_q >= kStreamed;
    int64_t at_once = rule.stochastic ? 1 : kMxPiece / padded;  // columns: random bits have gaps
    for (int64_t c = 0; c < cols; c += at_once) {
      int64_t count = cols - c < at_once ? cols - c : at_once, down = padded / block;
      for (int64_t i = 0; rule.squares != nullptr && i < count * down; ++i) {
        squares[i] = rule.squares[i % down * rule.ld_squares + (c + i / down) / block];
      }
      quantize_groups<E, block>(rule, turned + c * padded, count * padded, element + c * ld_element,
                                buffers, codes, scales,
                                rule.squares == nullptr ? nullptr : squares);
      for (int64_t i = 0; i < count; ++i) {
        store_codes(q_t + (c + i) * ld_q, codes + i * block_bytes(rule.format, padded),
                    block_bytes(rule.format, rows), stream);
        __builtin_memcpy(scale_inv_t + (c + i) * ld_scale, scales + i * (padded / block),
                         static_cast<uint64_t>(blocks_of(rule.format, rows)));
      }
    }
    if (stream) end_stream();
  });
}
