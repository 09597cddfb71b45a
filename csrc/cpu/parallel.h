// What the ops divide among threads: elementwise work over a tensor, or a list of tensors, in
// pieces; and the scratch memory of a thread.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "arguments/check.h"

namespace mixprec::cpu {

// Elements per piece: large enough to outweigh the cost of scheduling it, small enough (64 KB of
// fp32) to stay in the L1 or L2 cache. It also determines the order of summation of grad_stats_.
constexpr int64_t kPiece = 16384;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f(i) for i < count on all threads. elements: of each; those of fewer than kPiece are scheduled
// several at a time.
template <class F>
void for_each(int64_t count, int64_t elements, const F& f) {
  int64_t grain = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, elements));
  torch::stable::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) f(i);
  });
}

// f(first, count) for ranges of at most `size` of [0, n) on all threads.
template <class F>
void for_ranges(int64_t n, int64_t size, const F& f) {
  for_each(ceil_div(n, size), kPiece,
           [&](int64_t i) { f(i * size, std::min(size, n - i * size)); });
}

constexpr int64_t kOnes = 256;
inline const float* ones() {
  static const std::vector<float> all(kOnes, 1.0f);
  return all.data();
}

struct Piece {
  int64_t tensor, begin, end;
};

// All pieces of a list of tensors, in order; empty tensors have none.
inline std::vector<Piece> cut(const std::vector<Tensor>& tensors) {
  std::vector<Piece> pieces;
  pieces.reserve(tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    int64_t n = tensors[t].numel();
    for (int64_t begin = 0; begin < n; begin += kPiece) {
      pieces.push_back({static_cast<int64_t>(t), begin, std::min(n, begin + kPiece)});
    }
  }
  return pieces;
}

// f(index of the piece, piece) on all threads.
template <class F>
void for_pieces(const std::vector<Piece>& pieces, const F& f) {
  int64_t elements = 0, count = static_cast<int64_t>(pieces.size());
  for (const Piece& p : pieces) elements += p.end - p.begin;
  for_each(count, elements / std::max<int64_t>(1, count), [&](int64_t i) { f(i, pieces[i]); });
}

// A vector [n] of fp32, bf16 or fp16 numbers in fp32; without one, n times `otherwise`.
inline std::vector<float> vector_in_fp32(const MaybeTensor& t, int64_t n, float otherwise) {
  std::vector<float> wide(n, otherwise);
  if (!t.has_value() || n == 0) return wide;
  Tensor dense = row_major(*t);
  with_float(dtype_of(dense, "a vector"), [&]<class T>(Type<T>) {
    const T* x = static_cast<const T*>(dense.const_data_ptr());
    for (int64_t i = 0; i < n; ++i) wide[i] = decode(x[i]);
  });
  return wide;
}

inline uint8_t* bytes_of(const Tensor& t) {
  return static_cast<uint8_t*>(const_cast<void*>(t.const_data_ptr()));
}

inline char* at(void* base, Dtype dtype, int64_t element) {
  return static_cast<char*>(base) + element * element_size(dtype);
}

inline const char* at(const void* base, Dtype dtype, int64_t element) {
  return static_cast<const char*>(base) + element * element_size(dtype);
}

// Memory that is kept between calls: page faults on fresh memory cost more than packing.
class Scratch {
 public:
  void* get(int64_t bytes) {
    if (bytes > capacity_) {
      memory_.reset(std::aligned_alloc(4096, static_cast<size_t>((bytes + 4095) / 4096 * 4096)));
      STD_TORCH_CHECK(memory_ != nullptr, "out of memory for ", bytes, " bytes of scratch");
      capacity_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace mixprec::cpu
