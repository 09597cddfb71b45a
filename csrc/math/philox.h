// Philox4x32-10, a stateless random number generator: its output is a function of a counter and a
// key. Source: Parallel random numbers: as easy as 1, 2, 3 (Salmon et al., 2011).
#pragma once

#include "hd.h"

namespace mixprec {

struct PhiloxWords {
  uint32_t word[4];
};

MIXPREC_HD uint32_t high_word(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

struct PhiloxKey {
  uint32_t low, high;
};

MIXPREC_HD PhiloxWords philox_round(PhiloxWords c, PhiloxKey k) {
  uint32_t high0 = high_word(0xD2511F53u, c.word[0]), low0 = 0xD2511F53u * c.word[0];
  uint32_t high1 = high_word(0xCD9E8D57u, c.word[2]), low1 = 0xCD9E8D57u * c.word[2];
  return {{high1 ^ c.word[1] ^ k.low, low1, high0 ^ c.word[3] ^ k.high, low0}};
}

constexpr int kPhiloxRounds = 10;
MIXPREC_HD PhiloxKey philox_key(uint64_t seed, int round) {
  uint32_t r = static_cast<uint32_t>(round);
  return {static_cast<uint32_t>(seed) + r * 0x9E3779B9u,
          static_cast<uint32_t>(seed >> 32) + r * 0xBB67AE85u};
}

MIXPREC_HD PhiloxWords philox(PhiloxWords c, uint64_t seed) {
  for (int round = 0; round < kPhiloxRounds; ++round) c = philox_round(c, philox_key(seed, round));
  return c;
}

// The random bits of one array of one param at one step are a function of these.
struct RandomStream {
  uint64_t seed;
  uint32_t step;
  uint32_t index_and_stream;  // index of the param + stream * 2^30
};
enum Stream : uint32_t { kParamStream, kFirstStateStream, kSecondStateStream, kBlockStream };

MIXPREC_HD RandomStream random_stream(int64_t seed, int64_t step, int64_t index, Stream stream) {
  return {static_cast<uint64_t>(seed), static_cast<uint32_t>(step),
          static_cast<uint32_t>(index) + (static_cast<uint32_t>(stream) << 30)};
}

// The bits of elements 8 * eighth to 8 * eighth + 7, 16 bits each; random16 returns those of
// element j.
MIXPREC_HD PhiloxWords random_words(const RandomStream& s, int64_t eighth) {
  uint64_t e = static_cast<uint64_t>(eighth);
  uint32_t low = static_cast<uint32_t>(e), high = static_cast<uint32_t>(e >> 32);
  return philox({{low, high, s.step, s.index_and_stream}}, s.seed);
}
MIXPREC_HD uint32_t random16(const PhiloxWords& w, int j) {
  return (w.word[j / 2] >> (16 * (j % 2))) & 0xFFFFu;
}

}  // namespace mixprec
