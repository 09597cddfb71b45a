// GEMM of bf16 operands: a M-major, b K-major.
#include "cuda/gemm/instances/gemm_instances.cuh"

namespace mixprec::cuda::sm90 {
template Instance instance<Bf16, Bf16, Major::mn, Major::k, Accumulate::direct>(int row);
}  // namespace mixprec::cuda::sm90
