// attention_backward: the weights of each tile are computed again from the logsumexp, as in
// FlashAttention-2 (Dao, 2023).
#include "cpu/attention_mask.h"

namespace mixprec::cpu {

namespace {

static_assert(kOnes >= kTileSide + 64);  // factors of the rows of a tile, in whole micro-tiles

struct Range {
  int64_t begin, end;
};

// What one step of backward computes: from `heads` of q, `rows` and `keys`, which begin with a
// tile, the gradients of these keys or those of these queries, which need all of the others; or
// both.
struct Part {
  int64_t b, kv_head;
  Range heads, rows, keys;
  bool for_keys, for_queries;
};

// The scratch memory of backward: all of a head of k and v, and of one of the heads of q that read
// it.
struct Backward {
  const AttentionKernel& kernel;
  const Sizes& size;
  Strides ld;
  int64_t keys, queries;  // padded
  Columns k, v, out_tile;
  uint32_t *k_rows, *q, *g, *q_rows, *g_rows, *weights_t, *grads, *grads_t;
  float *scores, *weight_grads, *dq, *dk, *dv, *shared, *carried;
  uint32_t* g_tile;
  int64_t packed_k = -1, packed_q = -1;  // the heads, of all batches

  Backward(Parts& parts, const AttentionKernel& kernel, const Sizes& size)
      : kernel(kernel),
        size(size),
        ld(kernel, size.d),
        keys(round_up(size.keys, kTileSide)),
        queries(round_up(size.queries, kTileSide)),
        k(parts, kernel, size.keys, size.d),
        v(parts, kernel, size.keys, size.d),
        out_tile(parts, kernel, kTileSide, size.d) {
    parts.take(keys / kernel.pair * ld.by_rows, k_rows);
    parts.take(queries * ld.along, q, g);
    q_rows = q, g_rows = g;
    if (kernel.pair > 1) parts.take(queries / kernel.pair * ld.by_rows, q_rows, g_rows);
    parts.take(kTileSide * kTileLd, weights_t, grads, grads_t);
    parts.take((kTileSide + 1) * kTileLd, scores, weight_grads);
    parts.take(queries * ld.by_rows, dq);
    parts.take(keys * ld.by_rows, dk, dv);
    parts.take(queries, shared);
    parts.take(kTileLd, carried);
    parts.take(out_tile.per_tile(), g_tile);
    if (kernel.pair == 1) {
      weights_t = reinterpret_cast<uint32_t*>(scores);
      grads = grads_t = reinterpret_cast<uint32_t*>(weight_grads);
    }
  }

  void pack_keys(const Heads& k_heads, const Heads& v_heads, int64_t b, int64_t h) {
    if (packed_k == b * size.kv_heads + h) return;
    packed_k = b * size.kv_heads + h;
    k.pack(kernel, k_heads, b, h, 0, size.keys, size.d);
    v.pack(kernel, v_heads, b, h, 0, size.keys, size.d);
    kernel.pack_by_rows(k_heads.dtype, k_heads.at(b, h, 0), k_heads.row, size.keys, size.d, k_rows,
                        ld.by_rows, keys);
    std::fill(dk, dk + keys * ld.by_rows, 0.0f);
    std::fill(dv, dv + keys * ld.by_rows, 0.0f);
  }

  // outs: the result, and what rounding has cut off it.
  void pack_queries(const Heads& q_heads, const Heads& g_heads, const std::vector<Heads>& outs,
                    int64_t b, int64_t h) {
    if (packed_q == b * size.heads + h) return;
    packed_q = b * size.heads + h;
    auto pack = [&](const Heads& x, uint32_t* along, uint32_t* by_rows) {
      kernel.pack(x.dtype, x.at(b, h, 0), x.row, size.queries, size.d, along, ld.along, queries);
      if (kernel.pair == 1) return;
      kernel.pack_by_rows(x.dtype, x.at(b, h, 0), x.row, size.queries, size.d, by_rows, ld.by_rows,
                          queries);
    };
    pack(q_heads, q, q_rows);
    pack(g_heads, g, g_rows);
    std::fill(shared, shared + queries, 0.0f);
    for (int64_t row = 0; row < size.queries; row += kTileSide) {
      int64_t count = std::min(kTileSide, size.queries - row);
      kernel.transpose(g + row * ld.along, ld.along, k.words, g_tile);
      for (const Heads& out : outs) {
        out_tile.pack(kernel, out, b, h, row, count, size.d);
        kernel.row_dots(g_tile, out_tile.data, k.words, shared + row);
      }
    }
    std::fill(dq, dq + queries * ld.by_rows, 0.0f);
  }

  // One tile: five products, or four, or three.
  void tile(const Part& part, const Mask& mask, int64_t h, int64_t row, int64_t key,
            const float* logsumexp) {
    Sight sight = mask.sight(part.b, h, row, key);
    if (sight == Sight::hidden) return;
    TileShape shape = size.tile(row, key);
    shape.masked = sight == Sight::mixed;
    auto scores_of = [&](const uint32_t* a, const Columns& b, float scale, float* c) {
      kernel.product({shape.rows, shape.keys, b.words, a + row * ld.along, ld.along, false,
                      b.tile(key), kTileLd, c, kTileLd, nullptr, scale,
                      shape.causal ? Seen::columns : Seen::all, shape.shift});
    };
    scores_of(q, k, size.scale, scores);
    if (shape.masked) mask.apply(kernel, shape, part.b, h, row, key, scores);
    scores_of(g, v, 1.0f, weight_grads);
    kernel.softmax_backward(shape, scores, weight_grads, logsumexp + row, shared + row, size.scale,
                            carried, weights_t, grads, grads_t);
    auto add_to_keys = [&](const uint32_t* a, const uint32_t* b, float* c) {
      kernel.product({shape.keys, size.d, ceil_div(shape.rows, kernel.pair), a, kTileLd, true,
                      b + row / kernel.pair * ld.by_rows, ld.by_rows, c + key * ld.by_rows,
                      ld.by_rows, ones(), 1.0f, shape.causal ? Seen::from : Seen::all,
                      shape.shift});
    };
    if (part.for_keys) {
      add_to_keys(weights_t, g_rows, dv);
      add_to_keys(grads_t, q_rows, dk);
    }
    if (!part.for_queries) return;
    kernel.product({shape.rows, size.d, ceil_div(shape.keys, kernel.pair), grads, kTileLd, false,
                    k_rows + key / kernel.pair * ld.by_rows, ld.by_rows, dq + row * ld.by_rows,
                    ld.by_rows, ones(), 1.0f, shape.causal ? Seen::until : Seen::all, shape.shift});
  }

  void store(const Heads& to, const float* x, int64_t b, int64_t h, Range range) {
    kernel.store_rows(to.dtype, x + range.begin * ld.by_rows, ld.by_rows, nullptr,
                      range.end - range.begin, size.d, to.at(b, h, range.begin), to.row, nullptr);
  }
};

// The parts in which threads compute: whole heads of k and v, or, where these are too few, first
// tiles of keys, then tiles of queries. Every sum has the same order in both.
std::vector<std::vector<Part>> parts_of(const Sizes& size) {
  Range rows{0, size.queries}, keys{0, size.keys};
  std::vector<Part> by_heads, by_keys, by_queries;
  auto tiles = [](Range all, const auto& f) {
    int64_t count = ceil_div(all.end, kTileSide);
    for (int64_t turn = 0; turn < count; ++turn) {
      int64_t begin = tile_at(turn, count) * kTileSide;
      f(Range{begin, std::min(begin + kTileSide, all.end)});
    }
  };
  for (int64_t b = 0; b < size.batch; ++b) {
    for (int64_t kv = 0; kv < size.kv_heads; ++kv) {
      Range heads{kv * size.group(), (kv + 1) * size.group()};
      by_heads.push_back({b, kv, heads, rows, keys, true, true});
      tiles(keys, [&](Range tile) { by_keys.push_back({b, kv, heads, rows, tile, true, false}); });
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        tiles(rows, [&](Range tile) {
          by_queries.push_back({b, kv, {h, h + 1}, tile, keys, false, true});
        });
      }
    }
  }
  int64_t enough = torch::stable::get_num_threads();
  if (static_cast<int64_t>(by_heads.size()) >= enough) return {by_heads};
  return {by_keys, by_queries};
}

}  // namespace

// g and out of q's shape; the remainder of out, or [0] for none; the rest as of attention -> the
// gradients of q, k and v
std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor g, Tensor q, Tensor k, Tensor v,
                                                      Tensor out, Tensor logsumexp,
                                                      Tensor remainder, bool causal, double scale,
                                                      MaybeTensor mask) {
  Sizes size = check(q, k, v, causal, scale, "attention_backward");
  STD_TORCH_CHECK(same_shape(g, q) && on_cpu(g) && is_float(dtype_of(g, "attention_backward")),
                  "attention_backward: g must have q's shape, fp32, bf16 or fp16");
  STD_TORCH_CHECK(same_shape(out, q) && on_cpu(out) && out.scalar_type() == q.scalar_type(),
                  "attention_backward: out must be as q");
  STD_TORCH_CHECK(logsumexp.dim() == 3 && logsumexp.size(0) == size.batch &&
                      logsumexp.size(1) == size.heads && logsumexp.size(2) == size.queries &&
                      logsumexp.scalar_type() == ScalarType::Float && on_cpu(logsumexp),
                  "attention_backward: logsumexp must be fp32 [B, H, T]");
  STD_TORCH_CHECK(remainder.scalar_type() == ScalarType::BFloat16 && on_cpu(remainder) &&
                      (remainder.numel() == 0 || same_shape(remainder, q)),
                  "attention_backward: remainder must be bf16, of q's shape or without elements");
  const Mask seen(mask, size, q.scalar_type(), "attention_backward");
  ScalarType grad_dtype = g.scalar_type();
  g = torch::stable::to(g, q.scalar_type());  // once: dp and sum(g * out) are of the same numbers
  g = dense_rows(g), q = dense_rows(q), k = dense_rows(k), v = dense_rows(v);
  out = dense_rows(out);
  if (!logsumexp.is_contiguous()) logsumexp = to_contiguous(logsumexp);
  const float* all_logsumexp = static_cast<const float*>(logsumexp.const_data_ptr());
  Tensor dq = empty_like_rows(q, grad_dtype), dk = empty_like_rows(k, grad_dtype),
         dv = empty_like_rows(v, grad_dtype);
  Heads g_heads(g), q_heads(q), k_heads(k), v_heads(v), to_q(dq), to_k(dk), to_v(dv);
  std::vector<Heads> outs{Heads(out)};
  if (remainder.numel() > 0) outs.emplace_back(remainder = dense_rows(remainder));
  const AttentionKernel& kernel = kernel_for(q_heads.dtype);
  for (const std::vector<Part>& parts : parts_of(size)) {
    auto run = [&](int64_t begin, int64_t end) {
      Scratch once;
      auto here = in_scratch<Backward>(once, kernel, size);
      for (int64_t i = begin; i < end; ++i) {
        const Part& part = parts[i];
        here.pack_keys(k_heads, v_heads, part.b, part.kv_head);
        for (int64_t h = part.heads.begin; h < part.heads.end; ++h) {
          here.pack_queries(q_heads, g_heads, outs, part.b, h);
          const float* head_logsumexp = all_logsumexp + (part.b * size.heads + h) * size.queries;
          for (int64_t key = part.keys.begin; key < part.keys.end; key += kTileSide) {
            std::fill(here.carried, here.carried + kTileLd, 0.0f);
            int64_t first = causal ? std::max(key, part.rows.begin) : part.rows.begin;
            for (int64_t row = first; row < part.rows.end; row += kTileSide) {
              here.tile(part, seen, h, row, key, head_logsumexp);
            }
          }
          if (part.for_queries) here.store(to_q, here.dq, part.b, h, part.rows);
        }
        if (!part.for_keys) continue;
        here.store(to_k, here.dk, part.b, part.kv_head, part.keys);
        here.store(to_v, here.dv, part.b, part.kv_head, part.keys);
      }
    };
    torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), 1, run);
  }
  return {dq, dk, dv};
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("attention_backward", TORCH_BOX(&mixprec::cpu::attention_backward));
}
