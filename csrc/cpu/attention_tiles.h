// What attention and its backward share: views of heads, packed operands, scratch memory, checks.
#pragma once

#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

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

  int64_t index(int64_t b, int64_t h, int64_t t) const { return b * batch + h * head + t * row; }
  char* at(int64_t b, int64_t h, int64_t t) const {
    return data + index(b, h, t) * element_size(dtype);
  }
};

struct Sizes {
  int64_t batch, heads, kv_heads, queries, keys, d;
  bool causal;
  float scale;

  int64_t group() const { return heads / kv_heads; }
  int64_t seen_keys() const { return causal ? std::min(keys, queries) : keys; }
  int64_t keys_of(int64_t row) const { return causal ? std::min(keys, row + 1) : keys; }
  // Of the tile of queries from `row`, keys from `key`.
  TileShape tile(int64_t row, int64_t key) const {
    int64_t count = std::min(kTileSide, keys - key), shift = row - key;
    return {std::min(kTileSide, queries - row), count, causal && shift < count - 1, shift};
  }
};

// Parts of a thread's scratch memory, one after the other.
class Parts {
 public:
  // `count` words for each of these.
  template <class... T>
  void take(int64_t count, T*&... parts) {
    auto next = [&](auto*& part) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at_);
      at_ += round_up(count * 4, 64);
    };
    (next(parts), ...);
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
inline int64_t tile_at(int64_t turn, int64_t count) {
  return turn % 2 == 0 ? turn / 2 : count - 1 - turn / 2;
}

// The row strides, in words, of what is packed along features and along rows.
struct Strides {
  int64_t along, by_rows;
  Strides(const AttentionKernel& kernel, int64_t d)
      : along(odd_lines(ceil_div(d, kernel.pair))), by_rows(odd_lines(d)) {}
};

// Rows of a head as the right factor of a product over features: [d / pair][kTileSide] per tile.
struct Columns {
  uint32_t *rows, *data;
  int64_t ld, words;

  Columns(Parts& parts, const AttentionKernel& kernel, int64_t count, int64_t d)
      : ld(odd_lines(ceil_div(d, kernel.pair))), words(ceil_div(d, kernel.pair)) {
    parts.take(kTileSide * ld, rows);
    parts.take(ceil_div(count, kTileSide) * per_tile(), data);
  }
  int64_t per_tile() const { return round_up(words, 16) * kTileLd; }
  const uint32_t* tile(int64_t key) const { return data + key / kTileSide * per_tile(); }

  // `count` rows of x from `row` on, a tile or more.
  void pack(const AttentionKernel& kernel, const Heads& x, int64_t b, int64_t h, int64_t row,
            int64_t count, int64_t d) {
    for (int64_t key = 0; key < count; key += kTileSide) {
      kernel.pack(x.dtype, x.at(b, h, row + key), x.row, std::min(kTileSide, count - key), d, rows,
                  ld, kTileSide);
      kernel.transpose(rows, ld, words, data + key / kTileSide * per_tile());
    }
  }
};

inline Sizes check(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale,
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

// [B, H, T, D] in memory as [B, T, H, D]
inline Tensor empty_like_rows(const Tensor& x, ScalarType dtype) {
  return torch::stable::transpose(empty({x.size(0), x.size(2), x.size(1), x.size(3)}, dtype), 1, 2);
}

inline const AttentionKernel& kernel_for(Dtype dtype) {
  return dtype == Dtype::bf16 ? loops().attention_bf16 : loops().attention_f32;
}

}  // namespace mixprec::cpu
