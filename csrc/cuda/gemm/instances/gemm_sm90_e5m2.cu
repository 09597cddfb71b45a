// GEMM of E5M2 a and FP8 b: with one scale at the end, and with scales of blocks along K.
#include "cuda/gemm/kernel/gemm_sm90.cuh"

namespace mixprec::cuda::sm90 {
template Instance instance<E5m2, E4m3, Major::k, Major::k, Accumulate::direct, Accumulate::promoted,
                           Accumulate::scaled>(int);
template Instance instance<E5m2, E5m2, Major::k, Major::k, Accumulate::direct, Accumulate::promoted,
                           Accumulate::scaled>(int);
}  // namespace mixprec::cuda::sm90
