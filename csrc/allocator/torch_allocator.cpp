// mixprec._C_allocator: torch's allocator of CPU memory, with large blocks from page_pool.h. Unlike
// the ops, it is compiled against c10 and loads with the torch that it was built with only.
#include <c10/core/CPUAllocator.h>
#include <pybind11/pybind11.h>

#include <utility>

#include "allocator/page_pool.h"

namespace {

namespace pool = mixprec::page_pool;

// Below, whole pages would waste a part of each block, and malloc has few holes.
constexpr size_t kSmallest = 64 << 10;

c10::Allocator* previous = nullptr;

void deallocate(void* block) {
  if (!pool::owns(block)) return previous->raw_deallocate(block);
  c10::profiledCPUMemoryReporter().Delete(block);  // first: a free block may be another thread's
  pool::free(block);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kSmallest ? nullptr : pool::allocate(static_cast<int64_t>(bytes));
    if (block) {
      c10::profiledCPUMemoryReporter().New(block, bytes);
    } else {
      block =
          previous->raw_allocate(bytes);  // which reports, and raises, what there is no memory for
    }
    return {block, block, deallocate, c10::DeviceType::CPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return deallocate; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

// Whether torch allocates CPU memory with it from now on. Blocks of the previous allocator remain
// its own.
bool install() {
  static Allocator allocator;
  if (previous) return c10::GetCPUAllocator() == &allocator;
  c10::Allocator* current = c10::GetCPUAllocator();
  if (!current->raw_deleter()) return false;
  previous = current;
  c10::SetCPUAllocator(&allocator);
  return c10::GetCPUAllocator() == &allocator;
}

}  // namespace

PYBIND11_MODULE(_C_allocator, m) {
  m.def("install", &install);
  m.def("usage", [] { return std::make_pair(pool::usage().allocated, pool::usage().reserved); });
  m.def("empty_cache", [] { pool::shrink(0); });
  m.def("set_limit", &pool::set_limit);
}
