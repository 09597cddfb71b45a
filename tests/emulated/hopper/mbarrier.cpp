// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier": an object counts
// pending arrivals and the bytes (tx-count) that asynchronous operations still owe to its phase.
#include <cuda_runtime.h>

#include <map>

#include "units.h"

namespace cuda_on_cpu::sm90 {

namespace {

constexpr int64_t kMaxTx = (1 << 20) - 1;  // "Contents of the mbarrier object"

struct Mbarrier {
  uint32_t arrivals, pending;
  int64_t tx = 0;
  uint64_t phase = 0;
  int initialiser;
  bool fenced = false;  // fence.mbarrier_init by the thread that made it
  std::vector<uint32_t> landed;
};

std::map<uint32_t, Mbarrier> barriers[kMaxBlocks];

Mbarrier& find(int rank, uint32_t at, const char* what) {
  auto found = barriers[rank].find(at);
  if (found == barriers[rank].end()) {
    fail("%s: no mbarrier was initialised in shared memory +%u", what, at);
  }
  return found->second;
}

Mbarrier& mine(const void* b, const char* what) {
  return find(block_rank(), offset_of(b, 8, 8, what), what);
}

// "Phase completion": no pending arrivals, no pending bytes.
void complete_if_due(int rank, Mbarrier& b) {
  if (b.tx > kMaxTx || b.tx < -kMaxTx) fail("mbarrier: the tx-count leaves its range");
  if (b.pending != 0) return;
  if (b.tx < 0) fail("mbarrier: %lld bytes more came than the phase expects", -(long long)b.tx);
  if (b.tx != 0) return;
  ++b.phase;
  b.pending = b.arrivals;
  for (uint32_t at : b.landed) end_write(rank, at);
  b.landed.clear();
  wake(&b);
}

void arrive(int rank, Mbarrier& b) {
  if (b.pending == 0) fail("mbarrier: an arrival more than the phase expects");
  --b.pending;
  complete_if_due(rank, b);
}

}  // namespace

void clear_barriers() {
  for (auto& of_block : barriers) of_block.clear();
}

void check_exit_of_barriers(int rank) {
  for (auto& [at, b] : barriers[rank]) {
    if (b.tx != 0) {
      fail("mbarrier +%u: block %d exits while %lld bytes are expected", at, rank, (long long)b.tx);
    }
  }
}

// mbarrier.init: undefined on a location that holds a valid object.
void barrier_init(const void* p, uint32_t arrivals) {
  uint32_t at = offset_of(p, 8, 8, "mbarrier.init");
  if (arrivals < 1 || arrivals > kMaxTx) fail("mbarrier.init: a count of %u", arrivals);
  if (barriers[block_rank()].count(at) != 0) fail("mbarrier.init: +%u is one already", at);
  hold_barrier(block_rank(), at);
  Mbarrier b;
  b.arrivals = b.pending = arrivals;
  b.initialiser = thread_id();
  barriers[block_rank()][at] = b;
}

void barrier_init_fence() {
  for (auto& [at, b] : barriers[block_rank()]) b.fenced |= b.initialiser == thread_id();
}

// mbarrier.arrive.expect_tx: "performs an expect-tx operation prior to the arrive-on operation".
void barrier_arrive_expect(const void* p, uint32_t bytes) {
  yield();
  Mbarrier& b = mine(p, "mbarrier.arrive.expect_tx");
  if (b.pending == 0) fail("mbarrier: an arrival more than the phase expects");
  b.tx += bytes;
  arrive(block_rank(), b);
}

void barrier_arrive(const void* p) {
  yield();
  finish_loads();
  arrive(block_rank(), mine(p, "mbarrier.arrive"));
}

// mapa + mbarrier.arrive.shared::cluster, which is .release.cta: an arrival at another block counts
// there, but says nothing of this thread's loads and stores.
void barrier_arrive_at(const void* p, uint32_t rank) {
  yield();
  uint32_t at = offset_of(p, 8, 8, "mbarrier.arrive.shared::cluster");
  if (rank >= static_cast<uint32_t>(cluster_blocks()))
    fail("mapa: the cluster has no block %u", rank);
  if (has_exited(rank)) fail("mbarrier.arrive: block %u of the cluster has exited", rank);
  Mbarrier& b = find(rank, at, "mbarrier.arrive.shared::cluster");
  if (static_cast<int>(rank) == block_rank()) {
    finish_loads();
  } else if (!b.fenced) {
    fail("mbarrier +%u of block %u: no fence.mbarrier_init", at, rank);
  }
  arrive(rank, b);
}

// mbarrier.test_wait / try_wait .parity, .acquire.cta: true where the phase in progress has the
// other parity. A thread that wakes late looks again, as one that polls does.
void barrier_wait(const void* p, uint32_t parity) {
  if (draw(4) == 0) yield();
  uint32_t at = offset_of(p, 8, 8, "mbarrier.try_wait");
  Mbarrier& b = find(block_rank(), at, "mbarrier.try_wait");
  if (parity > 1) fail("mbarrier.try_wait: parity %u", parity);
  wait_until(
      &b, [&] { return b.phase % 2 != parity; },
      [&] {
        return text("mbarrier +%u, parity %u; phase %llu has %u pending arrivals, %lld bytes", at,
                    parity, (unsigned long long)b.phase, b.pending, (long long)b.tx);
      });
}

void check_for_tma(int rank, uint32_t at) {
  if (!find(rank, at, "TMA load").fenced) {
    fail("TMA load: mbarrier +%u of block %d without fence.mbarrier_init", at, rank);
  }
}

void land(int rank, uint32_t at, uint32_t bytes, const std::vector<uint32_t>& words) {
  Mbarrier& b = find(rank, at, "TMA load");
  b.landed.insert(b.landed.end(), words.begin(), words.end());
  b.tx -= bytes;
  complete_if_due(rank, b);
}

}  // namespace cuda_on_cpu::sm90
