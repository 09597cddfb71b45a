// The kernel of csrc/cuda/gemm/kernel/gemm_finish.cuh as a C function over host memory, for ctypes.
#include "cuda/gemm/kernel/gemm_finish.cuh"

extern "C" int finish(const float* partial, int splits, int m, int n,
                      const mixprec::cuda::Epilogue* epilogue, int sms) {
  return mixprec::cuda::gemm_finish(partial, splits, m, n, *epilogue, sms, nullptr);
}
