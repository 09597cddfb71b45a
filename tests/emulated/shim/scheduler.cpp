// The threads of cuda_runtime.h, each a fiber: which of them runs, what it waits for. Compiled
// without ThreadSanitizer, also for the programs that are checked by it, which must not see the
// scheduler's own accesses.
#include "scheduler.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "fibers.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_on_cpu {

namespace {

constexpr size_t kMaxParameters = 32764;

enum class State { ready, waiting, done };
using Why = std::function<std::string()>;

struct Fiber {
  Stack stack;
  uint3 thread_idx, block_idx;
  State state = State::done;
  int rank = 0, thread = 0;  // block within the cluster, thread within the block
  int exchanges = 0, meetings = 0;
  // While it waits: what wakes it, and of a warp's barrier the lanes that have to come.
  const void* key = nullptr;
  const Why* why = nullptr;
  unsigned warp_mask = 0;
};

struct Warp {
  uint64_t values[2][32];  // alternately, so that no lane is overtaken by the next exchange
  char token;
};

struct Block {
  int live = 0;     // threads that have not returned
  int waiting = 0;  // at the barrier of the block
  char token;
};

struct Failure {};

Fiber fibers[kMaxThreads];
Warp warps[kMaxThreads / 32];
Block blocks[kMaxBlocks];
int threads_per_block = 0, blocks_alive = 0;
size_t shared_size = 0;
int stride = 0;  // fibers from one block to the next: whole warps
Stack scheduler_stack;
Fiber* running = nullptr;
std::vector<Fiber*> ready;
const std::function<void()>* body = nullptr;
std::mt19937_64 generator;
char fence_token, launch_token;  // addresses for ThreadSanitizer
alignas(1024) unsigned char shared_memory[kMaxBlocks][(kMaxShared + 1023) / 1024 * 1024];

Units* units = nullptr;
std::string error_text;
bool failed = false;
// How this launch draws: how often the units go first (per mille), and whether some warps are far
// quicker than others for a while.
int eagerness = 0;
bool skewed = false;
int speed[kMaxThreads / 32];

void to_scheduler() { running->stack.switch_to(scheduler_stack); }

int warp_of(const Fiber* fiber) { return static_cast<int>(fiber - fibers) / 32; }

void make_ready(Fiber* fiber) {
  fiber->state = State::ready;
  ready.push_back(fiber);
}

// The running fiber, from its next switch on.
void wait_for(const void* key, const Why& why) {
  running->state = State::waiting;
  running->key = key;
  running->why = &why;
}

// When all threads of the block that have not returned wait at its barrier.
void open_block_barrier(Block& block) {
  if (block.waiting == 0 || block.waiting != block.live) return;
  block.waiting = 0;
  wake(&block);
}

void entry() {
  acquire(launch_token);
  (*body)();
  release(launch_token);
  running->state = State::done;
  Block& block = blocks[running->rank];
  bool last = --block.live == 0;
  open_block_barrier(block);
  if (last && units != nullptr) units->block_exits(running->rank);
  to_scheduler();
}

void start(Fiber* fiber) {
  fiber->stack.start(entry);
  fiber->exchanges = fiber->meetings = 0;
  make_ready(fiber);
}

// Which of those that are ready goes on.
size_t draw_ready() {
  size_t drawn = draw(ready.size());
  if (!skewed) return drawn;
  for (int i = 0; i < 3; ++i) {
    size_t other = draw(ready.size());
    if (speed[warp_of(ready[other])] > speed[warp_of(ready[drawn])]) drawn = other;
  }
  if (draw(512) == 0) speed[draw(kMaxThreads / 32)] = static_cast<int>(draw(1000));
  return drawn;
}

bool any_alive() {
  return std::any_of(blocks, blocks + blocks_alive, [](const Block& b) { return b.live > 0; });
}

void end_launch(const std::string& error) {
  error_text = error;
  std::fprintf(stderr, "%s\n", error.c_str());
  failed = true;
}

// Who waits where: threads that wait for the same in the same block are counted together.
void report_deadlock() {
  std::map<std::string, std::pair<int, int>> reasons;  // -> first thread, threads
  for (int b = 0; b < blocks_alive; ++b) {
    for (int t = 0; t < threads_per_block; ++t) {
      const Fiber& fiber = fibers[b * stride + t];
      if (fiber.state == State::done) continue;
      auto& entry = reasons[text("block %u: ", fiber.block_idx.x) + (*fiber.why)()];
      if (entry.second++ == 0) entry.first = t;
    }
  }
  std::string all = "deadlock: threads wait at barriers that others do not reach";
  for (const auto& [where, who] : reasons) {
    all += text("\n  %s: thread %d and %d more", where.c_str(), who.first, who.second - 1);
  }
  end_launch(all);
}

void step_one() {
  bool first = units != nullptr && draw(1000) < static_cast<uint64_t>(eagerness);
  if ((first || ready.empty()) && units != nullptr && units->can_step()) {
    units->step();
  } else if (ready.empty()) {
    report_deadlock();
  } else {
    size_t drawn = draw_ready();
    Fiber* next = ready[drawn];
    ready[drawn] = ready.back();
    ready.pop_back();
    running = next;
    threadIdx = next->thread_idx;
    blockIdx = next->block_idx;
    scheduler_stack.switch_to(next->stack);
    running = nullptr;
  }
}

// False: it failed, and error_text says how.
bool run_cluster() {
  ready.clear();
  release(launch_token);
  for (int b = 0; b < blocks_alive; ++b) {
    blocks[b].live = threads_per_block;
    blocks[b].waiting = 0;
    std::memset(shared_memory[b], 0xFF, sizeof shared_memory[b]);
    for (int t = 0; t < threads_per_block; ++t) start(&fibers[b * stride + t]);
  }
  try {
    if (units != nullptr) units->begin_cluster();
    while (!failed && any_alive()) step_one();
    while (!failed && units != nullptr && units->can_step()) units->step();
  } catch (const Failure&) {
  }
  acquire(launch_token);
  return !failed;
}

// Another style of interleaving for each launch.
void draw_style() {
  constexpr int rates[] = {0, 2, 20, 200, 700};
  eagerness = rates[draw(5)];
  skewed = draw(2) == 0;
  for (int& s : speed) s = static_cast<int>(draw(1000));
}

uint3 coordinates(size_t i, dim3 size) {
  return {static_cast<unsigned>(i % size.x), static_cast<unsigned>(i / size.x % size.y),
          static_cast<unsigned>(i / size.x / size.y)};
}

std::string formatted(const char* format, va_list arguments) {
  char buffer[512];
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  return buffer;
}

}  // namespace

int thread_of_block() { return running->thread; }
int block_rank() { return running->rank; }
int block_threads() { return threads_per_block; }
int cluster_blocks() { return blocks_alive; }
size_t shared_bytes() { return shared_size; }
uint8_t* shared_of(int rank) { return shared_memory[rank]; }
bool has_exited(int rank) { return blocks[rank].live == 0; }
int lane() { return running->thread % 32; }
int warp_meetings() { return running->meetings; }
void* dynamic_shared() { return shared_memory[running->rank]; }
void set_seed(uint64_t seed) { generator.seed(seed); }
uint64_t draw(uint64_t below) { return generator() % below; }
void attach(Units* u) { units = u; }
const char* last_error() { return error_text.c_str(); }

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string result = formatted(format, arguments);
  va_end(arguments);
  return result;
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string error = formatted(format, arguments);
  va_end(arguments);
  if (running == nullptr) {
    end_launch(error);
    throw Failure{};
  }
  end_launch(error + text(" (block %u, thread %d)", running->block_idx.x, running->thread));
  to_scheduler();  // for good
  std::abort();
}

void park(const void* key, const Why& why) {
  wait_for(key, why);
  to_scheduler();
}

void wake(const void* key) {
  for (int f = 0; f < blocks_alive * stride; ++f) {
    if (fibers[f].state == State::waiting && fibers[f].key == key) make_ready(&fibers[f]);
  }
}

void yield() {
  ready.push_back(running);
  to_scheduler();
}

void block_barrier() {
  static const Why why = [] { return "__syncthreads"; };
  Block& block = blocks[running->rank];
  release(block.token);
  ++block.waiting;
  wait_for(&block, why);
  open_block_barrier(block);
  to_scheduler();
  acquire(block.token);
}

// The last lane of the mask to come makes the others ready.
void warp_wait(unsigned mask) {
  static const Why why = [] { return "the lanes of its warp"; };
  const Warp* warp = &warps[warp_of(running)];
  Fiber* lanes = &fibers[warp_of(running) * 32];
  wait_for(warp, why);
  running->warp_mask = mask;
  auto each = [&](auto f) {  // true if it is of all lanes of the mask
    for (int l = 0; l < 32; ++l) {
      if ((mask >> l & 1) != 0 && !f(lanes[l])) return false;
    }
    return true;
  };
  bool all = each([&](const Fiber& f) {
    return f.state == State::waiting && f.key == warp && f.warp_mask == mask;
  });
  if (all) each([](Fiber& f) { return make_ready(&f), true; });
  to_scheduler();
  if (mask == 0xFFFFFFFFu) ++running->meetings;
}

void warp_barrier(unsigned mask) {
  char& token = warps[warp_of(running)].token;
  release(token);
  warp_wait(mask);
  acquire(token);
}

// Orders no memory, as in CUDA.
const uint64_t* warp_exchange(unsigned mask, uint64_t value) {
  uint64_t* values = warps[warp_of(running)].values[running->exchanges++ % 2];
  values[lane()] = value;
  warp_wait(mask);
  return values;
}

void fence() {
  acquire(fence_token);
  release(fence_token);
}

extern "C" {
int64_t gpu_on_cpu_kernels = 0;  // which tests read
}

cudaError_t run(const cudaLaunchConfig_t& config, size_t parameter_bytes,
                const std::function<void()>& kernel) {
  ++gpu_on_cpu_kernels;
  const dim3 grid = gridDim = config.gridDim, block = blockDim = config.blockDim;
  size_t threads = size_t{block.x} * block.y * block.z, count = size_t{grid.x} * grid.y * grid.z;
  size_t cluster = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const auto& c = config.attrs[i].val.clusterDim;
    if (c.x == 0 || c.y != 1 || c.z != 1) return cudaErrorInvalidConfiguration;
    cluster = c.x;
  }
  if (threads == 0 || threads > kMaxThreads || count == 0 || grid.x > INT32_MAX ||
      parameter_bytes > kMaxParameters || config.dynamicSmemBytes > kMaxShared ||
      cluster > kMaxBlocks || grid.x % cluster != 0) {
    return cudaErrorInvalidConfiguration;
  }
  threads_per_block = static_cast<int>(threads);
  stride = (threads_per_block + 31) / 32 * 32;
  blocks_alive = static_cast<int>(cluster);
  shared_size = config.dynamicSmemBytes;
  if (size_t(stride) * cluster > kMaxThreads) {
    std::fprintf(stderr, "the shim runs at most %d threads at once\n", kMaxThreads);
    return cudaErrorInvalidConfiguration;
  }
  scheduler_stack.adopt_this_thread();
  body = &kernel;
  failed = false;
  error_text.clear();
  if (units != nullptr) draw_style();
  std::vector<size_t> order(count / cluster);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t c = order.size(); c > 1; --c) std::swap(order[c - 1], order[generator() % c]);
  for (size_t c : order) {
    for (int b = 0; b < blocks_alive; ++b) {
      uint3 place = coordinates(c * cluster + b, grid);
      for (int t = 0; t < stride; ++t) {
        Fiber& fiber = fibers[b * stride + t];
        fiber.thread_idx = coordinates(t, block);
        fiber.block_idx = place;
        fiber.rank = b;
        fiber.thread = t;
        fiber.state = State::done;
      }
    }
    if (!run_cluster()) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

}  // namespace cuda_on_cpu
