// The scales of blocks, for quantize_mx. Included once per instruction set, after the loops of
// dequantize_mx.

struct MxBuffers {
  alignas(64) float values[kMxPiece];
  alignas(64) uint64_t words[kMxPiece / 4];  // random bits
  alignas(64) uint8_t codes[kMxPiece];
  alignas(64) uint32_t largest[kMxPiece / 16];
  float factor[kMxPiece / 16];
  uint8_t scale[kMxPiece / 16];
};

template <class X>
struct MxLanes {  // whose order as numbers is that of magnitudes
  typedef Shorts8 Signed;
  typedef Words8 Unsigned;
  static constexpr int count = 8;
};
template <>
struct MxLanes<float> {
  typedef Ints4 Signed;
  typedef Uints4 Unsigned;
  static constexpr int count = 4;
};

// The largest magnitudes of blocks first, first + step, ... in turn.
template <int block, int blocks, class X>
typename MxLanes<X>::Signed largest_lanes(const X* x, int64_t first, int64_t step, int64_t end) {
  using Lanes = MxLanes<X>;
  using Signed = typename Lanes::Signed;
  if constexpr (blocks == 1) {
    const X* in = x + (first < end ? first : end - 1) * block;
    Signed largest = {}, v;
    for (int i = 0; i < block; i += Lanes::count) {
      __builtin_memcpy(&v, in + i, sizeof v);
      v &= (Signed)(~typename Lanes::Unsigned{} >> 1);
      largest = v > largest ? v : largest;
    }
    return largest;
  } else {
    using Unsigned = typename Lanes::Unsigned;
    auto a = (Unsigned)largest_lanes<block, blocks / 2>(x, first, 2 * step, end);
    auto b = (Unsigned)largest_lanes<block, blocks / 2>(x, first + step, 2 * step, end);
    Signed low = (Signed)interleave_low(a, b), high = (Signed)interleave_high(a, b);
    return low > high ? low : high;
  }
}

template <int block, class X>
uint32_t largest_of(const X* x, int64_t blocks, uint32_t* __restrict largest) {
  constexpr int count = MxLanes<X>::count;
  X found[kMxPiece / 16];
  for (int64_t b = 0; b < blocks; b += count) {
    auto lanes = largest_lanes<block, count>(x, b, 1, blocks);
    __builtin_memcpy(found + b, &lanes, sizeof lanes);
  }
  uint32_t most = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    largest[b] = float_bits(decode(found[b]));
    most = largest[b] > most ? largest[b] : most;
  }
  return most;
}

inline void scales_of(const ScaleRule& rule, int64_t blocks, MxBuffers& b) {
  auto each = [&](auto scale) {
    for (int64_t i = 0; i < blocks; ++i) {
      BlockScale s = scale(b.largest[i], rule);
      b.scale[i] = s.code;
      b.factor[i] = s.factor;
    }
  };
  if (!rule.nvfp4) return each([](uint32_t amax, const ScaleRule& r) { return mx_scale(amax, r); });
  if (rule.up) {
    return each([](uint32_t amax, const ScaleRule& r) { return nvfp4_scale<true>(amax, r); });
  }
  each([](uint32_t amax, const ScaleRule& r) { return nvfp4_scale<false>(amax, r); });
}
