// GEMM of E4M3 a and E4M3 b: with scales of blocks along K.
#include "cuda/gemm/instances/gemm_instances.cuh"

namespace mixprec::cuda::sm90 {
template Instance instance<E4m3, E4m3, Major::k, Major::k, Accumulate::scaled>(int row);
}  // namespace mixprec::cuda::sm90
