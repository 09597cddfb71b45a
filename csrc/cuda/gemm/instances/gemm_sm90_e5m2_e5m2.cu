// GEMM of E5M2 a and E5M2 b: with one scale at the end.
#include "cuda/gemm/instances/gemm_instances.cuh"

namespace mixprec::cuda::sm90 {
template Instance instance<E5m2, E5m2, Major::k, Major::k, Accumulate::direct>(int row);
template Instance instance<E5m2, E5m2, Major::k, Major::k, Accumulate::promoted>(int row);
}  // namespace mixprec::cuda::sm90
