// Loops of unpack. Included once per instruction set, after those of pack.

// A byte for each of the codes in n bytes.
inline void split_codes(int64_t bits, const uint8_t* __restrict in, uint8_t* __restrict codes,
                        int64_t n) {
  if (bits == 4) {
    for (int64_t i = 0; i < n; ++i) {
      uint32_t v = in[i];
      uint16_t pair = static_cast<uint16_t>((v | v << 4) & 0x0F0Fu);
      __builtin_memcpy(codes + 2 * i, &pair, sizeof pair);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      uint32_t v = in[i], four = (v | v << 6 | v << 12 | v << 18) & 0x03030303u;
      __builtin_memcpy(codes + 4 * i, &four, sizeof four);
    }
  }
}

// far: some of the group may be beyond the largest number of Y, or NaN.
template <bool far, class Y>
void decode_group(const uint8_t* __restrict codes, float minimum, float step, Y* __restrict y) {
  for (int i = 0; i < kPackGroup; ++i) {
    float value = unpack_value(codes[i], minimum, step);
    y[i] = Convert<Y>::encode(far ? unpack_bounded(value, kLargest<Y>) : value);
  }
}

// Rounded to bf16, but without what Inf and NaN need.
inline uint32_t rounded_bits(uint32_t code, float minimum, float step) {
  uint32_t u = float_bits(unpack_value(static_cast<int32_t>(code), minimum, step));
  return u + 0x7FFFu + ((u >> 16) & 1u);
}

template <>
void decode_group<false, Bf16>(const uint8_t* __restrict codes, float minimum, float step,
                               Bf16* __restrict y) {
  typedef uint16_t CodePair __attribute__((may_alias, aligned(1)));
  const CodePair* in = reinterpret_cast<const CodePair*>(codes);
  Pair* out = reinterpret_cast<Pair*>(y);
  for (int i = 0; i < kPackGroup / 2; ++i) {
    uint32_t first = rounded_bits(in[i] & 0xFFu, minimum, step);
    uint32_t second = rounded_bits(in[i] >> 8, minimum, step);
    out[i] = first >> 16 | (second & 0xFFFF0000u);
  }
}

template <class Y>
void unpack(const PackArrays& a, int64_t begin, int64_t end) {
  alignas(64) uint8_t codes[kPackGroup] = {};
  alignas(64) Y group[kPackGroup];
  float levels = static_cast<float>((1 << a.bits) - 1);
  for (int64_t i = begin; i < end; i += kPackGroup) {
    int64_t n = end - i < kPackGroup ? end - i : kPackGroup;
    const uint8_t* in = a.codes + i * a.bits / 8;
    uint64_t size = static_cast<uint64_t>(n * a.bits + 7) / 8;
    if (a.bits != 8) {
      split_codes(a.bits, in, codes, static_cast<int64_t>(size));
      in = codes;
    } else if (n < kPackGroup) {
      __builtin_memcpy(codes, in, size);
      in = codes;
    }
    const Bf16* range = a.ranges + i / kPackGroup * 2;
    float minimum = decode(range[0]), step = decode(range[1]);
    float top = minimum + levels * step;
    bool near = minimum > -0.5f * kLargest<Y> && top < 0.5f * kLargest<Y>;  // no NaN either
    (near ? decode_group<false, Y> : decode_group<true, Y>)(in, minimum, step, group);
    Y* y = static_cast<Y*>(a.y) + i;
    if (n < kPackGroup) {
      __builtin_memcpy(y, group, static_cast<uint64_t>(n) * sizeof(Y));
      break;
    }
    for (int64_t j = 0; j < kPackGroup; j += 64 / sizeof(Y)) {
      store_line(y + j, group + j, 64, a.streams);
    }
  }
  if (a.streams) end_stream();
}

void unpack(const PackArrays& a, int64_t begin, int64_t end) {
  with_float(a.dtype, [&](auto t) { unpack<typename decltype(t)::type>(a, begin, end); });
}
