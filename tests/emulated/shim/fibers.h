// Stacks that a program switches between, and ThreadSanitizer's view of them. It learns of fibers
// and of what orders their memory through the calls here.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdlib>

extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
}

namespace cuda_on_cpu {

inline void acquire(char& token) {
  if (__tsan_acquire) __tsan_acquire(&token);
}
inline void release(char& token) {
  if (__tsan_release) __tsan_release(&token);
}

class Stack {
 public:
  // The thread's own stack, from which the others are entered.
  void adopt_this_thread() {
    if (__tsan_get_current_fiber) tsan_ = __tsan_get_current_fiber();
  }

  // The next switch calls entry(), which must not return.
  void start(void (*entry)()) {
    if (memory_ == nullptr) {
      memory_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory_ == MAP_FAILED) std::abort();
      if (__tsan_create_fiber) tsan_ = __tsan_create_fiber(0);
    }
    getcontext(&context_);
    context_.uc_stack.ss_sp = memory_;
    context_.uc_stack.ss_size = kBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
    entered_ = false;
  }

  // From this stack, which is the running one, to another.
  [[gnu::noinline]] void switch_to(Stack& other) {
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(other.tsan_, kNoSync);
    if (__builtin_setjmp(place_) == 0) other.go_on();
  }

 private:
  static constexpr size_t kBytes = 256 << 10;
  static constexpr unsigned kNoSync = 1;  // a switch orders nothing

  // Not in the function that calls __builtin_setjmp.
  [[gnu::noinline]] void go_on() {
    if (entered_) __builtin_longjmp(place_, 1);
    entered_ = true;
    setcontext(&context_);
  }

  ucontext_t context_;  // of the first entry
  bool entered_ = true;
  // __builtin_setjmp's. swapcontext would do, with a system call each time, and sanitizers follow
  // setjmp.
  void* place_[5];
  void* memory_ = nullptr;
  void* tsan_ = nullptr;
};

}  // namespace cuda_on_cpu
