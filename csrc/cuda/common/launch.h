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

// kernel(args...) on `stream`. Returns errors of the launch, not of the execution.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), int64_t grid, int block, int64_t smem,
                   cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = static_cast<size_t>(smem);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// The same with more shared memory than the default limit, for blocks in clusters of `cluster`.
template <class... Params, class... Args>
cudaError_t launch_cluster(void (*kernel)(Params...), int64_t grid, int block, int64_t smem,
                           int cluster, cudaStream_t stream, const Args&... args) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(smem));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute shape = {};
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = static_cast<unsigned>(cluster);
  shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = static_cast<size_t>(smem);
  config.stream = stream;
  config.attrs = &shape;
  config.numAttrs = 1;
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
inline int64_t grid_for(int64_t pieces, int sms, int per_sm = kBlocksPerSm) {
  return std::max<int64_t>(1, std::min<int64_t>(pieces, int64_t{sms} * per_sm));
}
template <class... Params>
int64_t grid_for(void (*kernel)(Params...), int64_t pieces, int sms, int threads = kThreads) {
  return grid_for(pieces, sms, blocks_per_sm(reinterpret_cast<const void*>(kernel), threads));
}

}  // namespace mixprec::cuda
