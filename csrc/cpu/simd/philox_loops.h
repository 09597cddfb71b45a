// Philox for many counters. Included once per instruction set, before the loops that use it.

// words[w][i]: word w of counter i, replaced by that of its output. Round by round and word by
// word: the inner loop is over counters, so that it vectorises.
template <int64_t most>
void philox_rounds(uint32_t (&words)[4][most], int64_t count, uint64_t seed) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    PhiloxKey key = philox_key(seed, round);
    for (int64_t i = 0; i < count; ++i) {
      PhiloxWords c = {{words[0][i], words[1][i], words[2][i], words[3][i]}};
      c = philox_round(c, key);
      words[0][i] = c.word[0];
      words[1][i] = c.word[1];
      words[2][i] = c.word[2];
      words[3][i] = c.word[3];
    }
  }
}
