// What scheduler.cpp offers, beyond cuda_runtime.h, to models of instructions that wait for more
// than barriers and of units that work beside the threads (../hopper).
#pragma once

#include <cstdarg>
#include <cstdint>
#include <functional>
#include <string>

namespace cuda_on_cpu {

constexpr int kMaxThreads = 1024;  // of all blocks that live at once
constexpr int kMaxBlocks = 8;      // of a cluster
constexpr size_t kMaxShared = 227 << 10;

// The running thread, and what it belongs to.
int thread_of_block();
int block_rank();  // within its cluster
int block_threads();
int cluster_blocks();
size_t shared_bytes();         // of dynamic shared memory that the launch asked for
uint8_t* shared_of(int rank);  // that memory, of one block of the cluster
bool has_exited(int rank);     // all threads of that block have returned

uint64_t draw(uint64_t below);  // from the seed

int warp_meetings();  // how often the running thread's whole warp has met so far

// Ends the launch with a message, which names the running thread. last_error() keeps it.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
const char* last_error();

// The thread sleeps until wake(key). `why` is asked for if nothing can run any more.
void park(const void* key, const std::function<std::string()>& why);
void wake(const void* key);

template <class Ready>
void wait_until(const void* key, const Ready& ready, const std::function<std::string()>& why) {
  while (!ready()) park(key, why);
}

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Units that work beside the threads. One step is one thing that they could do next.
struct Units {
  virtual void begin_cluster() = 0;
  virtual bool can_step() = 0;
  virtual void step() = 0;
  virtual void block_exits(int rank) = 0;  // its last thread returned

 protected:
  ~Units() = default;
};
void attach(Units* units);

}  // namespace cuda_on_cpu
