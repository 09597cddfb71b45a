// Splits elementwise work over a tensor, or a list of tensors, into pieces for the threads.
#pragma once

#include <algorithm>
#include <vector>

#include "arguments/check.h"

namespace mixprec::cpu {

// Elements per piece: large enough to outweigh the cost of scheduling it, small enough (64 KB of
// fp32) to stay in the L1 or L2 cache. It also determines the order of summation of grad_stats_.
constexpr int64_t kPiece = 16384;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f(begin, end) over [0, n) in pieces of kPiece on all threads.
template <class F>
void for_pieces(int64_t n, const F& f) {
  int64_t pieces = (n + kPiece - 1) / kPiece;
  torch::stable::parallel_for(0, pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) f(i * kPiece, std::min(n, (i + 1) * kPiece));
  });
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

// f(index of the piece, piece) on all threads; small pieces are scheduled several at a time.
template <class F>
void for_pieces(const std::vector<Piece>& pieces, const F& f) {
  int64_t elements = 0;
  for (const Piece& p : pieces) elements += p.end - p.begin;
  int64_t count = static_cast<int64_t>(pieces.size());
  int64_t grain = elements == 0 ? 1 : std::max<int64_t>(1, count * kPiece / elements);
  torch::stable::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) f(i, pieces[i]);
  });
}

inline char* at(void* base, Dtype dtype, int64_t element) {
  return static_cast<char*>(base) + element * element_size(dtype);
}

inline const char* at(const void* base, Dtype dtype, int64_t element) {
  return static_cast<const char*>(base) + element * element_size(dtype);
}

}  // namespace mixprec::cpu
