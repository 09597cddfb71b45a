// Blocks of the transpose of x, for quantize_mx, where vectors of 32 words are permuted as one: the
// blocks of 32 columns are cast side by side, so that codes are transposed and not numbers.
// Included once per instruction set, after quantize_mx_codes.h.

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
