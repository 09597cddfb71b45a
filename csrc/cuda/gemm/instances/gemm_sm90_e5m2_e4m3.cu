// GEMM of E5M2 a and E4M3 b: with one scale at the end.
#include "cuda/gemm/instances/gemm_instances.cuh"

namespace mixprec::cuda::sm90 {
template Instance instance<E5m2, E4m3, Major::k, Major::k, Accumulate::direct>(int row);
template Instance instance<E5m2, E4m3, Major::k, Major::k, Accumulate::promoted>(int row);
}  // namespace mixprec::cuda::sm90
