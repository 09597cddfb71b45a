// GEMM of E5M2 a and E5M2 b: with scales of blocks along K.
#include "cuda/gemm/instances/gemm_instances.cuh"

namespace mixprec::cuda::sm90 {
template Instance instance<E5m2, E5m2, Major::k, Major::k, Accumulate::scaled>(int row);
}  // namespace mixprec::cuda::sm90
