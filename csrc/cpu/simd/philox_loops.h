// Philox for many counters. Included once per instruction set, before the loops that use it.

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
