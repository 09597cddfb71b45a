// Replaces CUDA's header of this name, so that the kernels of csrc/cuda compile as plain C++ and
// run on a CPU. Tests only. Each CUDA thread is a fiber (scheduler.cpp); one fiber runs until
// it waits at a barrier or touches an atomic, then another is drawn at random from a seed. So
// values are reproducible, a deadlock is a launch that fails, and ThreadSanitizer, which knows of
// the fibers and of nothing that CUDA does not promise, sees every missing barrier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run in turn, and clusters use dynamic shared memory alone
#define __forceinline__ inline __attribute__((always_inline))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct alignas(8) float2 {
  float x, y;
};

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
using cudaStream_t = void*;

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  return bytes <= 227 << 10 ? cudaSuccess : cudaErrorInvalidValue;
}

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

// Of the running fiber.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace cuda_on_cpu {

constexpr int kDeviceSms = 4;  // few: blocks walk over several pieces
const char* last_error();      // what the last launch that failed said

void set_seed(uint64_t seed);
// Runs kernel() once per thread of every block. The blocks of a cluster live together; clusters
// (without the attribute: blocks) run one after another in random order.
cudaError_t run(const cudaLaunchConfig_t& config, size_t parameter_bytes,
                const std::function<void()>& kernel);

void* dynamic_shared();            // of the running block, 1024-byte aligned, filled with 0xFF
void yield();                      // lets another fiber run
void block_barrier();              // __syncthreads
void warp_barrier(unsigned mask);  // __syncwarp
// Each lane of the mask gives a value of at most 8 bytes; returns those of the warp's 32 lanes.
const uint64_t* warp_exchange(unsigned mask, uint64_t value);
void fence();  // __threadfence
int lane();

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace cuda_on_cpu

// The barrier on the line that MIXPREC_WITHOUT_BARRIER names ("amax.cuh:25") does nothing.
inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static const char* without = std::getenv("MIXPREC_WITHOUT_BARRIER");
  if (without != nullptr) {
    std::string here = file;
    here = here.substr(here.rfind('/') + 1) + ":" + std::to_string(line);
    if (here == without) return;
  }
  cuda_on_cpu::block_barrier();
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { cuda_on_cpu::warp_barrier(mask); }
inline void __threadfence() { cuda_on_cpu::fence(); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return cuda_on_cpu::from_bits<T>(
      cuda_on_cpu::warp_exchange(mask, cuda_on_cpu::to_bits(value))[source & 31]);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, cuda_on_cpu::lane() ^ bits);
}

// Byte i of the result is the byte of (high, low) that nibble i of the selector names.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  }
  return result;
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const uint64_t* values = cuda_on_cpu::warp_exchange(mask, value);
  uint64_t largest = 0;
  for (int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) != 0 && values[l] > largest) largest = values[l];
  }
  return static_cast<unsigned>(largest);
}
inline int __any_sync(unsigned mask, int predicate) {
  return __reduce_max_sync(mask, predicate != 0) != 0;
}

// Relaxed, as in CUDA: what comes before and after is ordered by fences and barriers alone.
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  cuda_on_cpu::yield();
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}

template <class T>
T atomicExch(T* p, std::type_identity_t<T> value) {
  cuda_on_cpu::yield();
  T old;
  __atomic_exchange(p, &value, &old, __ATOMIC_RELAXED);
  return old;
}

template <class T>
T atomicMax(T* p, std::type_identity_t<T> value) {
  cuda_on_cpu::yield();
  T seen = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (value > seen &&
         !__atomic_compare_exchange_n(p, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}

#ifdef CUDA_ON_CPU_GRAPHS
// Of a runtime that captures graphs (device/cudart.cpp).
extern "C" {
int gpu_on_cpu_captures(cudaStream_t stream);
void gpu_on_cpu_record(void (*run)(void*), void (*drop)(void*), void* what);
}
#endif

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  constexpr size_t bytes = (sizeof(Params) + ... + 0);
#ifdef CUDA_ON_CPU_GRAPHS
  if (gpu_on_cpu_captures(config->stream)) {
    // As a graph has it: by value, with the arguments of this call.
    struct Launch {
      cudaLaunchConfig_t config;
      cudaLaunchAttribute attribute;
      std::function<void()> kernel;
    };
    auto* launch = new Launch{*config, {}, [=] { kernel(args...); }};
    if (config->numAttrs > 0) launch->attribute = *config->attrs;
    launch->config.attrs = &launch->attribute;
    gpu_on_cpu_record(
        [](void* what) {
          auto* recorded = static_cast<Launch*>(what);
          cudaError_t error = cuda_on_cpu::run(recorded->config, bytes, recorded->kernel);
          if (error != cudaSuccess) std::abort();  // nobody is there to be told
        },
        [](void* what) { delete static_cast<Launch*>(what); }, launch);
    return cudaSuccess;
  }
#endif
  return cuda_on_cpu::run(*config, bytes, [&] { kernel(args...); });
}

// One device, a small Hopper GPU, which runs two blocks of any kernel on an SM. Errors come from
// the launches themselves.
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                                 size_t) {
  *blocks = 2;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
           : attribute == cudaDevAttrComputeCapabilityMinor ? 0
           : attribute == cudaDevAttrMultiProcessorCount    ? cuda_on_cpu::kDeviceSms
                                                            : 227 << 10;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return cuda_on_cpu::last_error(); }
