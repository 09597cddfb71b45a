// Groups of dequantize_mx in vectors of 32 words (R: the Registers that have them), where codes
// select from a table of bf16 values. Included once per instruction set.

constexpr int64_t kMxGroup = 32;  // elements that are processed together: one block or two

template <class R>
void store_words(Words32 bf16, Bf16* out) {
  __builtin_memcpy(out, &bf16, sizeof bf16);
}
template <class R>
void store_words(Words32 bf16, float* out) {
  Words16 half[2];
  __builtin_memcpy(half, &bf16, sizeof half);
  Uints16 wide[2] = {R::widen(half[0]) << 16, R::widen(half[1]) << 16};
  __builtin_memcpy(out, wide, sizeof wide);
}

// The bf16 values of the codes that are not those of normal numbers of 8 bits; of fewer bits, of
// all codes. By the low 5 bits of a code.
struct MxTable {
  Words32 values, scaled;  // scaled: all ones where a change of scale adds to the exponent
};

template <class E>
MxTable mx_table() {
  alignas(64) uint16_t values[32];
  for (int i = 0; i < 32; ++i) {
    int code = Element<E>::bits == 8 && i >= 16 ? 96 + i : i;
    uint32_t u = float_bits(decode_element(E{static_cast<uint8_t>(code)}));
    u |= (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x00400000u : 0u;  // as a product with NaN
    values[i] = static_cast<uint16_t>(u >> 16);
  }
  MxTable table;
  __builtin_memcpy(&table.values, values, sizeof values);
  Words32 magnitude = table.values & 0x7FFF;
  table.scaled = (Words32)((magnitude != 0) & (magnitude < 0x7F80));
  return table;
}

// 32 codes of 4 bits in the low bits of words, with others above them.
template <class R>
Words32 load_fp4(const uint8_t* q) {
  Bytes16 pairs;
  __builtin_memcpy(&pairs, q, sizeof pairs);
  Uints16 both = R::widen(pairs);
  return (Words32)(both | both << 12);
}

// The bf16 values of a block, of which none is subnormal or overflows. exponent: of the scale, in
// its place in a bf16 number.
template <class R, class E>
MIXPREC_HD Words32 mx_words(const uint8_t* q, const MxTable& t, uint16_t exponent) {
  using F = Element<E>;
  Words32 table = t.values + (t.scaled & exponent);
  if constexpr (F::bits == 4) {
    return R::look_up(table, load_fp4<R>(q));
  } else {
    Bytes32 bytes;
    __builtin_memcpy(&bytes, q, sizeof bytes);
    Words32 codes = R::widen(bytes), found = R::look_up(table, codes);
    if constexpr (F::bits == 6) return found | (codes & 0x20) << 10;
    constexpr uint16_t offset = (127 - F::bias) << F::mantissa;
    constexpr uint16_t first = 1 << F::mantissa;
    constexpr uint16_t span = (F::max_bits >> (23 - F::mantissa)) - offset - first;
    Words32 magnitude = codes & 0x7F;
    uint16_t add = static_cast<uint16_t>(exponent + (offset << (7 - F::mantissa)));
    Words32 normal = (magnitude << (7 - F::mantissa)) + add;
    return (magnitude - first <= span ? normal : found) | (codes & 0x80) << 8;
  }
}

// Two blocks of NVFP4 whose scales are finite: the table has the rounded products of the 8
// magnitudes with both.
template <class R>
void nvfp4_words(const uint8_t* q, const float* scale, Bf16* out) {
  constexpr Floats16 magnitudes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  constexpr Uints16 of_second = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  constexpr Words32 place = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                             8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8};
  Uints16 first = Uints16{} + float_bits(scale[0]), second = Uints16{} + float_bits(scale[1]);
  Uints16 u = (Uints16)(magnitudes * (Floats16)(of_second != 0 ? second : first));
  Words16 rounded = R::narrow((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
  Words32 codes = load_fp4<R>(q);
  Words32 found = R::look_up(R::lower(rounded), (codes & 7) | place);
  store_words<R>(found ^ (codes & 8) << 12, out);
}
template <class R>
void nvfp4_words(const uint8_t* q, const float* scale, float* out) {
  constexpr Floats16 values = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                               -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  Words32 codes = load_fp4<R>(q);
  Words16 half[2];
  __builtin_memcpy(half, &codes, sizeof half);
  Floats16 y[2] = {R::look_up(values, R::widen(half[0])) * scale[0],
                   R::look_up(values, R::widen(half[1])) * scale[1]};
  __builtin_memcpy(out, y, sizeof y);
}
