// mixprec._C_allocator: torch's allocator of CPU memory, with large blocks from a pool. Unlike the
// ops, it is compiled against c10 and loads with the torch that it was built with only.
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace {

// The kernel keeps one entry for each range of pages that was moved, of which a process may have
// 65,530. From this many on nothing is moved, and divided blocks are returned when they are freed.
constexpr size_t kManyRanges = 8192;

// A pool of whole pages for large blocks on the CPU. The pages of a freed block stay for the next
// one: a page fault costs more than what most ops do with the page. Pages of several free blocks
// can become one block, so that the pool never holds more pages than were in use at one moment.
class Pool {
 public:
  // A block of at least this many bytes, in whole pages; null if the system has no memory.
  char* allocate(int64_t bytes) {
    bytes = (bytes + page_ - 1) / page_ * page_;
    std::lock_guard<std::mutex> guard(mutex);
    char* block = from_one(bytes);
    if (!block) block = from_many(bytes);
    if (!block) return nullptr;
    used_[block] = bytes;
    allocated_ += bytes;
    return block;
  }

  // Whether this is a block in use of the pool.
  bool owns(char* block) {
    if (reinterpret_cast<uintptr_t>(block) % static_cast<uintptr_t>(page_)) return false;
    std::lock_guard<std::mutex> guard(mutex);
    return used_.count(block) > 0;
  }

  void free(char* block) {
    std::lock_guard<std::mutex> guard(mutex);
    auto used = used_.find(block);
    int64_t bytes = used->second;
    used_.erase(used);
    allocated_ -= bytes;
    if (ranges_.size() > kManyRanges && next_range(block) < block + bytes) {
      unmap(block, bytes);
    } else {
      add_free(block, bytes);
      shrink_to(limit_);
    }
  }

  // The bytes of the blocks in use, and those with the free blocks.
  std::pair<int64_t, int64_t> usage() {
    std::lock_guard<std::mutex> guard(mutex);
    return {allocated_, allocated_ + free_bytes_};
  }

  // Returns free blocks to the system, until they hold `bytes` or less.
  void shrink(int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    shrink_to(bytes);
  }

  // The most bytes that free blocks hold from now on.
  void set_limit(int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    limit_ = bytes;
    shrink_to(limit_);
  }

  std::mutex mutex;

 private:
  // The smallest free block that is large enough, or its first part.
  char* from_one(int64_t bytes) {
    auto smallest = by_size_.lower_bound({bytes, nullptr});
    return smallest == by_size_.end() ? nullptr : take(smallest->second, bytes);
  }

  // New addresses, with the pages of free blocks, the largest first. The rest are new pages, which
  // the system provides when they are first written.
  char* from_many(int64_t bytes) {
    char* block = map(nullptr, bytes);
    if (!block) {
      shrink_to(0);
      block = map(nullptr, bytes);
    }
    if (!block) return nullptr;
    for (int64_t done = 0; done < bytes && free_bytes_ > 0;) {
      if (ranges_.size() > kManyRanges) {
        shrink_to(std::max<int64_t>(0, free_bytes_ - (bytes - done)));
        break;
      }
      auto [size, largest] = *by_size_.rbegin();
      int64_t taken = std::min(size, bytes - done);
      int64_t moved = move(take(largest, taken), block + done, taken, block + bytes);
      done += moved;
      if (moved == taken) continue;
      if (map(block + done, bytes - done)) break;  // mremap may have unmapped them
      unmap(block, bytes);
      return nullptr;
    }
    return block;
  }

  // The first part of a free block, which is in use then.
  char* take(char* block, int64_t bytes) {
    auto entry = free_.find(block);
    int64_t size = entry->second;
    erase_free(entry);
    if (size > bytes) insert_free(block + bytes, size - bytes);
    return block;
  }

  void add_free(char* block, int64_t bytes) {
    auto after = free_.upper_bound(block);
    if (after != free_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == block) {
        block = before->first, bytes += before->second;
        erase_free(before);
      }
    }
    if (after != free_.end() && block + bytes == after->first) {
      bytes += after->second;
      erase_free(after);
    }
    insert_free(block, bytes);
  }

  void insert_free(char* block, int64_t bytes) {
    free_[block] = bytes;
    by_size_.insert({bytes, block});
    free_bytes_ += bytes;
  }

  void erase_free(std::map<char*, int64_t>::iterator entry) {
    by_size_.erase({entry->second, entry->first});
    free_bytes_ -= entry->second;
    free_.erase(entry);
  }

  // The largest first.
  void shrink_to(int64_t bytes) {
    while (free_bytes_ > bytes) {
      auto [size, block] = *by_size_.rbegin();
      unmap(take(block, size), size);
    }
  }

  char* map(char* at, int64_t bytes) {
    void* block = mmap(at, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0), -1, 0);
    if (block == MAP_FAILED) return nullptr;
    ranges_.insert(static_cast<char*>(block));
    return static_cast<char*>(block);
  }

  void unmap(char* block, int64_t bytes) {
    munmap(block, static_cast<size_t>(bytes));
    forget(block, bytes);
  }

  // Moves pages to addresses of a block that ends at `end`; returns how many bytes it could. The
  // kernel moves pages of one range at a time.
  int64_t move(char* from, char* to, int64_t bytes, char* end) {
    for (int64_t done = 0; done < bytes;) {
      char* source = from + done;
      char* target = to + done;
      int64_t piece = std::min<int64_t>(bytes - done, next_range(source) - source);
      auto size = static_cast<size_t>(piece);
      if (mremap(source, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED) {
        unmap(source, bytes - done);
        return done;
      }
      forget(source, piece);
      ranges_.insert(target);
      if (target + piece < end) ranges_.insert(target + piece);
      done += piece;
    }
    return bytes;
  }

  // Where the range after the one of `at` begins.
  char* next_range(char* at) {
    auto next = ranges_.upper_bound(at);
    return next == ranges_.end() ? reinterpret_cast<char*>(INTPTR_MAX) : *next;
  }

  // These addresses are no longer the pool's: what follows them, if it is, is a range of its own.
  void forget(char* block, int64_t bytes) {
    ranges_.erase(ranges_.lower_bound(block), ranges_.lower_bound(block + bytes));
    if (free_.count(block + bytes) || used_.count(block + bytes)) ranges_.insert(block + bytes);
  }

  const int64_t page_ = sysconf(_SC_PAGESIZE);
  int64_t limit_ = INT64_MAX;
  int64_t allocated_ = 0, free_bytes_ = 0;
  std::map<char*, int64_t> used_, free_;         // bytes by address
  std::set<std::pair<int64_t, char*>> by_size_;  // the free blocks
  std::set<char*> ranges_;                       // the first address of each range of the kernel
};

// Never destroyed: tensors may outlive everything else. A child process gets it unlocked.
Pool& pool() {
  static Pool* const pool = [] {
    auto lock = [] { ::pool().mutex.lock(); };
    auto unlock = [] { ::pool().mutex.unlock(); };
    pthread_atfork(lock, unlock, unlock);
    return new Pool;
  }();
  return *pool;
}

// Below, whole pages would waste a part of each block, and malloc has few holes.
constexpr size_t kSmallest = 64 << 10;

c10::Allocator* previous = nullptr;

void deallocate(void* block) {
  if (!pool().owns(static_cast<char*>(block))) return previous->raw_deallocate(block);
  c10::profiledCPUMemoryReporter().Delete(block);  // first: a free block may be another thread's
  pool().free(static_cast<char*>(block));
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kSmallest ? nullptr : pool().allocate(static_cast<int64_t>(bytes));
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
  m.def("usage", [] { return pool().usage(); });
  m.def("empty_cache", [] { pool().shrink(0); });
  m.def("set_limit", [](int64_t bytes) { pool().set_limit(bytes); });
}
