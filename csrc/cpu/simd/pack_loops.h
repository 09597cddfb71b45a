// Loops of pack. Included once per instruction set.
//
// Each loop over a block, which stays in the L1 cache, does one thing and vectorises: random bits,
// ranges, a byte for every code, codes of fewer bits.

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

template <class X>
struct BitsOf {
  using Signed = int16_t;
  using Unsigned = uint16_t;
};
template <>
struct BitsOf<float> {
  using Signed = int32_t;
  using Unsigned = uint32_t;
};

template <class X>
void limits_of(const X* __restrict x, float* lowest, float* highest) {
  using Signed = typename BitsOf<X>::Signed;
  using Unsigned = typename BitsOf<X>::Unsigned;
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
  for (int64_t g = 0; g < groups; ++g) limits_of(x + g * kPackGroup, b.low + g, b.high + g);
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
  with_float(a.dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    const X* x = static_cast<const X*>(a.x);
    PackBuffers buffers = {};
    int64_t whole = end - end % kPackGroup;
    for (int64_t i = begin; i < whole; i += kPackBlock) {
      int64_t n = whole - i < kPackBlock ? whole - i : kPackBlock;
      const X* next = i + 2 * kPackBlock <= whole ? x + i + kPackBlock : nullptr;
      pack_block(a, x + i, i, n, n, next, buffers);
    }
    if (whole < end) {
      X last[kPackGroup];  // filled up with what changes neither limit
      for (int64_t i = 0; i < kPackGroup; ++i) last[i] = x[whole + i < end ? whole + i : whole];
      pack_block<X>(a, last, whole, kPackGroup, end - whole, nullptr, buffers);
    }
  });
}
