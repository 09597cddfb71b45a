// The fibers of cuda_runtime.h. Compiled without ThreadSanitizer, also for the programs that are
// checked by it: it learns of fibers, barriers and fences through the calls below, and must not see
// the scheduler's own accesses.
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
}

namespace cuda_on_cpu {

namespace {

constexpr unsigned kNoSync = 1;  // a switch orders nothing
constexpr size_t kStack = 256 << 10;
constexpr int kMaxThreads = 1024;
constexpr size_t kMaxParameters = 32764;
constexpr size_t kMaxShared = 227 << 10;

enum class State { ready, block_barrier, warp_barrier, done };

struct Fiber {
  ucontext_t context;
  void* stack = nullptr;
  void* tsan = nullptr;
  Position position;
  State state = State::done;
  unsigned warp_mask = 0;
  int exchanges = 0;
};

struct Warp {
  uint64_t values[2][32];  // alternately, so that no lane is overtaken by the next exchange
  char token;
};

Fiber fibers[kMaxThreads];
Warp warps[kMaxThreads / 32];
ucontext_t scheduler_context;
void* scheduler_tsan = nullptr;
Fiber* running = nullptr;
std::vector<Fiber*> ready;
int live = 0;  // threads of the block that have not returned
int any_of_block = 0;
const std::function<void()>* body = nullptr;
std::mt19937_64 generator;
char block_token, fence_token, launch_token;  // addresses for ThreadSanitizer
alignas(16) unsigned char shared_memory[kMaxShared];

void acquire(char& token) {
  if (__tsan_acquire) __tsan_acquire(&token);
}
void release(char& token) {
  if (__tsan_release) __tsan_release(&token);
}

void to_scheduler() {
  Fiber* self = running;
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(scheduler_tsan, kNoSync);
  swapcontext(&self->context, &scheduler_context);
}

void to_fiber(Fiber* fiber) {
  running = fiber;
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(fiber->tsan, kNoSync);
  swapcontext(&scheduler_context, &fiber->context);
}

int index_of(const Fiber* fiber) { return static_cast<int>(fiber - fibers); }

void make_ready(Fiber* fiber) {
  fiber->state = State::ready;
  ready.push_back(fiber);
}

void open_block_barrier(int threads) {
  int waiting = 0;
  for (int t = 0; t < threads; ++t) waiting += fibers[t].state == State::block_barrier;
  if (waiting == 0 || waiting != live) return;
  for (int t = 0; t < threads; ++t) {
    if (fibers[t].state == State::block_barrier) make_ready(&fibers[t]);
  }
}

void entry() {
  acquire(launch_token);
  (*body)();
  release(launch_token);
  running->state = State::done;
  --live;
  to_scheduler();
}

void start(Fiber* fiber) {
  if (fiber->stack == nullptr) {
    fiber->stack =
        mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fiber->stack == MAP_FAILED) std::abort();
    if (__tsan_create_fiber) fiber->tsan = __tsan_create_fiber(0);
  }
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = kStack;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, entry, 0);
  fiber->exchanges = 0;
  make_ready(fiber);
}

// False: the threads that are left wait for each other at different barriers.
bool run_block(int threads) {
  ready.clear();
  live = threads;
  any_of_block = 0;
  std::memset(shared_memory, 0xFF, sizeof shared_memory);
  release(launch_token);
  for (int t = 0; t < threads; ++t) start(&fibers[t]);
  while (live > 0) {
    if (ready.empty()) open_block_barrier(threads);
    if (ready.empty()) return false;
    size_t drawn = generator() % ready.size();
    Fiber* next = ready[drawn];
    ready[drawn] = ready.back();
    ready.pop_back();
    to_fiber(next);
  }
  acquire(launch_token);
  return true;
}

}  // namespace

const Position& position() { return running->position; }
int lane() { return index_of(running) % 32; }
void* dynamic_shared() { return shared_memory; }
void set_seed(uint64_t seed) { generator.seed(seed); }

void yield() {
  ready.push_back(running);
  to_scheduler();
}

void block_barrier() {
  release(block_token);
  running->state = State::block_barrier;
  to_scheduler();
  acquire(block_token);
}

int block_or(int value) {
  any_of_block |= value != 0;
  block_barrier();
  int any = any_of_block;
  block_barrier();
  any_of_block = 0;
  block_barrier();
  return any;
}

// The last lane of the mask to come makes the others ready.
void warp_wait(unsigned mask) {
  Fiber* first = &fibers[index_of(running) / 32 * 32];
  running->state = State::warp_barrier;
  running->warp_mask = mask;
  for (int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) == 0) continue;
    if (first[l].state != State::warp_barrier || first[l].warp_mask != mask) {
      to_scheduler();
      return;
    }
  }
  for (int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) != 0) make_ready(&first[l]);
  }
  to_scheduler();
}

void warp_barrier(unsigned mask) {
  char& token = warps[index_of(running) / 32].token;
  release(token);
  warp_wait(mask);
  acquire(token);
}

// Orders no memory, as in CUDA.
const uint64_t* warp_exchange(unsigned mask, uint64_t value) {
  uint64_t* values = warps[index_of(running) / 32].values[running->exchanges++ % 2];
  values[lane()] = value;
  warp_wait(mask);
  return values;
}

void fence() {
  acquire(fence_token);
  release(fence_token);
}

cudaError_t run(const cudaLaunchConfig_t& config, size_t parameter_bytes,
                const std::function<void()>& kernel) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  size_t threads = size_t{block.x} * block.y * block.z, blocks = size_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > kMaxThreads || blocks == 0 || grid.x > INT32_MAX ||
      parameter_bytes > kMaxParameters || config.dynamicSmemBytes > kMaxShared) {
    return cudaErrorInvalidConfiguration;
  }
  if (__tsan_get_current_fiber) scheduler_tsan = __tsan_get_current_fiber();
  body = &kernel;
  std::vector<size_t> order(blocks);
  for (size_t b = 0; b < blocks; ++b) order[b] = b;
  for (size_t b = blocks; b > 1; --b) std::swap(order[b - 1], order[generator() % b]);
  for (size_t b : order) {
    uint3 at = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                static_cast<unsigned>(b / grid.x / grid.y)};
    for (size_t t = 0; t < threads; ++t) {
      uint3 thread = {static_cast<unsigned>(t % block.x),
                      static_cast<unsigned>(t / block.x % block.y),
                      static_cast<unsigned>(t / block.x / block.y)};
      fibers[t].position = {thread, at, block, grid};
    }
    if (!run_block(static_cast<int>(threads))) {
      std::fprintf(stderr, "block %zu: %d threads wait at barriers that others do not reach\n", b,
                   live);
      return cudaErrorLaunchFailure;
    }
  }
  return cudaSuccess;
}

}  // namespace cuda_on_cpu
