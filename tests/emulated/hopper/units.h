// What the units of model.h know of each other.
#pragma once

#include <memory>
#include <vector>

#include "model.h"
#include "scheduler.h"

namespace cuda_on_cpu::sm90 {

// Something under way. can_step is asked often.
struct Task {
  virtual ~Task() = default;
  virtual bool can_step() const { return true; }
  virtual bool step() = 0;  // true: done
};
void add_task(std::unique_ptr<Task> task);

// Every file's part of what happens at the edges of a cluster's life.
void clear_words();
void clear_barriers();
void clear_tma();
void clear_wgmma();
void clear_warps();
void check_exit_of_barriers(int rank);
void check_exit_of_tma(int rank);
void check_exit_of_wgmma(int rank);
void check_exit_of_warps(int rank);

// A number for each thread of the cluster.
inline int thread_id() { return block_rank() * block_threads() + thread_of_block(); }

// ---- shared_words.cpp: who uses which bytes of shared memory; `at` counts from its start ----
uint32_t offset_of(const void* p, int bytes, int alignment, const char* what);
void generic_write(int rank, uint32_t at, int bytes);  // by the running thread
// The running thread arrives at an mbarrier of its block: its loads are over, and those that other
// lanes of its warp made before the warp last met.
void finish_loads();
// Words of 16 bytes that a unit reads or writes some time from now on, until it ends.
void begin_read(int rank, uint32_t at, const char* who);
void end_read(int rank, uint32_t at);
void begin_write(int rank, uint32_t at, const char* who);
void end_write(int rank, uint32_t at);
void hold_barrier(int rank, uint32_t at);  // 8 bytes

// ---- mbarrier.cpp, for TMA ----
// Words of a box that lie there, but count as being written until the phase ends.
void land(int rank, uint32_t barrier, uint32_t bytes, const std::vector<uint32_t>& words);
void check_for_tma(int rank, uint32_t barrier);

// The 128-byte swizzle: bits 4..6 of an address are xored with bits 7..9 (PTX ISA, "Swizzling
// modes"). Of addresses: that the window starts at a multiple of 1024 makes offsets do.
constexpr uint32_t swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

// ---- operand.cpp: where wgmma finds an operand, from the bits of its descriptor ----
constexpr int kStepBytes = 32;  // of K in one wgmma

constexpr int element_bytes(Format f) { return f == Format::bf16 || f == Format::fp16 ? 2 : 1; }

// The places in shared memory of the operand's 16-byte words. K-major: for each of `rows` rows 2
// words along K; MN-major: for each k the words along M or N. Ends the launch if some lie outside.
std::vector<uint32_t> operand_words(uint64_t descriptor, Format format, bool mn_major, int rows,
                                    const char* who);

// The words as floats: rows [first, first + rows) of all_rows, `row_stride` and `k_stride` apart.
void decode(const uint8_t* shared, const std::vector<uint32_t>& words, Format format, bool mn_major,
            int all_rows, int first, int rows, float* to, int row_stride, int k_stride);

}  // namespace cuda_on_cpu::sm90
