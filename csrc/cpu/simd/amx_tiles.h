// Tiles of the matrix unit of Intel's processors (AMX), 16 rows of 16 words of 4 bytes each, and a
// model of them with the same functions, for tests on processors without AMX. Included once, by
// loops_avx512.cpp.
//
// dot<c, a, b>: a holds bf16 pairs along K in its rows, b pairs along K in its columns:
//
//   even[m, n] = sum over w of a[m, w].low * b[w, n].low      from 0, by fused multiply-adds,
//   odd[m, n]  = sum over w of a[m, w].high * b[w, n].high    w rising
//   c[m, n] += even[m, n] + odd[m, n]
//
// each rounded to nearest even in FP32; subnormal numbers, read or computed, are zero. Source:
// TDPBF16PS in Intel's Software Developer's Manual, volume 2.

// The processor's. One configuration, all tiles whole, is loaded before a product and given back
// after it: other libraries of the process have their own, and threads that hold tiles have them
// saved whenever they are interrupted.
struct AmxTiles {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  AmxTiles() {
    static constexpr Config config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~AmxTiles() { asm volatile("tilerelease"); }

  template <int t>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(t));
  }
  // stride: from a row to the next, in bytes.
  template <int t>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(t), "r"(from), "r"(stride) : "memory");
  }
  template <int t>
  void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(t), "r"(to), "r"(stride) : "memory");
  }
  template <int c, int a, int b>
  void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  }
};

struct AmxModel {
  Words tiles[8][16];

  template <int t>
  void zero() {
    for (Words& row : tiles[t]) row = Words{};
  }
  template <int t>
  void load(const void* from, int64_t stride) {
    const char* at = static_cast<const char*>(from);
    for (int i = 0; i < 16; ++i) __builtin_memcpy(&tiles[t][i], at + i * stride, 64);
  }
  template <int t>
  void store(void* to, int64_t stride) {
    char* at = static_cast<char*>(to);
    for (int i = 0; i < 16; ++i) __builtin_memcpy(at + i * stride, &tiles[t][i], 64);
  }
  // x, or a zero of its sign in place of subnormal numbers.
  static Vec normal(Vec x) {
    const Words bits = (Words)x;
    return (Vec)((bits & 0x7F800000u) == 0 ? bits & 0x80000000u : bits);
  }
  static Vec low(Words pairs) { return normal((Vec)(pairs << 16)); }
  static Vec high(Words pairs) { return normal((Vec)(pairs & 0xFFFF0000u)); }

  template <int c, int a, int b>
  void dot() {
    for (int m = 0; m < 16; ++m) {
      Vec even = {}, odd = {};
      for (int w = 0; w < 16; ++w) {
        const Words x = Words{} + tiles[a][m][w], y = tiles[b][w];
        even = normal(fma(low(x), low(y), even));
        odd = normal(fma(high(x), high(y), odd));
      }
      tiles[c][m] = (Words)normal(normal((Vec)tiles[c][m]) + normal(even + odd));
    }
  }
};
