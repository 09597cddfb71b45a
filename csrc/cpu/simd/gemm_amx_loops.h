// Loops of gemm for the tiles of amx_tiles.h: words of two bf16 numbers, as in gemm_bf16_loops.h,
// of whose packing b's panels are. A panel of a holds, for each 16 words of K, its 16 or 32 rows,
// each of these words: a tile is loaded whole. Included by loops_avx512.cpp.

constexpr int kTileWords = 16;  // of K, to a multiple of which both operands have zeros

// b's panels, and those of a before `in_rows`.
template <int usual_width>
bool pack_padded(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                 int64_t k, uint32_t* out, int64_t words, int64_t width) {
  bool lost = pack_bf16<usual_width>(dtype, src, stride_i, stride_k, rows, k, out, words, width);
  for (int64_t row = 0; row < rows; row += width) {
    uint32_t* panel = out + row * words;
    for (int64_t i = (k + 1) / 2 * width; i < words * width; ++i) panel[i] = 0;
  }
  return lost;
}

// Of a panel: 16 words of `width` rows, [16][width], become [width][16].
inline void in_rows(uint32_t* block, int64_t width) {
  Words rows[2][kLanes];
  for (int64_t half = 0; half < width / kLanes; ++half) {
#pragma GCC unroll 16
    for (int w = 0; w < kLanes; ++w) {
      __builtin_memcpy(&rows[half][w], block + w * width + half * kLanes, 64);
    }
  }
  for (int64_t half = 0; half < width / kLanes; ++half) {
    transpose_words(rows[half]);
    __builtin_memcpy(block + half * kLanes * kTileWords, rows[half], sizeof rows[half]);
  }
}

// The lines of 32 numbers of a row of bf16, of 64 of fp8, from `x` on; zeros from `count` on.
inline void load_lines(const Bf16* x, int64_t count, Least& least, __m512i (&lines)[1]) {
  lines[0] = _mm512_maskz_loadu_epi16(static_cast<uint32_t>((uint64_t{1} << count) - 1), x);
  least.see<Bf16>(lines[0]);
}
template <class E>
inline void load_lines(const E* x, int64_t count, Least&, __m512i (&lines)[2]) {
  const uint64_t mask = count < 64 ? (uint64_t{1} << count) - 1 : ~uint64_t{0};
  __m512i low, high;
  decode_bytes<E>(_mm512_maskz_loadu_epi8(mask, x), low, high);
  lines[0] = words_of_bytes<0, 2, 1>(low, high);
  lines[1] = words_of_bytes<32, 2, 1>(low, high);
}

// Rows that are contiguous along K need no transposition.
template <class T>
bool pack_rows_along_k(const T* src, int64_t stride_i, int64_t rows, int64_t k, uint32_t* out,
                       int64_t words, int64_t width) {
  constexpr int64_t numbers = 64 / sizeof(T), count_lines = numbers / 32;
  Least least;
  for (int64_t row = 0; row % width != 0 || row < rows; ++row) {
    uint32_t* to = out + row / width * width * words + row % width * kTileWords;
    const int64_t there = row < rows ? k : 0;
    for (int64_t first = 0; first < 2 * words; first += numbers) {
      int64_t count = there - first < numbers ? there - first : numbers;
      __m512i lines[count_lines] = {};
      if (count > 0) load_lines(src + row * stride_i + first, count, least, lines);
      for (int64_t j = 0; j < count_lines && first / 2 + j * kTileWords < words; ++j) {
        _mm512_storeu_si512(to + (first / 2 + j * kTileWords) * width, lines[j]);
      }
    }
  }
  return least.any_subnormal();
}

bool pack_in_rows(Dtype dtype, const void* src, int64_t stride_i, int64_t stride_k, int64_t rows,
                  int64_t k, uint32_t* out, int64_t words, int64_t width) {
  if (stride_k == 1) {
    return with_low(dtype, [&]<class T>(Type<T>) {
      if constexpr (!__is_same(T, Fp16)) {
        return pack_rows_along_k(static_cast<const T*>(src), stride_i, rows, k, out, words, width);
      }
      return false;
    });
  }
  const auto pack = width == kLanes ? pack_padded<kLanes> : pack_padded<2 * kLanes>;
  bool lost = pack(dtype, src, stride_i, stride_k, rows, k, out, words, width);
  for (int64_t row = 0; row < rows; row += width) {
    for (int64_t w = 0; w < words; w += kTileWords) {
      in_rows(out + row * words + w * width, width);
    }
  }
  return lost;
}

// c = or += a panel of a times one of b, in blocks of 2 x 2 tiles, or 1 x 2.
template <class Tiles, int rows>
void tile_micro(int64_t words, const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
                bool accumulate) {
  constexpr bool both = rows == 2 * kLanes;
  const int64_t ld = ldc * static_cast<int64_t>(sizeof(float));
  float* lower = c + kLanes * ldc;
  Tiles t;
  if (accumulate) {
    t.template load<0>(c, ld);
    t.template load<1>(c + kLanes, ld);
    if constexpr (both) t.template load<2>(lower, ld), t.template load<3>(lower + kLanes, ld);
  } else {
    t.template zero<0>();
    t.template zero<1>();
    if constexpr (both) t.template zero<2>(), t.template zero<3>();
  }
  for (int64_t w = 0; w < words; w += kTileWords, a += rows * kTileWords, b += NR * kTileWords) {
    t.template load<4>(a, 64);
    t.template load<6>(b, NR * sizeof *b);
    t.template load<7>(b + kLanes, NR * sizeof *b);
    t.template dot<0, 4, 6>();
    t.template dot<1, 4, 7>();
    if constexpr (both) {
      t.template load<5>(a + kLanes * kTileWords, 64);
      t.template dot<2, 5, 6>();
      t.template dot<3, 5, 7>();
    }
  }
  t.template store<0>(c, ld);
  t.template store<1>(c + kLanes, ld);
  if constexpr (both) t.template store<2>(lower, ld), t.template store<3>(lower + kLanes, ld);
}

template <class Tiles>
constexpr GemmKernel make_gemm_amx() {
  GemmKernel kernel{2 * kLanes, NR, 2, kTileWords, kLanes, pack_in_rows, pack_padded<NR>, {}};
  kernel.micros[kLanes] = tile_micro<Tiles, kLanes>;
  kernel.micros[2 * kLanes] = tile_micro<Tiles, 2 * kLanes>;
  return kernel;
}
