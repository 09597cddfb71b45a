// Counts the bytes that the kernels of kernels.cpp load from arrays and store to them, linked with
// what -fsanitize=thread makes of them: these functions stand in for ThreadSanitizer's, of which
// that option puts a call at each access. Accesses to other memory do not count.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct Array {
  uintptr_t start, size;
  int64_t loaded, stored;  // bytes, each as often as it is accessed
  int64_t read, written;   // bytes, each once a launch
  std::vector<uint8_t> seen;
};

enum Access : uint8_t { load = 1, store = 2 };

std::vector<Array> arrays;
int64_t launches = 0;

void count(const void* p, uintptr_t bytes, Access access) {
  uintptr_t address = reinterpret_cast<uintptr_t>(p);
  for (Array& a : arrays) {
    if (address - a.start >= a.size) continue;  // unsigned: also below its start
    (access == load ? a.loaded : a.stored) += static_cast<int64_t>(bytes);
    for (uintptr_t i = address - a.start; i < std::min(address - a.start + bytes, a.size); ++i) {
      (access == load ? a.read : a.written) += (a.seen[i] & access) == 0;
      a.seen[i] |= access;
    }
    return;
  }
}

}  // namespace

// Called by scheduler.cpp at the start of each launch.
void on_launch() {
  ++launches;
  for (Array& a : arrays) std::fill(a.seen.begin(), a.seen.end(), uint8_t{0});
}

extern "C" {

// From now on of these arrays, from 0.
void count_arrays(int64_t number, void** starts, const int64_t* sizes) {
  launches = 0;
  arrays.clear();
  for (int64_t i = 0; i < number; ++i) {
    uintptr_t size = static_cast<uintptr_t>(sizes[i]);
    arrays.push_back(
        {reinterpret_cast<uintptr_t>(starts[i]), size, 0, 0, 0, 0, std::vector<uint8_t>(size)});
  }
}

// launches, loaded, stored, read, written, of all arrays together.
void counted(int64_t* result) {
  std::fill(result, result + 5, 0);
  result[0] = launches;
  for (const Array& a : arrays) {
    const int64_t of_it[] = {a.loaded, a.stored, a.read, a.written};
    for (int k = 0; k < 4; ++k) result[k + 1] += of_it[k];
  }
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, uintptr_t bytes) { count(p, bytes, load); }
void __tsan_write_range(void* p, uintptr_t bytes) { count(p, bytes, store); }

#define ACCESS(bytes)                                                     \
  void __tsan_read##bytes(void* p) { count(p, bytes, load); }             \
  void __tsan_write##bytes(void* p) { count(p, bytes, store); }           \
  void __tsan_unaligned_read##bytes(void* p) { count(p, bytes, load); }   \
  void __tsan_unaligned_write##bytes(void* p) { count(p, bytes, store); } \
  static_assert(bytes <= 16)
ACCESS(1);
ACCESS(2);
ACCESS(4);
ACCESS(8);
ACCESS(16);

// Atomics are of single words, which are in none of the arrays.
#define ATOMIC(bits)                                                                               \
  using Word##bits = uint##bits##_t;                                                               \
  Word##bits __tsan_atomic##bits##_load(const Word##bits* p, int) {                                \
    return __atomic_load_n(p, __ATOMIC_RELAXED);                                                   \
  }                                                                                                \
  Word##bits __tsan_atomic##bits##_exchange(Word##bits* p, Word##bits value, int) {                \
    return __atomic_exchange_n(p, value, __ATOMIC_RELAXED);                                        \
  }                                                                                                \
  Word##bits __tsan_atomic##bits##_fetch_add(Word##bits* p, Word##bits value, int) {               \
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);                                         \
  }                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_strong(Word##bits* p, Word##bits* seen,              \
                                                     Word##bits value, int, int) {                 \
    return __atomic_compare_exchange_n(p, seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
  }                                                                                                \
  static_assert(sizeof(Word##bits) * 8 == bits)
ATOMIC(8);  // of static variables
ATOMIC(32);
ATOMIC(64);
}
