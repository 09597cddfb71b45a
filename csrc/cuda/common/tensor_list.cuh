// A list of tensors as the argument of one launch, passed by value so that nothing is copied to the
// GPU beforehand. The work is split into chunks that never span two tensors; longer lists take
// several launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mixprec::cuda {

// Elements per chunk, a multiple of every pack. A block processes one chunk at a time: long enough
// that finding its tensor costs nothing, short enough to spread the work over the SMs. The size
// also determines the order of summation of grad_stats_.
constexpr int64_t kChunk = 32768;

constexpr int64_t chunks_of(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// One tensor of the list, or several of the same size that are processed together.
template <int arrays, int tags>
struct TensorEntry {
  void* data[arrays];
  int64_t numel;
  int32_t tag[tags];  // values that the op defines
};

struct Chunk {
  int tensor;
  int64_t begin, size;  // elements
};

template <int arrays, int tags>
struct TensorList {
  static constexpr int kLimit = 32764 - 256;  // bytes of kernel arguments; 256 for the others
  static constexpr int kCapacity = (kLimit - 8) / (8 * arrays + 8 + 4 * tags + 4);

  void* data[arrays][kCapacity];
  int64_t numel[kCapacity];
  int32_t tag[tags][kCapacity];
  int32_t first_chunk[kCapacity + 1];  // of each tensor; at [count] the number of all chunks
  int32_t count;

  // Accepts empty tensors, which have no chunks. Returns false if the list is full and must be
  // launched first.
  bool add(const TensorEntry<arrays, tags>& entry) {
    int64_t chunks = first_chunk[count] + chunks_of(entry.numel);
    if (count == kCapacity || chunks > INT32_MAX) return false;
    for (int a = 0; a < arrays; ++a) data[a][count] = entry.data[a];
    numel[count] = entry.numel;
    for (int a = 0; a < tags; ++a) tag[a][count] = entry.tag[a];
    first_chunk[++count] = static_cast<int32_t>(chunks);
    return true;
  }

  __host__ __device__ int chunks() const { return first_chunk[count]; }

  __device__ Chunk chunk(int index) const {
    int low = 0, high = count;
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (first_chunk[middle] <= index) {
        low = middle;
      } else {
        high = middle;
      }
    }
    int64_t begin = (index - first_chunk[low]) * kChunk, left = numel[low] - begin;
    return {low, begin, left < kChunk ? left : kChunk};
  }

  template <class T>
  __device__ T* at(int array, const Chunk& c) const {
    return static_cast<T*>(data[array][c.tensor]) + c.begin;
  }
};

// Calls flush(list) for as many lists as the entries need; entry(i, e) fills the i-th of `count`
// entries and returns whether it belongs to these launches. Stops at the first error.
template <int arrays, int tags, class Entry, class Flush>
cudaError_t for_lists(int64_t count, const Entry& entry, const Flush& flush) {
  TensorList<arrays, tags> list;
  list.count = list.first_chunk[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    TensorEntry<arrays, tags> e;
    if (!entry(i, e)) continue;
    if (list.add(e)) continue;
    if (cudaError_t error = flush(list); error != cudaSuccess) return error;
    list.count = 0;
    list.add(e);
  }
  return list.count > 0 ? flush(list) : cudaSuccess;
}

}  // namespace mixprec::cuda
