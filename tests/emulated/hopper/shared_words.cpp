// Which bytes of shared memory are in use by whom. Of generic loads only those of load_shared are
// seen: what TMA is still to write is filled with NaN meanwhile. PTX ISA, "Proxies" and "membar /
// fence": writes through the generic proxy are for the async proxy only behind fence.proxy.async of
// the thread that wrote; "Async proxy": unfinished asynchronous operations must not meet other
// accesses.
#include <cuda_runtime.h>

#include "units.h"

namespace cuda_on_cpu::sm90 {

namespace {

struct Word {
  uint16_t writer[4];  // 1 + the thread that wrote these 4 bytes and has not fenced since; 0
  uint16_t reads, writes;
  bool barrier;
  bool generic;  // threads of the block have used it
};

// Of one thread, by load_shared, that no arrival has made known yet.
struct Load {
  int thread, meetings;  // of the warp, at that time
  uint32_t at;
};

std::vector<Word> words[kMaxBlocks];
std::vector<std::vector<uint32_t>> unfenced;  // per thread: index of 4 bytes
std::vector<std::vector<Load>> loads;         // per warp of the cluster

std::vector<Load>& loads_of_warp() {
  return loads[block_rank() * ((block_threads() + 31) / 32) + thread_of_block() / 32];
}

Word& word(int rank, uint32_t at, const char* who) {
  if (at % 16 != 0) fail("%s: shared memory +%u is not 16-byte aligned", who, at);
  if (at + size_t{16} > shared_bytes()) {
    fail("%s leaves the shared memory of the block: +%u of %zu bytes", who, at, shared_bytes());
  }
  return words[rank][at / 16];
}

}  // namespace

void clear_words() {
  for (int b = 0; b < cluster_blocks(); ++b) words[b].assign((shared_bytes() + 15) / 16, Word{});
  unfenced.assign(static_cast<size_t>(cluster_blocks()) * block_threads(), {});
  loads.assign(static_cast<size_t>(cluster_blocks()) * ((block_threads() + 31) / 32), {});
}

uint32_t offset_of(const void* p, int bytes, int alignment, const char* what) {
  ptrdiff_t at = static_cast<const uint8_t*>(p) - shared_of(block_rank());
  if (at < 0 || static_cast<size_t>(at) + bytes > shared_bytes()) {
    fail("%s: %td..%td is outside of the block's %zu bytes of shared memory", what, at, at + bytes,
         shared_bytes());
  }
  if (at % alignment != 0)
    fail("%s: shared memory +%td is not %d-byte aligned", what, at, alignment);
  return static_cast<uint32_t>(at);
}

uint32_t shared_address(const void* p) { return kWindow + offset_of(p, 0, 1, "shared_address"); }

void generic_write(int rank, uint32_t at, int bytes) {
  for (uint32_t i = at / 4; i < (at + bytes) / 4; ++i) {
    Word& w = words[rank][i / 4];
    if (w.reads != 0)
      fail("a thread overwrites shared memory +%u that TMA or wgmma may read", i * 4);
    if (w.writes != 0) fail("a thread writes shared memory +%u that TMA writes", i * 4);
    if (w.barrier) fail("a thread overwrites the mbarrier in shared memory +%u", i * 4);
    w.generic = true;
    w.writer[i % 4] = static_cast<uint16_t>(thread_id() + 1);
    unfenced[thread_id()].push_back(i);
  }
}

void store_shared(float* to, float x, float y) {
  generic_write(block_rank(), offset_of(to, 8, 8, "store_shared"), 8);
  to[0] = x;
  to[1] = y;
}

float2 load_shared(const float* from) {
  if (draw(16) == 0) yield();
  uint32_t at = offset_of(from, 8, 8, "load_shared");
  Word& w = word(block_rank(), at / 16 * 16, "load_shared");
  if (w.writes != 0) fail("a thread reads shared memory +%u that TMA still writes", at);
  w.generic = true;
  ++w.reads;
  loads_of_warp().push_back({thread_id(), warp_meetings(), at / 16 * 16});
  return {from[0], from[1]};
}

void finish_loads() {
  std::erase_if(loads_of_warp(), [](const Load& load) {
    bool known = load.thread == thread_id() || load.meetings < warp_meetings();
    if (known) end_read(block_rank(), load.at);
    return known;
  });
}

void fence_async_proxy() {
  uint16_t me = static_cast<uint16_t>(thread_id() + 1);
  for (uint32_t i : unfenced[thread_id()]) {
    uint16_t& writer = words[block_rank()][i / 4].writer[i % 4];
    if (writer == me) writer = 0;
  }
  unfenced[thread_id()].clear();
}

void begin_read(int rank, uint32_t at, const char* who) {
  Word& w = word(rank, at, who);
  for (uint16_t writer : w.writer) {
    if (writer == 0) continue;
    fail("%s reads shared memory +%u that thread %d wrote without fence.proxy.async", who, at,
         (writer - 1) % block_threads());
  }
  if (w.writes != 0) fail("%s reads shared memory +%u that TMA still writes", who, at);
  if (w.barrier) fail("%s reads the mbarrier in shared memory +%u", who, at);
  ++w.reads;
}

void end_read(int rank, uint32_t at) { --words[rank][at / 16].reads; }

void begin_write(int rank, uint32_t at, const char* who) {
  Word& w = word(rank, at, who);
  for (uint16_t writer : w.writer) {
    if (writer != 0) fail("%s overwrites shared memory +%u, written and not fenced", who, at);
  }
  if (w.generic && rank != block_rank()) {
    fail("%s of block %d overwrites what threads of block %d use: their order is unknown", who,
         block_rank(), rank);
  }
  if (w.reads != 0) fail("%s overwrites shared memory +%u that is still read", who, at);
  if (w.writes != 0) fail("%s overwrites shared memory +%u that TMA still writes", who, at);
  if (w.barrier) fail("%s overwrites the mbarrier in shared memory +%u", who, at);
  ++w.writes;
  std::memset(shared_of(rank) + at, 0xFF, 16);
}

void end_write(int rank, uint32_t at) { --words[rank][at / 16].writes; }

void hold_barrier(int rank, uint32_t at) {
  Word& w = words[rank][at / 16];
  if (w.reads != 0 || w.writes != 0) fail("an mbarrier in shared memory +%u that is in use", at);
  w.barrier = true;
}

}  // namespace cuda_on_cpu::sm90
