// The mask of attention, and which tiles it hides: looked at once for all of a call.
#pragma once

#include <cstring>
#include <limits>

#include "cpu/attention_tiles.h"

namespace mixprec::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = -1e38f;  // or less: beside it scores are nothing

enum class Sight : uint8_t { hidden, mixed, visible };

// [B or 1, H or 1, T, S]: bool, true where a query sees a key, or numbers that are added to the
// scores. Of these -inf and numbers down from kLowest hide a key; a row of nothing but the latter
// and -inf is lowest, and sees the former alike.
class Mask {
 public:
  Mask(const MaybeTensor& given, const Sizes& size, ScalarType of_q, const char* op) : size_(size) {
    if (!given.has_value()) return;
    bool is_bool = given->scalar_type() == ScalarType::Bool;
    auto has = [&](int64_t dim, int64_t n) { return given->size(dim) == n; };
    STD_TORCH_CHECK(
        given->dim() == 4 && on_cpu(*given) && (has(0, size.batch) || has(0, 1)) &&
            (has(1, size.heads) || has(1, 1)) && has(2, size.queries) && has(3, size.keys) &&
            (is_bool || given->scalar_type() == ScalarType::Float || given->scalar_type() == of_q),
        op, ": mask must be [B or 1, H or 1, T, S], bool, fp32 or of q's dtype");
    if (given->numel() == 0) return;
    mask_ = dense_rows(*given);
    dtype_ = is_bool ? Dtype::u8 : dtype_of(*mask_, op);
    data_ = static_cast<const char*>(mask_->const_data_ptr());
    auto stride = [&](int64_t dim) { return mask_->size(dim) == 1 ? 0 : mask_->stride(dim); };
    batch_ = stride(0), head_ = stride(1), row_ = stride(2);
    batches_ = batch_ == 0 ? 1 : size.batch, heads_ = head_ == 0 ? 1 : size.heads;
    if (!is_bool) find_lowest();
    look_at_tiles();
  }

  // What the queries of the tile from `row` see of the keys of that from `key`.
  Sight sight(int64_t b, int64_t h, int64_t row, int64_t key) const {
    if (data_ == nullptr) return Sight::visible;
    return sights_[(head(b, h) * rows_ + row / kTileSide) * tiles_ + key / kTileSide];
  }
  // Masks the scores of a tile.
  void apply(const AttentionKernel& kernel, const TileShape& tile, int64_t b, int64_t h,
             int64_t row, int64_t key, float* scores) const {
    const uint8_t* lowest = lowest_.empty() ? nullptr : &lowest_[head(b, h) * size_.queries + row];
    kernel.mask_scores(dtype_, at(b, h, row, key), row_, kLowest, lowest, tile, scores);
  }
  // Whether a query sees none of its keys.
  bool hides_all(int64_t b, int64_t h, int64_t row) const {
    return data_ != nullptr && of_keys(at(b, h, row, 0), size_.keys_of(row)) == Sight::hidden;
  }

 private:
  int64_t head(int64_t b, int64_t h) const {
    return (batch_ == 0 ? 0 : b) * heads_ + (head_ == 0 ? 0 : h);
  }
  const char* at(int64_t b, int64_t h, int64_t row, int64_t key) const {
    return data_ + (b * batch_ + h * head_ + row * row_ + key) * element_size(dtype_);
  }
  // Values that are not all the same are mixed, and so are numbers that neither hide nor are 0.
  Sight of_keys(const char* x, int64_t keys) const {
    int64_t bytes = element_size(dtype_);
    if (std::memcmp(x, x + bytes, (keys - 1) * bytes) != 0) return Sight::mixed;
    if (dtype_ == Dtype::u8) return *x == 0 ? Sight::hidden : Sight::visible;
    return with_float(dtype_, [&]<class T>(Type<T>) {
      float value = decode(*reinterpret_cast<const T*>(x));
      return value == 0.0f ? Sight::visible : value <= kLowest ? Sight::hidden : Sight::mixed;
    });
  }
  void find_lowest() {
    lowest_.resize(batches_ * heads_ * size_.queries);
    for_each(static_cast<int64_t>(lowest_.size()), size_.keys, [&](int64_t i) {
      int64_t head = i / size_.queries, row = i % size_.queries, keys = size_.keys_of(row);
      const char* numbers = at(head / heads_, head % heads_, row, 0);
      lowest_[i] = with_float(dtype_, [&]<class T>(Type<T>) {
        const T* x = reinterpret_cast<const T*>(numbers);
        bool any = false;
        for (int64_t key = 0; key < keys; ++key) {
          float value = decode(x[key]);
          if (!(value <= kLowest)) return false;
          any = any || value > -kInfinity;
        }
        return any;
      });
    });
  }
  void look_at_tiles() {
    rows_ = ceil_div(size_.queries, kTileSide), tiles_ = ceil_div(size_.keys, kTileSide);
    sights_.resize(batches_ * heads_ * rows_ * tiles_);
    for_each(static_cast<int64_t>(sights_.size()), kTileSide * kTileSide, [&](int64_t i) {
      int64_t head = i / tiles_ / rows_, first = i / tiles_ % rows_ * kTileSide;
      int64_t key = i % tiles_ * kTileSide, keys = std::min(kTileSide, size_.keys - key);
      auto of_row = [&](int64_t row) {
        Sight sees = of_keys(at(head / heads_, head % heads_, row, key), keys);
        bool lowest = !lowest_.empty() && lowest_[head * size_.queries + row];
        return lowest && sees == Sight::hidden ? Sight::mixed : sees;
      };
      sights_[i] = of_row(first);
      for (int64_t row = first; row < std::min(first + kTileSide, size_.queries); ++row) {
        if (sights_[i] == Sight::mixed) return;
        if (of_row(row) != sights_[i]) sights_[i] = Sight::mixed;
      }
    });
  }

  Sizes size_;
  std::optional<Tensor> mask_;
  Dtype dtype_ = Dtype::none;
  const char* data_ = nullptr;
  int64_t batch_ = 0, head_ = 0, row_ = 0;  // strides, 0 of what all share
  int64_t batches_ = 1, heads_ = 1, rows_ = 0, tiles_ = 0;
  std::vector<Sight> sights_;    // [batches_, heads_, rows_, tiles_]
  std::vector<uint8_t> lowest_;  // [batches_, heads_, T]; none of bool
};

}  // namespace mixprec::cpu
