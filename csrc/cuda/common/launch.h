// All kernels are launched through these functions. They use neither torch nor <<<>>>, so that the
// kernels also compile as plain C++ with tests/emulated/shim/cuda_runtime.h in place of
// CUDA's header.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

namespace mixprec::cuda {

constexpr int kThreads = 256;    // per block, in all kernels but the GEMM
constexpr int kBlocksPerSm = 8;  // of kThreads threads: all that an SM can hold

// Where the kernels of an op run.
struct Gpu {
  int sms = 0;  // of the GPU
  cudaStream_t stream = nullptr;
};

struct Grid {
  int64_t blocks;
  int threads = kThreads;  // of a block
  int64_t smem = 0;        // bytes of dynamic shared memory, perhaps more than the default limit
  int cluster = 0;         // blocks; 0: the kernel has no clusters
};

// kernel(args...) on `stream`. Returns errors of the launch, not of the execution.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                   const Args&... args) {
  if (grid.smem > 0) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(grid.smem));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute shape = {};
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = static_cast<unsigned>(grid.cluster);
  shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.smem);
  config.stream = stream;
  config.attrs = &shape;
  config.numAttrs = grid.cluster > 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// Blocks of `threads` threads that an SM of the current device runs at once, as the kernel's
// registers and shared memory allow. CUDA is asked once for each kernel, size and device.
inline int blocks_per_sm(const void* kernel, int threads) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int>, int> known;
  int device = 0;
  cudaGetDevice(&device);
  std::lock_guard lock(mutex);
  int& blocks = known[{kernel, threads, device}];
  if (blocks == 0) {
    cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0);
    if (error != cudaSuccess) return kBlocksPerSm;  // the launch will say why
    blocks = std::clamp(blocks, 1, kBlocksPerSm);
  }
  return blocks;
}

// Blocks for a kernel that loops over `pieces`: at most as many as the GPU runs at once, so that
// none waits for others to end; at least one. Without a kernel, of those that an SM could hold.
inline int64_t grid_for(int64_t pieces, const Gpu& gpu, int per_sm = kBlocksPerSm) {
  return std::max<int64_t>(1, std::min<int64_t>(pieces, int64_t{gpu.sms} * per_sm));
}
template <class... Params>
int64_t grid_for(void (*kernel)(Params...), int64_t pieces, const Gpu& gpu,
                 int threads = kThreads) {
  return grid_for(pieces, gpu, blocks_per_sm(reinterpret_cast<const void*>(kernel), threads));
}

// The launch of a kernel that loops over `pieces`.
template <class... Params, class... Args>
cudaError_t launch_over(void (*kernel)(Params...), int64_t pieces, const Gpu& gpu,
                        const Args&... args) {
  return launch(kernel, {grid_for(kernel, pieces, gpu)}, gpu.stream, args...);
}

}  // namespace mixprec::cuda
