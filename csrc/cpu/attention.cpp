// attention: tiles of queries x keys in the manner of FlashAttention-2 (Dao, 2023). Each thread
// packs the keys and values of a head once.
#include <cmath>

#include "cpu/attention_mask.h"

namespace mixprec::cpu {

namespace {

// The scratch memory of forward. in_order: the sums over keys are added one key after the other,
// from the maximum of the whole row, so that a row has the same bits wherever its keys stand among
// keys that it does not see. The sum of the weights is then one more feature of v, which is 1.
struct Forward {
  const AttentionKernel& kernel;
  const Sizes& size;
  bool in_order;
  int64_t features;
  Strides ld;
  Columns k;
  uint32_t *v, *q, *weights;
  float *scores, *out, *maximum, *sum, *factor;

  Forward(Parts& parts, const AttentionKernel& kernel, const Sizes& size, bool in_order)
      : kernel(kernel),
        size(size),
        in_order(in_order),
        features(size.d + in_order),
        ld(kernel, features),
        k(parts, kernel, size.seen_keys(), size.d) {
    parts.take(round_up(size.seen_keys(), kTileSide) / kernel.pair * ld.by_rows, v);
    parts.take(kTileSide * ld.along, q);
    parts.take(kTileSide * kTileLd, weights, scores);
    parts.take(kTileSide * ld.by_rows, out);
    parts.take(kTileSide, maximum, sum, factor);
    if (kernel.pair == 1) weights = reinterpret_cast<uint32_t*>(scores);
  }

  void pack(const Heads& k_heads, const Heads& v_heads, int64_t b, int64_t h) {
    int64_t count = size.seen_keys();
    k.pack(kernel, k_heads, b, h, 0, count, size.d);
    kernel.pack_by_rows(v_heads.dtype, v_heads.at(b, h, 0), v_heads.row, count, size.d, v,
                        ld.by_rows, round_up(count, kTileSide));
    for (int64_t key = 0; in_order && key < round_up(count, kTileSide); ++key) {
      uint32_t* rest = v + key * ld.by_rows + size.d;
      std::fill(rest, v + (key + 1) * ld.by_rows, 0);
      *rest = float_bits(1.0f);
    }
  }

  // The scores of these queries with a tile of keys; false: none is seen.
  bool score(const Mask& mask, int64_t b, int64_t h, int64_t row, int64_t key, TileShape& tile) {
    Sight sight = mask.sight(b, h, row, key);
    if (sight == Sight::hidden) return false;
    tile = size.tile(row, key);
    tile.masked = sight == Sight::mixed;
    kernel.product({tile.rows, tile.keys, k.words, q, ld.along, false, k.tile(key), kTileLd, scores,
                    kTileLd, nullptr, size.scale, tile.causal ? Seen::columns : Seen::all,
                    tile.shift});
    if (tile.masked) mask.apply(kernel, tile, b, h, row, key, scores);
    return true;
  }

  // The queries from `row` on; their results are in `out`, to be multiplied by `factor`.
  void rows(const Heads& q_heads, const Mask& mask, int64_t b, int64_t h, int64_t row,
            float* logsumexp) {
    int64_t count = std::min(kTileSide, size.queries - row);
    kernel.pack(q_heads.dtype, q_heads.at(b, h, row), q_heads.row, count, size.d, q, ld.along,
                kTileSide);
    std::fill(out, out + kTileSide * ld.by_rows, 0.0f);
    std::fill(maximum, maximum + kTileSide, -kInfinity);
    std::fill(sum, sum + kTileSide, 0.0f);
    std::fill(factor, factor + kTileSide, 0.0f);
    int64_t end = size.keys_of(row + count - 1);
    TileShape tile;
    for (int64_t key = 0; in_order && end > kTileSide && key < end; key += kTileSide) {
      for (int64_t r = 0, any = score(mask, b, h, row, key, tile); any && r < tile.rows; ++r) {
        const float* x = scores + r * kTileLd;
        for (int64_t i = 0; i < tile.seen(r); ++i) maximum[r] = std::max(maximum[r], x[i]);
      }
    }
    for (int64_t key = 0; key < end; key += kTileSide) {
      if (!score(mask, b, h, row, key, tile)) continue;
      kernel.softmax(tile, scores, maximum, sum, factor, weights);
      kernel.product({count, features, ceil_div(tile.keys, kernel.pair), weights, kTileLd, false,
                      v + key / kernel.pair * ld.by_rows, ld.by_rows, out, ld.by_rows,
                      in_order ? nullptr : factor, 1.0f, tile.causal ? Seen::until : Seen::all,
                      tile.shift, in_order});
    }
    for (int64_t r = 0; r < count; ++r) {
      if (in_order) sum[r] = out[r * ld.by_rows + size.d];
      logsumexp[r] = end > 0 ? maximum[r] + std::log(sum[r]) : -kInfinity;
      factor[r] = end > 0 ? 1.0f / sum[r] : 0.0f;
      if (sum[r] == 0.0f && mask.hides_all(b, h, row + r)) logsumexp[r] = factor[r] = 0.0f;
    }
  }
};

}  // namespace

// q [B, H, T, D], k and v [B, H_kv, S, D], mask [B or 1, H or 1, T, S] -> out (q's shape),
// logsumexp fp32 [B, H, T], remainder of out, bf16: q's shape, or [0] of fp32
std::tuple<Tensor, Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, bool causal,
                                             double scale, MaybeTensor mask,
                                             std::optional<bool> in_order) {
  Sizes size = check(q, k, v, causal, scale, "attention");
  const Mask seen(mask, size, q.scalar_type(), "attention");
  q = dense_rows(q), k = dense_rows(k), v = dense_rows(v);
  Tensor out = empty_like_rows(q, q.scalar_type());
  Tensor logsumexp = empty({size.batch, size.heads, size.queries}, ScalarType::Float);
  bool rounds = q.scalar_type() != ScalarType::Float;
  Tensor remainder =
      rounds ? empty_like_rows(q, ScalarType::BFloat16) : empty({0}, ScalarType::BFloat16);
  float* all_logsumexp = static_cast<float*>(logsumexp.mutable_data_ptr());
  Bf16* rest = static_cast<Bf16*>(remainder.mutable_data_ptr());  // in memory as out
  Heads q_heads(q), k_heads(k), v_heads(v), to(out);
  bool ordered = in_order.value_or(false);
  // Pairs of bf16 begin at even keys.
  const AttentionKernel& kernel = ordered ? loops().attention_f32 : kernel_for(q_heads.dtype);
  int64_t tiles = ceil_div(size.queries, kTileSide), total = size.batch * size.heads * tiles;
  torch::stable::parallel_for(0, total, 1, [&](int64_t begin, int64_t end) {
    Scratch once;
    auto here = in_scratch<Forward>(once, kernel, size, ordered);
    int64_t packed = -1;
    for (int64_t i = begin; i < end; ++i) {
      int64_t b = i / tiles / size.heads, h = i / tiles % size.heads, kv_head = h / size.group();
      int64_t row = tile_at(i % tiles, tiles) * kTileSide;
      if (packed != b * size.kv_heads + kv_head) {
        here.pack(k_heads, v_heads, b, kv_head);
        packed = b * size.kv_heads + kv_head;
      }
      here.rows(q_heads, seen, b, h, row,
                all_logsumexp + (b * size.heads + h) * size.queries + row);
      kernel.store_rows(to.dtype, here.out, here.ld.by_rows, here.factor,
                        std::min(kTileSide, size.queries - row), size.d, to.at(b, h, row), to.row,
                        rounds ? rest + to.index(b, h, row) : nullptr);
    }
  });
  return {out, logsumexp, remainder};
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("attention", TORCH_BOX(&mixprec::cpu::attention));
}
