// The Hopper units of one cluster on a CPU, after the PTX ISA manual, whose section titles the
// files beside this one name. They do everything as late and in as odd an order as the manual
// allows, drawn from the seed, and end the launch where it says "undefined behavior".
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace cuda_on_cpu::sm90 {

// ---- addresses ----
constexpr uint32_t kWindow = 1024;  // where dynamic shared memory starts in the shared window
uint32_t shared_address(const void* p);

// ---- mbarrier.cpp ----
void barrier_init(const void* b, uint32_t arrivals);
void barrier_init_fence();
void barrier_arrive_expect(const void* b, uint32_t bytes);
void barrier_arrive(const void* b);
void barrier_arrive_at(const void* b, uint32_t rank);
void barrier_wait(const void* b, uint32_t parity);

// ---- tma.cpp ----
void prefetch_map(const CUtensorMap* map);
void tma_load(const void* to, const CUtensorMap* map, const void* b, int x, int y);
void tma_load_multicast(const void* to, const CUtensorMap* map, const void* b, int x, int y,
                        uint32_t blocks);
void tma_store(const CUtensorMap* map, const void* from, int x, int y);
void tma_add(const CUtensorMap* map, const void* from, int x, int y);
void tma_store_commit();
void tma_store_wait_read(int groups);

// ---- shared_words.cpp ----
void fence_async_proxy();
void store_shared(float* to, float x, float y);
float2 load_shared(const float* from);

// ---- wgmma.cpp ----
enum class Format { bf16, fp16, e4m3, e5m2 };
struct Shape {
  Format a, b;
  int n;
  bool a_mn_major, b_mn_major;
  bool operator==(const Shape&) const = default;
};
void wgmma(const Shape& shape, float* d, uint64_t desc_a, uint64_t desc_b, bool accumulate);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups);
// FP8 sums as Hopper's tensor cores keep them: aligned to the largest term, 13 bits below its
// leading one, the rest cut off.
void truncate_fp8_sums(bool on);

// ---- warps.cpp ----
void stmatrix(void* row, const uint32_t (&r)[4]);
void named_barrier(int id, int threads);
bool elect_one();
uint32_t cluster_rank();
void cluster_sync();
void set_registers(int n, bool more);

}  // namespace cuda_on_cpu::sm90
