// Scratch memory that is kept between calls: page faults on fresh memory cost more than packing.
#pragma once

#include <cstdlib>
#include <memory>

#include "arguments/check.h"

namespace mixprec::cpu {

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
