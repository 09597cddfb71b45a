// The loops of attention that words of two bf16 numbers, rounded in registers, have of their own.
// Included after product_loops.h.

static_assert(kLanes == 16);

// Word i: low[i], high[i].
inline void store_pairs(uint32_t* out, Vec low, Vec high) {
  constexpr Words32 alternating = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  store_words(out, Registers::look_up(in_bf16(low, high), alternating));
}

// A row of what softmax_backward reads; `seen` of a row that does not exist is 0.
struct BackwardRow {
  const float *scores, *weight_grads;
  int64_t seen;
  Vec logsumexp, shared, scale;

  Vec exponent(int64_t i) const { return load(scores + i) - logsumexp; }
  // Of these weights at i: the gradients of the scores. Both are 0 from `seen` on.
  Vec grads(int64_t i, Vec& weights) const {
    Vec g = weights * (load(weight_grads + i) - shared) * scale;
    if (i + 16 <= seen) return g;
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints sees = lanes < static_cast<int32_t>(seen - i);
    weights = sees ? weights : Vec{};
    return sees ? g : Vec{};
  }
};

// Rounds `weights` of a query, with what was carried from the queries before it, to BF16, and
// carries what that cuts off. The sums over queries, which are those of dv, keep the sums of the
// weights. A query from which a mask hides the key has a weight of 0, and leaves what was carried
// to the next.
template <bool masked>
inline Vec rounded_weights(Vec weights, Ints hidden, float* carried) {
  const Vec x = weights + load(carried);
  // (2^16 + 1) x, rounded to 24 bits, less 2^16 x: x rounded to 8 bits. Of a subnormal x that
  // leaves more bits, which the mask cuts off.
  const Vec nearest = fma(x, broadcast(-65536.0f), x * broadcast(65537.0f));
  Vec rounded = (Vec)((Uints16)nearest & 0xFFFF0000u);
  if constexpr (masked) rounded = hidden ? Vec{} : rounded;
  store(carried, x - rounded);
  return rounded;
}

// Word i: low[i], high[i], which are BF16 numbers.
inline void store_bf16_pairs(uint32_t* out, Vec low, Vec high) {
  store_words(out, (Words32)((Uints16)low >> 16 | (Uints16)high));
}

// Two rows at a time, 32 columns of each.
template <bool masked>
void softmax_backward_bf16_of(const TileShape& tile, float* scores, float* weight_grads,
                              const float* logsumexp, const float* shared, float scale,
                              float* carried, uint32_t* weights_t, uint32_t* grads,
                              uint32_t* grads_t) {
  auto row_at = [&](int64_t r) -> BackwardRow {
    bool exists = r < tile.rows;
    return {scores + r * kTileLd,
            weight_grads + r * kTileLd,
            exists ? tile.seen(r) : 0,
            broadcast(exists ? logsumexp[r] : 0.0f),
            broadcast(exists ? shared[r] : 0.0f),
            broadcast(scale)};
  };
  for (int64_t r = 0; r < tile.rows; r += 2) {
    const BackwardRow low = row_at(r), high = row_at(r + 1);
    uint32_t *low_grads = grads + r * kTileLd, *high_grads = low_grads + kTileLd;
    uint32_t *weight_pairs = weights_t + r / 2 * kTileLd, *grad_pairs = grads_t + r / 2 * kTileLd;
    int64_t end = ((low.seen > high.seen ? low.seen : high.seen) + 31) / 32 * 32;
    for (int64_t i = 0; i < end; i += 32) {
      Vec w[4] = {low.exponent(i), low.exponent(i + 16), high.exponent(i), high.exponent(i + 16)};
      Ints hidden[4] = {};
      if constexpr (masked) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) hidden[j] = w[j] == broadcast(-__builtin_inff());
      }
      exponentials(w);
      const Vec g[4] = {low.grads(i, w[0]), low.grads(i + 16, w[1]), high.grads(i, w[2]),
                        high.grads(i + 16, w[3])};
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        float* key_carried = carried + i + j * 16;
        const Vec first = rounded_weights<masked>(w[j], hidden[j], key_carried);
        store_bf16_pairs(weight_pairs + i + j * 16, first,
                         rounded_weights<masked>(w[j + 2], hidden[j + 2], key_carried));
        store_pairs(grad_pairs + i + j * 16, g[j], g[j + 2]);
      }
      store_words(low_grads + i / 2, in_bf16(g[0], g[1]));
      store_words(high_grads + i / 2, in_bf16(g[2], g[3]));
    }
    zero_words(weight_pairs, end, kTileSide);
    zero_words(grad_pairs, end, kTileSide);
    zero_words(low_grads, end / 2, kTileSide / 2);
    zero_words(high_grads, end / 2, kTileSide / 2);
  }
}

void softmax_backward_bf16(const TileShape& tile, float* scores, float* weight_grads,
                           const float* logsumexp, const float* shared, float scale, float* carried,
                           uint32_t* weights_t, uint32_t* grads, uint32_t* grads_t) {
  const auto run = tile.masked ? softmax_backward_bf16_of<true> : softmax_backward_bf16_of<false>;
  run(tile, scores, weight_grads, logsumexp, shared, scale, carried, weights_t, grads, grads_t);
}

constexpr AttentionKernel attention_kernel{
    kPair,       pack,    pack_by_rows,          transpose, product,
    mask_scores, softmax, softmax_backward_bf16, row_dots,  store_rows,
};
