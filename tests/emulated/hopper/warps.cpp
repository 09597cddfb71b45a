// Barriers beyond __syncthreads, registers, and the stores of matrices.
#include <cuda_runtime.h>

#include <array>

#include "units.h"

namespace cuda_on_cpu::sm90 {

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;

struct Barrier {
  int expected = 0, arrived = 0;
  uint64_t round = 0;

  void arrive_and_wait(const char* what, int id) {
    if (++arrived == expected) {
      arrived = 0;
      ++round;
      wake(this);
      yield();
      return;
    }
    wait_until(
        this, [this, before = round] { return round != before; },
        [&] { return text("%s %d, %d of %d threads", what, id, arrived, expected); });
  }
};

std::array<Barrier, 16> named[kMaxBlocks];
Barrier cluster;
int elected;                                // lane, in all warps
int registers_left[kMaxBlocks];             // in the pool of the block
std::vector<int> registers_of, changes_of;  // per warp of the cluster

int warps_per_block() { return (block_threads() + 31) / 32; }
int warp_id() { return block_rank() * warps_per_block() + thread_of_block() / 32; }

}  // namespace

void clear_warps() {
  for (auto& of_block : named) of_block.fill({});
  cluster = {cluster_blocks() * block_threads()};
  elected = static_cast<int>(draw(32));
  // As many as a launch can give to each thread, in steps of 8.
  int each = std::min(65536 / block_threads() / 8 * 8, 248);
  registers_of.assign(static_cast<size_t>(cluster_blocks()) * warps_per_block(), each);
  changes_of.assign(registers_of.size(), 0);
  for (int& left : registers_left) left = 0;
}

// setmaxnreg: "must be executed by all warps in a warpgroup".
void check_exit_of_warps(int rank) {
  const int* changes = changes_of.data() + rank * warps_per_block();
  for (int w = 0; w < warps_per_block(); ++w) {
    if (changes[w] != changes[w / 4 * 4]) {
      fail("setmaxnreg: not executed by all warps of warpgroup %d", w / 4);
    }
  }
}

// PTX ISA, "stmatrix": .x4, .m8n8, .b16. Lane l writes element pair l % 4 of row l / 4 of each.
void stmatrix(void* row, const uint32_t (&r)[4]) {
  uint32_t at = offset_of(row, 16, 16, "stmatrix");
  std::array<uint32_t, 32> rows;
  const uint64_t* all = warp_exchange(kAll, at);
  for (int l = 0; l < 32; ++l) rows[l] = static_cast<uint32_t>(all[l]);
  for (int m = 0; m < 4; ++m) {
    uint32_t to = rows[8 * m + lane() / 4] + lane() % 4 * 4;
    generic_write(block_rank(), to, 4);
    std::memcpy(shared_of(block_rank()) + to, &r[m], 4);
  }
}

// PTX ISA, "bar, barrier": barrier 0 is that of __syncthreads here.
void named_barrier(int id, int threads) {
  if (id < 1 || id > 15) fail("barrier.cta: barrier %d", id);
  if (threads < 32 || threads % 32 != 0 || threads > block_threads()) {
    fail("barrier.cta: %d threads", threads);
  }
  Barrier& b = named[block_rank()][id];
  if (b.arrived == 0) b.expected = threads;
  if (b.expected != threads) {
    fail("barrier.cta %d: for %d threads here, for %d elsewhere", id, threads, b.expected);
  }
  b.arrive_and_wait("barrier", id);
}

// PTX ISA, "elect.sync": which lane is not specified, but always the same for the same mask.
bool elect_one() {
  __syncwarp();
  return lane() == elected;
}

uint32_t cluster_rank() { return static_cast<uint32_t>(block_rank()); }

// PTX ISA, "barrier.cluster": all threads of the cluster. That exited threads would count as
// arrived is not modelled: a kernel that needs it deadlocks here.
void cluster_sync() {
  __syncwarp();  // .aligned
  cluster.arrive_and_wait("barrier.cluster", 0);
}

// PTX ISA, "setmaxnreg": .inc waits until the pool of the block has enough.
void set_registers(int n, bool more) {
  if (n < 24 || n > 256 || n % 8 != 0) fail("setmaxnreg: %d registers", n);
  const uint64_t* counts = warp_exchange(kAll, static_cast<uint64_t>(n));
  for (int l = 0; l < 32; ++l) {
    if (counts[l] != static_cast<uint64_t>(n)) fail("setmaxnreg: lanes ask for different counts");
  }
  __syncwarp();
  if (lane() == 0) {
    int& mine = registers_of[warp_id()];
    int& left = registers_left[block_rank()];
    if (more ? n < mine : n > mine) {
      fail("setmaxnreg.%s %d: the warp has %d", more ? "inc" : "dec", n, mine);
    }
    wait_until(
        &left, [&] { return left >= (n - mine) * 32; },
        [&] { return text("setmaxnreg.inc %d, %d registers are free", n, left); });
    left -= (n - mine) * 32;
    mine = n;
    ++changes_of[warp_id()];
    wake(&left);
  }
  __syncwarp();
}

}  // namespace cuda_on_cpu::sm90
