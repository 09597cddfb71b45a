// All kernels are launched through these functions. They use neither torch nor <<<>>>, so that the
// kernels also compile as plain C++ with tests/emulated/shim/cuda_runtime.h in place of
// CUDA's header.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace mixprec::cuda {

constexpr int kThreads = 256;    // per block, in all kernels but the GEMM
constexpr int kBlocksPerSm = 8;  // of kThreads threads: a full SM

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

// Blocks for a kernel that loops over `pieces`: at most enough to fill the GPU, at least one.
inline int64_t grid_for(int64_t pieces, int sms) {
  return std::max<int64_t>(1, std::min<int64_t>(pieces, int64_t{sms} * kBlocksPerSm));
}

}  // namespace mixprec::cuda
