// Loops of pack and unpack, and Philox for many counters. Included once per instruction set.
//
// Each loop over a block, which stays in the L1 cache, does one thing and vectorises: random bits,
// ranges, a byte for every code, codes of fewer bits.

constexpr int kCounters = sizeof(Lanes) / 8;
constexpr int kChains = 4;                        // a round waits for the one before it
constexpr int64_t kAtOnce = kCounters * kChains;  // counters; a divisor of the blocks of the loops

// philox_round over counters side by side: each word in the low half of 64 bits, where the product
// takes it from; the high halves are of no meaning.
inline void philox_round(Lanes (&c)[4], PhiloxKey k) {
  Lanes first = product(c[0], 0xD2511F53u), second = product(c[2], 0xCD9E8D57u);
  c[0] = (second >> 32) ^ c[1] ^ k.low;
  c[1] = second;
  c[2] = (first >> 32) ^ c[3] ^ k.high;
  c[3] = first;
}

// The words of counters (first + i, third, fourth) for i < count, in order; up to the next multiple
// of kAtOnce is written.
__attribute__((noinline)) void random_words(int64_t first, uint32_t third, uint32_t fourth,
                                            uint64_t seed, int64_t count,
                                            uint64_t* __restrict out) {
  PhiloxKey keys[kPhiloxRounds];
  for (int round = 0; round < kPhiloxRounds; ++round) keys[round] = philox_key(seed, round);
  constexpr Lanes low = Lanes{} + 0xFFFFFFFFu;
  for (int64_t i = 0; i < count; i += kAtOnce, out += 2 * kAtOnce) {
    Lanes s[kChains][4];
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      Lanes counter = kIota + static_cast<uint64_t>(first + i + c * kCounters);
      s[c][0] = counter;
      s[c][1] = counter >> 32;
      s[c][2] = Lanes{} + third;
      s[c][3] = Lanes{} + fourth;
    }
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) philox_round(s[c], keys[round]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      Lanes front = (s[c][0] & low) | s[c][1] << 32;
      Lanes back = (s[c][2] & low) | s[c][3] << 32;
      Lanes pairs[2] = {__builtin_shuffle(front, back, kFirstPairs),
                        __builtin_shuffle(front, back, kLastPairs)};
      __builtin_memcpy(out + 2 * c * kCounters, pairs, sizeof pairs);
    }
  }
}

constexpr int64_t kPackBlock = 16 * kPackGroup;  // elements

constexpr int64_t kPackGroups = kPackBlock / kPackGroup;

struct PackBuffers {
  alignas(64) uint64_t words[kPackBlock / 8];  // random bits
  alignas(64) uint8_t codes[kPackBlock];
  float low[kPackGroups], high[kPackGroups];
  float minimum[kPackGroups], factor[kPackGroups], dither[kPackGroups];
  uint32_t range[kPackGroups];
};

inline void pack_random(const PackArrays& a, int64_t element, int64_t n, PackBuffers& b) {
  static_assert(kPackBlock / kPackRandom % kAtOnce == 0);
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);  // the lowest byte comes first
  random_words(element / kPackRandom, static_cast<uint32_t>(a.counter),
               static_cast<uint32_t>(a.counter >> 32), a.seed, n / kPackRandom, b.words);
  for (int64_t g = 0; g < kPackGroups; ++g) {
    Lanes sum = {}, next;
    for (int i = 0; i < kPackGroup / 8; i += kCounters) {
      __builtin_memcpy(&next, b.words + g * kPackGroup / 8 + i, sizeof next);
      sum ^= next;
    }
    uint64_t both = 0;
    for (int i = 0; i < kCounters; ++i) both ^= sum[i];
    b.dither[g] = pack_dither(both);
  }
}

template <class Signed, class Unsigned, class X>
void limits_of(const X* __restrict x, float* lowest, float* highest) {
  Unsigned u;
  __builtin_memcpy(&u, x, sizeof u);
  Signed most = static_cast<Signed>(u);
  Unsigned farthest = u, nearest = u;
  for (int i = 0; i < kPackGroup; ++i) {
    __builtin_memcpy(&u, x + i, sizeof u);
    Signed s = static_cast<Signed>(u);
    most = s > most ? s : most;
    farthest = u > farthest ? u : farthest;
    nearest = u < nearest ? u : nearest;
  }
  Limits<Signed, Unsigned> limits = {most, farthest, nearest};
  Unsigned least = limits.least(), greatest = limits.greatest();
  X low, high;
  __builtin_memcpy(&low, &least, sizeof low);
  __builtin_memcpy(&high, &greatest, sizeof high);
  *lowest = decode(low);
  *highest = decode(high);
}

template <class X>
void steps_of(const X* __restrict x, float minimum, float factor, float dither,
              uint16_t* __restrict steps) {
  for (int i = 0; i < kPackGroup; ++i) {
    steps[i] = static_cast<uint16_t>(pack_steps(decode(x[i]), minimum, factor, dither));
  }
}

// Two elements of 16 bits: they are processed in one lane, and none moves to another.
typedef uint32_t Pair __attribute__((may_alias, aligned(2)));

inline void steps_of(const Bf16* __restrict x, float minimum, float factor, float dither,
                     uint16_t* __restrict steps) {
  const Pair* in = reinterpret_cast<const Pair*>(x);
  Pair* out = reinterpret_cast<Pair*>(steps);
  for (int i = 0; i < kPackGroup / 2; ++i) {
    uint32_t first = pack_steps(bits_float(in[i] << 16), minimum, factor, dither);
    uint32_t second = pack_steps(bits_float(in[i] & 0xFFFF0000u), minimum, factor, dither);
    out[i] = first | second << 16;
  }
}

// A byte for each code; words: the random bits.
template <class X>
void encode_group(const X* x, float minimum, float factor, float dither, uint16_t limit,
                  const uint64_t* words, uint8_t* __restrict codes) {
  typedef uint8_t Byte __attribute__((may_alias));
  const Byte* __restrict random = reinterpret_cast<const Byte*>(words);
  alignas(64) uint16_t steps[kPackGroup];
  steps_of(x, minimum, factor, dither, steps);
  for (int i = 0; i < kPackGroup; ++i) codes[i] = pack_code(steps[i], random[i], limit);
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

__attribute__((noinline)) void ranges_of(PackBuffers& b, float levels) {
  for (int64_t g = 0; g < kPackGroups; ++g) {
    PackRange range = pack_range(b.low[g], b.high[g], levels);
    b.range[g] = range.minimum.bits | static_cast<uint32_t>(range.step.bits) << 16;
    b.minimum[g] = decode(range.minimum);
    b.factor[g] = pack_factor(range.step);
  }
}

// n elements, at most kPackBlock, in whole groups, of which the codes of the first `kept` are kept;
// next: null, or a block that is fetched meanwhile.
template <class X>
void pack_block(const PackArrays& a, const X* x, int64_t begin, int64_t n, int64_t kept,
                const X* next, PackBuffers& b) {
  int64_t groups = n / kPackGroup;
  int32_t levels = (1 << a.bits) - 1;
  uint16_t limit = static_cast<uint16_t>(levels << 8);
  pack_random(a, begin, n, b);
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (sizeof(X) == 4) {
      limits_of<int32_t, uint32_t>(x + g * kPackGroup, b.low + g, b.high + g);
    } else {
      limits_of<int16_t, uint16_t>(x + g * kPackGroup, b.low + g, b.high + g);
    }
  }
  ranges_of(b, static_cast<float>(levels));
  for (int64_t g = 0; g < groups; ++g) {
    int64_t first = g * kPackGroup;
    if (next != nullptr) prefetch_row(next + first, kPackGroup);
    if (is_nonfinite(b.minimum[g])) {
      __builtin_memset(b.codes + first, 0, kPackGroup);
    } else {
      encode_group(x + first, b.minimum[g], b.factor[g], b.dither[g], limit, b.words + first / 8,
                   b.codes + first);
    }
  }
  for (int64_t i = kept; i < n; ++i) b.codes[i] = 0;
  int64_t size = packed_bytes(kept, a.bits);
  uint8_t* out = a.codes + begin * a.bits / 8;
  if (a.bits == 8) {
    __builtin_memcpy(out, b.codes, static_cast<uint64_t>(size));
  } else {
    join_codes(a.bits, b.codes, out, size);
  }
  __builtin_memcpy(a.ranges + 2 * (begin / kPackGroup), b.range,
                   static_cast<uint64_t>(groups) * sizeof(PackRange));
}

void pack(const PackArrays& a, int64_t begin, int64_t end) {
  with_float(a.dtype, [&]<class X>(Type<X>) {
    const X* x = static_cast<const X*>(a.x);
    PackBuffers buffers = {};
    int64_t full = end - end % kPackGroup;
    for (int64_t i = begin; i < full; i += kPackBlock) {
      int64_t n = full - i < kPackBlock ? full - i : kPackBlock;
      const X* next = i + 2 * kPackBlock <= full ? x + i + kPackBlock : nullptr;
      pack_block(a, x + i, i, n, n, next, buffers);
    }
    if (full < end) {
      X last[kPackGroup];  // filled up with what changes neither limit
      for (int64_t i = 0; i < kPackGroup; ++i) last[i] = x[full + i < end ? full + i : full];
      pack_block<X>(a, last, full, kPackGroup, end - full, nullptr, buffers);
    }
  });
}

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
  with_float(a.dtype, [&]<class Y>(Type<Y>) {
    auto* loop = a.bits == 8 ? unpack<8, Y> : a.bits == 4 ? unpack<4, Y> : unpack<2, Y>;
    loop(a, begin, end);
  });
}
