// attention and attention_backward: tiles of queries x keys in the manner of FlashAttention-2 (Dao,
// 2023). Each thread packs the keys and values of a head once, and computes in fp32.
#include <cmath>
#include <limits>

#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/simd/loops.h"
#include "ops.h"

namespace mixprec::cpu {

namespace {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// [B, H, T, D] with adjacent features.
struct Heads {
  Dtype dtype;
  char* data;
  int64_t batch, head, row;  // strides

  explicit Heads(const Tensor& t)
      : dtype(dtype_of(t, "attention")),
        data(static_cast<char*>(const_cast<void*>(t.const_data_ptr()))),
        batch(t.strides()[0]),
        head(t.strides()[1]),
        row(t.strides()[2]) {}

  char* at(int64_t b, int64_t h, int64_t t) const {
    return data + (b * batch + h * head + t * row) * element_size(dtype);
  }
};

struct Sizes {
  int64_t batch, heads, kv_heads, queries, keys, d;
  bool causal;
  float scale;

  int64_t group() const { return heads / kv_heads; }
  int64_t seen_keys() const { return causal ? std::min(keys, queries) : keys; }
  // Of the tile of queries from `row`, keys from `key`.
  TileShape tile(int64_t row, int64_t key) const {
    int64_t count = std::min(kTileSide, keys - key), shift = row - key;
    return {std::min(kTileSide, queries - row), count, causal && shift < count - 1, shift};
  }
};

// Parts of a thread's scratch memory, one after the other.
class Parts {
 public:
  template <class T>
  T* take(int64_t count) {
    char* part = at_;
    at_ += round_up(count * 4, 64);
    return reinterpret_cast<T*>(part);
  }
  explicit Parts(void* memory) : at_(static_cast<char*>(memory)) {}
  int64_t bytes() const { return reinterpret_cast<int64_t>(at_); }

 private:
  char* at_;
};

constexpr int64_t kKept = 16 << 20;  // bytes of scratch that a thread keeps between calls

// T{Parts, args...} in memory of this thread, or, what is too large to be kept, in `once`. The size
// is found by placing T at null.
template <class T, class... Args>
T in_scratch(Scratch& once, const Args&... args) {
  static thread_local Scratch kept;
  Parts measured(nullptr);
  T{measured, args...};
  Parts parts((measured.bytes() > kKept ? once : kept).get(measured.bytes()));
  return T{parts, args...};
}

// The tile, of `count`, to compute at a turn: the first, the last, the second, ... Of a causal
// head one end has more to compute than the other, and threads that share it get equal parts.
int64_t tile_at(int64_t turn, int64_t count) {
  return turn % 2 == 0 ? turn / 2 : count - 1 - turn / 2;
}

// The row strides, in words, of what is packed along features and along rows.
struct Strides {
  int64_t along, by_rows;
  Strides(const AttentionKernel& kernel, int64_t d)
      : along(odd_lines(ceil_div(d, kernel.pair))), by_rows(odd_lines(d)) {}
};

// k or v of a head as the right factor of a product over features: [d / pair][kTileSide] per tile.
struct Columns {
  uint32_t *rows, *data;
  int64_t ld, words;

  Columns(Parts& parts, const AttentionKernel& kernel, int64_t count, int64_t d)
      : rows(parts.take<uint32_t>(kTileSide * odd_lines(ceil_div(d, kernel.pair)))),
        data(nullptr),
        ld(odd_lines(ceil_div(d, kernel.pair))),
        words(ceil_div(d, kernel.pair)) {
    data = parts.take<uint32_t>(ceil_div(count, kTileSide) * per_tile());
  }
  int64_t per_tile() const { return round_up(words, 16) * kTileLd; }
  const uint32_t* tile(int64_t key) const { return data + key / kTileSide * per_tile(); }

  void pack(const AttentionKernel& kernel, const Heads& x, int64_t b, int64_t h, int64_t count,
            int64_t d) {
    for (int64_t key = 0; key < count; key += kTileSide) {
      kernel.pack(x.dtype, x.at(b, h, key), x.row, std::min(kTileSide, count - key), d, rows, ld,
                  kTileSide);
      kernel.transpose(rows, ld, words, data + key / kTileSide * per_tile());
    }
  }
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

const float* ones() {
  static const std::vector<float> all(kTileSide + 64, 1.0f);
  return all.data();
}

// The scratch memory of forward.
struct Forward {
  const AttentionKernel& kernel;
  const Sizes& size;
  Strides ld;
  Columns k;
  uint32_t *v, *q, *weights;
  float *scores, *out, *maximum, *sum, *factor;

  Forward(Parts& parts, const AttentionKernel& kernel, const Sizes& size)
      : kernel(kernel),
        size(size),
        ld(kernel, size.d),
        k(parts, kernel, size.seen_keys(), size.d),
        v(parts.take<uint32_t>(round_up(size.seen_keys(), kTileSide) / kernel.pair * ld.by_rows)),
        q(parts.take<uint32_t>(kTileSide * ld.along)),
        weights(parts.take<uint32_t>(kTileSide * kTileLd)),
        scores(parts.take<float>(kTileSide * kTileLd)),
        out(parts.take<float>(kTileSide * ld.by_rows)),
        maximum(parts.take<float>(kTileSide)),
        sum(parts.take<float>(kTileSide)),
        factor(parts.take<float>(kTileSide)) {
    if (kernel.pair == 1) weights = reinterpret_cast<uint32_t*>(scores);
  }

  void pack(const Heads& of_k, const Heads& of_v, int64_t b, int64_t h) {
    int64_t count = size.seen_keys();
    k.pack(kernel, of_k, b, h, count, size.d);
    kernel.pack_by_rows(of_v.dtype, of_v.at(b, h, 0), of_v.row, count, size.d, v, ld.by_rows,
                        round_up(count, kTileSide));
  }

  // The queries from `row` on; their results are in `out`, to be multiplied by `factor`.
  void rows(const Heads& of_q, int64_t b, int64_t h, int64_t row, float* logsumexp) {
    int64_t count = std::min(kTileSide, size.queries - row);
    kernel.pack(of_q.dtype, of_q.at(b, h, row), of_q.row, count, size.d, q, ld.along, kTileSide);
    std::fill(out, out + kTileSide * ld.by_rows, 0.0f);
    std::fill(maximum, maximum + kTileSide, -kInfinity);
    std::fill(sum, sum + kTileSide, 0.0f);
    std::fill(factor, factor + kTileSide, 0.0f);
    int64_t end = size.causal ? std::min(size.keys, row + count) : size.keys;
    for (int64_t key = 0; key < end; key += kTileSide) {
      TileShape tile = size.tile(row, key);
      kernel.product({count, tile.keys, k.words, q, ld.along, false, k.tile(key), kTileLd, scores,
                      kTileLd, nullptr, size.scale, tile.causal ? Seen::columns : Seen::all,
                      tile.shift});
      kernel.softmax(tile, scores, maximum, sum, factor, weights);
      kernel.product({count, size.d, ceil_div(tile.keys, kernel.pair), weights, kTileLd, false,
                      v + key / kernel.pair * ld.by_rows, ld.by_rows, out, ld.by_rows, factor, 1.0f,
                      tile.causal ? Seen::until : Seen::all, tile.shift});
    }
    for (int64_t r = 0; r < count; ++r) {
      logsumexp[r] = end > 0 ? maximum[r] + std::log(sum[r]) : -kInfinity;
      factor[r] = end > 0 ? 1.0f / sum[r] : 0.0f;
    }
  }
};

struct Range {
  int64_t begin, end;
};

// What one step of backward computes: from `heads` of q, `rows` and `keys`, which begin with a
// tile, the gradients of these keys or those of these queries, which need all of the others; or
// both.
struct Part {
  int64_t b, kv_head;
  Range heads, rows, keys;
  bool of_keys, of_queries;
};

// The scratch memory of backward: all of a head of k and v, and of one of the heads of q that read
// it.
struct Backward {
  const AttentionKernel& kernel;
  const Sizes& size;
  Strides ld;
  int64_t keys, queries;  // padded
  Columns k, v;
  uint32_t *k_rows, *q, *g, *q_rows, *g_rows, *weights_t, *grads, *grads_t;
  float *scores, *of_weights, *dq, *dk, *dv, *shared;
  int64_t packed_k = -1, packed_q = -1;  // the heads, of all batches

  Backward(Parts& parts, const AttentionKernel& kernel, const Sizes& size)
      : kernel(kernel),
        size(size),
        ld(kernel, size.d),
        keys(round_up(size.keys, kTileSide)),
        queries(round_up(size.queries, kTileSide)),
        k(parts, kernel, size.keys, size.d),
        v(parts, kernel, size.keys, size.d),
        k_rows(parts.take<uint32_t>(keys / kernel.pair * ld.by_rows)),
        q(parts.take<uint32_t>(queries * ld.along)),
        g(parts.take<uint32_t>(queries * ld.along)),
        q_rows(kernel.pair == 1 ? q : parts.take<uint32_t>(queries / kernel.pair * ld.by_rows)),
        g_rows(kernel.pair == 1 ? g : parts.take<uint32_t>(queries / kernel.pair * ld.by_rows)),
        weights_t(parts.take<uint32_t>(kTileSide * kTileLd)),
        grads(parts.take<uint32_t>(kTileSide * kTileLd)),
        grads_t(parts.take<uint32_t>(kTileSide * kTileLd)),
        scores(parts.take<float>((kTileSide + 1) * kTileLd)),
        of_weights(parts.take<float>((kTileSide + 1) * kTileLd)),
        dq(parts.take<float>(queries * ld.by_rows)),
        dk(parts.take<float>(keys * ld.by_rows)),
        dv(parts.take<float>(keys * ld.by_rows)),
        shared(parts.take<float>(queries)) {
    if (kernel.pair == 1) {
      weights_t = reinterpret_cast<uint32_t*>(scores);
      grads = grads_t = reinterpret_cast<uint32_t*>(of_weights);
    }
  }

  void pack_keys(const Heads& of_k, const Heads& of_v, int64_t b, int64_t h) {
    if (packed_k == b * size.kv_heads + h) return;
    packed_k = b * size.kv_heads + h;
    k.pack(kernel, of_k, b, h, size.keys, size.d);
    v.pack(kernel, of_v, b, h, size.keys, size.d);
    kernel.pack_by_rows(of_k.dtype, of_k.at(b, h, 0), of_k.row, size.keys, size.d, k_rows,
                        ld.by_rows, keys);
    std::fill(dk, dk + keys * ld.by_rows, 0.0f);
    std::fill(dv, dv + keys * ld.by_rows, 0.0f);
  }

  void pack_queries(const Heads& of_q, const Heads& of_g, const Heads& out, int64_t b, int64_t h) {
    if (packed_q == b * size.heads + h) return;
    packed_q = b * size.heads + h;
    auto pack = [&](const Heads& x, uint32_t* along, uint32_t* by_rows) {
      kernel.pack(x.dtype, x.at(b, h, 0), x.row, size.queries, size.d, along, ld.along, queries);
      if (kernel.pair == 1) return;
      kernel.pack_by_rows(x.dtype, x.at(b, h, 0), x.row, size.queries, size.d, by_rows, ld.by_rows,
                          queries);
    };
    pack(of_q, q, q_rows);
    pack(of_g, g, g_rows);
    kernel.row_dots(out.dtype, of_g.at(b, h, 0), of_g.row, out.at(b, h, 0), out.row, size.queries,
                    size.d, shared);
    std::fill(dq, dq + queries * ld.by_rows, 0.0f);
  }

  // One tile: five products, or four, or three.
  void tile(const Part& part, int64_t row, int64_t key, const float* logsumexp) {
    TileShape shape = size.tile(row, key);
    auto scores_of = [&](const uint32_t* a, const Columns& b, float scale, float* c) {
      kernel.product({shape.rows, shape.keys, b.words, a + row * ld.along, ld.along, false,
                      b.tile(key), kTileLd, c, kTileLd, nullptr, scale,
                      shape.causal ? Seen::columns : Seen::all, shape.shift});
    };
    scores_of(q, k, size.scale, scores);
    scores_of(g, v, 1.0f, of_weights);
    kernel.softmax_backward(shape, scores, of_weights, logsumexp + row, shared + row, size.scale,
                            weights_t, grads, grads_t);
    auto add_to_keys = [&](const uint32_t* a, const uint32_t* b, float* c) {
      kernel.product({shape.keys, size.d, ceil_div(shape.rows, kernel.pair), a, kTileLd, true,
                      b + row / kernel.pair * ld.by_rows, ld.by_rows, c + key * ld.by_rows,
                      ld.by_rows, ones(), 1.0f, shape.causal ? Seen::from : Seen::all,
                      shape.shift});
    };
    if (part.of_keys) {
      add_to_keys(weights_t, g_rows, dv);
      add_to_keys(grads_t, q_rows, dk);
    }
    if (!part.of_queries) return;
    kernel.product({shape.rows, size.d, ceil_div(shape.keys, kernel.pair), grads, kTileLd, false,
                    k_rows + key / kernel.pair * ld.by_rows, ld.by_rows, dq + row * ld.by_rows,
                    ld.by_rows, ones(), 1.0f, shape.causal ? Seen::until : Seen::all, shape.shift});
  }

  void store(const Heads& to, const float* x, int64_t b, int64_t h, Range range) {
    kernel.store_rows(to.dtype, x + range.begin * ld.by_rows, ld.by_rows, nullptr,
                      range.end - range.begin, size.d, to.at(b, h, range.begin), to.row);
  }
};

// The parts in which threads compute: whole heads of k and v, or, where these are too few, first
// tiles of keys, then tiles of queries. Every sum has the same order in both.
std::vector<std::vector<Part>> parts_of(const Sizes& size) {
  Range rows{0, size.queries}, keys{0, size.keys};
  std::vector<Part> whole, by_keys, by_queries;
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
      whole.push_back({b, kv, heads, rows, keys, true, true});
      tiles(keys, [&](Range tile) { by_keys.push_back({b, kv, heads, rows, tile, true, false}); });
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        tiles(rows, [&](Range tile) {
          by_queries.push_back({b, kv, {h, h + 1}, tile, keys, false, true});
        });
      }
    }
  }
  int64_t enough = torch::stable::get_num_threads();
  if (static_cast<int64_t>(whole.size()) >= enough) return {whole};
  return {by_keys, by_queries};
}

Sizes check(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale,
            const char* op) {
  for (const Tensor* t : {&q, &k, &v}) {
    STD_TORCH_CHECK(t->dim() == 4 && on_cpu(*t) && t->scalar_type() == q.scalar_type() &&
                        is_float(dtype_of(*t, op)),
                    op, ": q, k and v must be [B, H, T, D] of one dtype, fp32, bf16 or fp16");
  }
  STD_TORCH_CHECK(same_shape(k, v) && k.size(0) == q.size(0) && k.size(3) == q.size(3) &&
                      q.size(3) > 0 && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                  op, ": k and v must be [B, H_kv, S, D], and H a multiple of H_kv");
  return {q.size(0), q.size(1), k.size(1), q.size(2),
          k.size(2), q.size(3), causal,    static_cast<float>(scale)};
}

Tensor dense_rows(const Tensor& t) {
  return t.size(3) < 2 || t.strides()[3] == 1 ? t : to_contiguous(t);
}

Tensor empty_like_rows(const Tensor& x) {  // [B, H, T, D] in memory as [B, T, H, D]
  return torch::stable::transpose(
      empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.scalar_type()), 1, 2);
}

const AttentionKernel& kernel_for(Dtype dtype) {
  return dtype == Dtype::bf16 ? loops().attention_bf16 : loops().attention_f32;
}

}  // namespace

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, bool causal, double scale) {
  Sizes size = check(q, k, v, causal, scale, "attention");
  q = dense_rows(q), k = dense_rows(k), v = dense_rows(v);
  Tensor out = empty_like_rows(q);
  Tensor logsumexp = empty({size.batch, size.heads, size.queries}, ScalarType::Float);
  float* all_logsumexp = static_cast<float*>(logsumexp.mutable_data_ptr());
  Heads of_q(q), of_k(k), of_v(v), to(out);
  const AttentionKernel& kernel = kernel_for(of_q.dtype);
  int64_t tiles = ceil_div(size.queries, kTileSide), total = size.batch * size.heads * tiles;
  torch::stable::parallel_for(0, total, 1, [&](int64_t begin, int64_t end) {
    Scratch once;
    auto here = in_scratch<Forward>(once, kernel, size);
    int64_t packed = -1;
    for (int64_t i = begin; i < end; ++i) {
      int64_t b = i / tiles / size.heads, h = i / tiles % size.heads, of_kv = h / size.group();
      int64_t row = tile_at(i % tiles, tiles) * kTileSide;
      if (packed != b * size.kv_heads + of_kv) {
        here.pack(of_k, of_v, b, of_kv);
        packed = b * size.kv_heads + of_kv;
      }
      here.rows(of_q, b, h, row, all_logsumexp + (b * size.heads + h) * size.queries + row);
      kernel.store_rows(to.dtype, here.out, here.ld.by_rows, here.factor,
                        std::min(kTileSide, size.queries - row), size.d, to.at(b, h, row), to.row);
    }
  });
  return {out, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor g, Tensor q, Tensor k, Tensor v,
                                                      Tensor out, Tensor logsumexp, bool causal,
                                                      double scale) {
  Sizes size = check(q, k, v, causal, scale, "attention_backward");
  for (const Tensor* t : {&g, &out}) {
    STD_TORCH_CHECK(same_shape(*t, q) && on_cpu(*t) && t->scalar_type() == q.scalar_type(),
                    "attention_backward: g and out must be as q");
  }
  STD_TORCH_CHECK(logsumexp.dim() == 3 && logsumexp.size(0) == size.batch &&
                      logsumexp.size(1) == size.heads && logsumexp.size(2) == size.queries &&
                      logsumexp.scalar_type() == ScalarType::Float && on_cpu(logsumexp),
                  "attention_backward: logsumexp must be fp32 [B, H, T]");
  g = dense_rows(g), q = dense_rows(q), k = dense_rows(k), v = dense_rows(v);
  out = dense_rows(out);
  if (!logsumexp.is_contiguous()) logsumexp = to_contiguous(logsumexp);
  const float* all_logsumexp = static_cast<const float*>(logsumexp.const_data_ptr());
  Tensor dq = empty_like_rows(q), dk = empty_like_rows(k), dv = empty_like_rows(v);
  Heads of_g(g), of_q(q), of_k(k), of_v(v), of_out(out), to_q(dq), to_k(dk), to_v(dv);
  const AttentionKernel& kernel = kernel_for(of_q.dtype);
  for (const std::vector<Part>& parts : parts_of(size)) {
    auto run = [&](int64_t begin, int64_t end) {
      Scratch once;
      auto here = in_scratch<Backward>(once, kernel, size);
      for (int64_t i = begin; i < end; ++i) {
        const Part& part = parts[i];
        here.pack_keys(of_k, of_v, part.b, part.kv_head);
        for (int64_t h = part.heads.begin; h < part.heads.end; ++h) {
          here.pack_queries(of_q, of_g, of_out, part.b, h);
          const float* of_head = all_logsumexp + (part.b * size.heads + h) * size.queries;
          for (int64_t key = part.keys.begin; key < part.keys.end; key += kTileSide) {
            int64_t first = causal ? std::max(key, part.rows.begin) : part.rows.begin;
            for (int64_t row = first; row < part.rows.end; row += kTileSide) {
              here.tile(part, row, key, of_head);
            }
          }
          if (part.of_queries) here.store(to_q, here.dq, part.b, h, part.rows);
        }
        if (!part.of_keys) continue;
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
  m.impl("attention", TORCH_BOX(&mixprec::cpu::attention));
  m.impl("attention_backward", TORCH_BOX(&mixprec::cpu::attention_backward));
}
