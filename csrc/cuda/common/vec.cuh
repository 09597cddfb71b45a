// Iterating over arrays of any alignment in 16-byte accesses: a scalar head up to the first 16-byte
// boundary, packs of n elements, and a scalar tail.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace mixprec::cuda {

template <int n>
struct Int {
  static constexpr int value = n;
};

// Elements of T in 16 bytes.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// The bits of x[0, 8 / sizeof(T)), the first element lowest; of fewer elements if n is smaller.
// Bytes that nvcc took out of 32-bit words it puts back without an instruction in words of 32 bits
// only, and halves in one of 64 bits only.
template <int n, class T>
__device__ __forceinline__ uint64_t pack(const T* x) {
  using Word = std::conditional_t<sizeof(T) == 1, uint32_t, uint64_t>;
  constexpr int per_word = sizeof(Word) / sizeof(T);
  Word words[8 / sizeof(Word)] = {};
#pragma unroll
  for (int i = 0; i < n && i * sizeof(T) < 8; ++i) {
    Word bits = 0;
    __builtin_memcpy(&bits, x + i, sizeof(T));
    words[i / per_word] |= bits << (i % per_word * sizeof(T) * 8);
  }
  if constexpr (sizeof(Word) == 8) {
    return words[0];
  } else {
    return words[0] | static_cast<uint64_t>(words[1]) << 32;
  }
}

// Loads use a struct and stores an integer: for __int128 loads nvcc keeps a copy in local memory,
// and it splits some uint4 stores (both seen in the SASS of the kernels with 16-bit results).
template <int bytes>
using LoadWord =
    std::conditional_t<bytes % 16 == 0, uint4, std::conditional_t<bytes % 8 == 0, uint2, uint32_t>>;
template <int bytes>
using StoreWord = std::conditional_t<bytes % 16 == 0, unsigned __int128,
                                     std::conditional_t<bytes % 8 == 0, uint64_t, uint32_t>>;

// x <- p[0, n), n elements of at least 4 bytes in total; p is aligned to that size.
template <int n, class T>
__device__ __forceinline__ void load(const T* p, T (&x)[n]) {
  if constexpr (n == 1) {
    x[0] = *p;
  } else {
    using W = LoadWord<n * sizeof(T)>;
#pragma unroll
    for (int w = 0; w < static_cast<int>(n * sizeof(T) / sizeof(W)); ++w) {
      W word = reinterpret_cast<const W*>(p)[w];
      __builtin_memcpy(reinterpret_cast<char*>(x) + w * sizeof(W), &word, sizeof(W));
    }
  }
}

// p[0, n) <- x, likewise.
template <int n, class T>
__device__ __forceinline__ void store(T* p, const T (&x)[n]) {
  if constexpr (n == 1) {
    *p = x[0];
  } else {
    using W = StoreWord<n * sizeof(T)>;
    constexpr int per_word = sizeof(W) / sizeof(T), half = 8 / sizeof(T);
#pragma unroll
    for (int w = 0; w < n / per_word; ++w) {
      W word = static_cast<W>(pack<per_word>(x + w * per_word));
      if constexpr (sizeof(W) == 16)
        word |= static_cast<W>(pack<half>(x + w * per_word + half)) << 64;
      reinterpret_cast<W*>(p)[w] = word;
    }
  }
}

__device__ __forceinline__ bool is_aligned(const void* p) {
  return reinterpret_cast<uint64_t>(p) % 16 == 0;
}

struct Span {
  int64_t count, head, packs;  // elements, elements before the first pack, packs
};

// Arrays of the same length, the one with the narrowest elements first, which determines the head.
// If another array is not aligned after that head, there are no packs.
template <int n, class First, class... Rest>
__device__ __forceinline__ Span split(int64_t count, const First* first, const Rest*... rest) {
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uint64_t>(first) % 16 / sizeof(First));
  if (head >= count || !(is_aligned(rest + head) && ... && true)) return {count, 0, 0};
  return {count, head, (count - head) / n};
}

// Calls f(Int<n>, Int<packs>, i, step) for the packs [i, i + n), [i + step, i + step + n), ...,
// f(Int<n>, Int<1>, i, 0) for the few packs that remain, and f(Int<1>, Int<1>, i, 0) for the
// elements outside of packs, as thread `first` of `stride` threads. Neighbouring threads have
// neighbouring packs: with one 16-byte vector a pack, a store writes whole 32-byte sectors.
template <int n, int packs, class F>
__device__ __forceinline__ void for_each_group(const Span& s, int64_t first, int64_t stride,
                                               const F& f) {
  int64_t pack = first;
  for (; packs > 1 && pack + (packs - 1) * stride < s.packs; pack += packs * stride) {
    f(Int<n>{}, Int<packs>{}, s.head + pack * n, stride * n);
  }
  for (; pack < s.packs; pack += stride) f(Int<n>{}, Int<1>{}, s.head + pack * n, 0);
  int64_t single = s.count - s.packs * n;
  for (int64_t i = first; i < single; i += stride) {
    f(Int<1>{}, Int<1>{}, i < s.head ? i : i + s.packs * n, 0);
  }
}

// The same with f(Int<n>, i) for each pack and f(Int<1>, i) for each element outside of packs.
// backwards: from the last pack to the first.
template <int n, bool backwards = false, class F>
__device__ __forceinline__ void for_each(const Span& s, int64_t first, int64_t stride, const F& f) {
  int64_t ends = 2 * s.head + (s.packs - 1) * n;  // of the first pack and the last
  for_each_group<n, 1>(s, first, stride, [&](auto width, auto, int64_t i, int64_t) {
    f(width, backwards && width.value > 1 ? ends - i : i);
  });
}

}  // namespace mixprec::cuda
