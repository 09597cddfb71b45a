// Loops of unpack. Included once per instruction set, after those of pack.

// A byte for each of the codes in n bytes; bits: 4 or 2.
template <int bits>
void split_codes(const uint8_t* __restrict in, uint8_t* __restrict codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t v = in[i];
    if constexpr (bits == 4) {
      uint16_t two = static_cast<uint16_t>((v | v << 4) & 0x0F0Fu);
      __builtin_memcpy(codes + 2 * i, &two, sizeof two);
    } else {
      uint32_t four = (v | v << 6 | v << 12 | v << 18) & 0x03030303u;
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

template <int bits, class Y>
void unpack_group(const uint8_t* in, const Bf16* range, Y* y) {
  alignas(64) uint8_t codes[kPackGroup];
  if constexpr (bits != 8) {
    split_codes<bits>(in, codes, kPackGroup * bits / 8);
    in = codes;
  }
  float minimum = decode(range[0]), step = decode(range[1]);
  float top = minimum + static_cast<float>((1 << bits) - 1) * step;
  constexpr float half = 0.5f * kLargest<Y>;
  if (__builtin_fabsf(minimum) < half && __builtin_fabsf(top) < half) {
    decode_group<false>(in, minimum, step, y);
  } else {
    decode_group<true>(in, minimum, step, y);
  }
}

template <int bits, class Y>
void unpack(const PackArrays& a, int64_t begin, int64_t end) {
  constexpr int64_t bytes = kPackGroup * bits / 8;
  // Streaming saves memory traffic, which does not limit the results of 16 bits.
  bool streams = a.streams && sizeof(Y) == 4;
  alignas(64) Y group[kPackGroup];
  const uint8_t* in = a.codes + begin * bits / 8;
  const Bf16* range = a.ranges + begin / kPackGroup * 2;
  Y* y = static_cast<Y*>(a.y) + begin;
  for (; begin + kPackGroup <= end; begin += kPackGroup) {
    unpack_group<bits>(in, range, streams ? group : y);
    for (int64_t j = 0; streams && j < kPackGroup; j += 64 / sizeof(Y)) {
      store_line(y + j, group + j, 64, true);
    }
    in += bytes;
    range += 2;
    y += kPackGroup;
  }
  if (streams) end_stream();
  if (begin < end) {
    uint8_t last[bytes] = {};
    __builtin_memcpy(last, in, static_cast<uint64_t>(packed_bytes(end - begin, bits)));
    unpack_group<bits>(last, range, group);
    __builtin_memcpy(y, group, static_cast<uint64_t>(end - begin) * sizeof(Y));
  }
}

void unpack(const PackArrays& a, int64_t begin, int64_t end) {
  with_float(a.dtype, [&](auto t) {
    using Y = typename decltype(t)::type;
    if (a.bits == 8) {
      unpack<8, Y>(a, begin, end);
    } else if (a.bits == 4) {
      unpack<4, Y>(a, begin, end);
    } else {
      unpack<2, Y>(a, begin, end);
    }
  });
}
