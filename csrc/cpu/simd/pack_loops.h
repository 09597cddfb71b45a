// Loops of pack and unpack. Included once per instruction set.
//
// Each loop over a block, which stays in the L1 cache, does one thing and vectorises: random bits,
// ranges, a byte for every code, codes of fewer bits.

constexpr int64_t kPackBlock = 16 * kPackGroup;  // elements

struct PackBuffers {
  alignas(64) uint32_t words[4][kPackBlock / kPackRandom];
  alignas(64) uint32_t pairs[kPackBlock / 2];
  alignas(64) uint16_t random[kPackBlock];
  alignas(64) uint8_t codes[kPackBlock], joined[kPackBlock];
};

__attribute__((noinline)) void pack_random(const PackArrays& a, int64_t element, int64_t n,
                                           PackBuffers& b) {
  int64_t first = element / kPackRandom, calls = n / kPackRandom;
  for (int64_t i = 0; i < calls; ++i) {
    PhiloxWords c = pack_counter(first + i, a.counter);
    for (int w = 0; w < 4; ++w) b.words[w][i] = c.word[w];
  }
  philox_rounds(b.words, calls, static_cast<uint64_t>(a.seed));
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);  // the low half of a pair comes first
  for (int64_t i = 0; i < calls; ++i) {
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      uint32_t word = b.words[w][i];
      b.pairs[8 * i + 2 * w] = pack_random16(word, 0) | pack_random16(word, 1) << 16;
      b.pairs[8 * i + 2 * w + 1] = pack_random16(word, 2) | pack_random16(word, 3) << 16;
    }
  }
  __builtin_memcpy(b.random, b.pairs, sizeof b.random);
}

template <class X>
struct BitsOf {
  using type = int16_t;
};
template <>
struct BitsOf<float> {
  using type = int32_t;
};

// The least and the greatest of a group.
template <class X>
void limits_of(const X* __restrict x, float* low, float* high) {
  using Int = typename BitsOf<X>::type;
  Int first;
  __builtin_memcpy(&first, x, sizeof first);
  Int least = in_order(first), most = least;
  for (int i = 0; i < kPackGroup; ++i) {
    Int bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    bits = in_order(bits);
    least = bits < least ? bits : least;
    most = bits > most ? bits : most;
  }
  X least_x, most_x;
  least = in_order(least);
  most = in_order(most);
  __builtin_memcpy(&least_x, &least, sizeof least);
  __builtin_memcpy(&most_x, &most, sizeof most);
  *low = decode(least_x);
  *high = decode(most_x);
}

template <class X>
void encode_group(const X* __restrict x, PackRange range, int32_t levels,
                  const uint16_t* __restrict random, uint8_t* __restrict codes) {
  float minimum = decode(range.minimum), factor = pack_factor(range.step);
  if (is_nonfinite(minimum)) {
    for (int i = 0; i < kPackGroup; ++i) codes[i] = 0;
    return;
  }
  for (int i = 0; i < kPackGroup; ++i) {
    codes[i] = static_cast<uint8_t>(pack_code(decode(x[i]), minimum, factor, random[i], levels));
  }
}

template <class T>
T load_bytes(const uint8_t* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

// n bytes from a byte for each code.
inline void join_codes(int64_t bits, const uint8_t* __restrict codes, uint8_t* __restrict out,
                       int64_t n) {
  if (bits == 4) {
    for (int64_t i = 0; i < n; ++i) {
      uint32_t v = load_bytes<uint16_t>(codes + 2 * i);
      out[i] = static_cast<uint8_t>(v | v >> 4);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      uint32_t v = load_bytes<uint32_t>(codes + 4 * i);
      out[i] = static_cast<uint8_t>(v | v >> 6 | v >> 12 | v >> 18);
    }
  }
}

// At most kPackBlock elements, whole groups; `size` bytes of codes are written.
template <class X>
void pack_block(const PackArrays& a, const X* x, int64_t begin, int64_t n, int64_t kept,
                PackBuffers& b) {
  int64_t groups = n / kPackGroup;
  int32_t levels = (1 << a.bits) - 1;
  float low[kPackBlock / kPackGroup], high[kPackBlock / kPackGroup];
  PackRange range[kPackBlock / kPackGroup];
  pack_random(a, begin, n, b);
  for (int64_t g = 0; g < groups; ++g) limits_of(x + g * kPackGroup, low + g, high + g);
  for (int64_t g = 0; g < groups; ++g) {
    range[g] = pack_range(low[g], high[g], static_cast<float>(levels));
  }
  for (int64_t g = 0; g < groups; ++g) {
    int64_t i = g * kPackGroup;
    encode_group(x + i, range[g], levels, b.random + i, b.codes + i);
  }
  for (int64_t i = kept; i < n; ++i) b.codes[i] = 0;
  int64_t size = (kept * a.bits + 7) / 8;
  uint8_t* out = a.codes + begin * a.bits / 8;
  if (a.bits == 8) {
    __builtin_memcpy(out, b.codes, static_cast<uint64_t>(size));
  } else {
    join_codes(a.bits, b.codes, out, size);
  }
  __builtin_memcpy(a.ranges + 2 * (begin / kPackGroup), range,
                   static_cast<uint64_t>(groups) * sizeof(PackRange));
}

void pack(const PackArrays& a, int64_t begin, int64_t end) {
  with_float(a.dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    const X* x = static_cast<const X*>(a.x);
    PackBuffers buffers;
    int64_t whole = end - end % kPackGroup;
    for (int64_t i = begin; i < whole; i += kPackBlock) {
      int64_t n = whole - i < kPackBlock ? whole - i : kPackBlock;
      pack_block(a, x + i, i, n, n, buffers);
    }
    if (whole < end) {
      X last[kPackGroup];  // filled up with what changes neither limit
      for (int64_t i = 0; i < kPackGroup; ++i) last[i] = x[whole + i < end ? whole + i : whole];
      pack_block(a, last, whole, kPackGroup, end - whole, buffers);
    }
  });
}

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

template <class Y>
void decode_group(const uint8_t* __restrict codes, const Bf16* range, Y* __restrict y) {
  float minimum = decode(range[0]), step = decode(range[1]);
  for (int i = 0; i < kPackGroup; ++i) {
    y[i] = Convert<Y>::encode(unpack_value(codes[i], minimum, step, kLargest<Y>));
  }
}

void unpack(const PackArrays& a, int64_t begin, int64_t end) {
  with_float(a.dtype, [&](auto t) {
    using Y = typename decltype(t)::type;
    alignas(64) uint8_t codes[kPackGroup];
    alignas(64) Y group[kPackGroup];
    for (int64_t i = begin; i < end; i += kPackGroup) {
      int64_t n = end - i < kPackGroup ? end - i : kPackGroup;
      const uint8_t* in = a.codes + i * a.bits / 8;
      if (a.bits == 8 && n == kPackGroup) {
      } else if (a.bits == 8) {
        __builtin_memcpy(codes, in, static_cast<uint64_t>(n));
        in = codes;
      } else {
        split_codes(a.bits, in, codes, (n * a.bits + 7) / 8);
        in = codes;
      }
      decode_group(in, a.ranges + i / kPackGroup * 2, group);
      __builtin_memcpy(static_cast<Y*>(a.y) + i, group, static_cast<uint64_t>(n) * sizeof(Y));
    }
  });
}
