// GEMM of bf16 operands, in all layouts.
#include "cuda/gemm/kernel/gemm_sm90.cuh"

namespace mixprec::cuda::sm90 {
template Instance instance<Bf16, Bf16, Major::k, Major::k, Accumulate::direct>(int);
template Instance instance<Bf16, Bf16, Major::k, Major::mn, Accumulate::direct>(int);
template Instance instance<Bf16, Bf16, Major::mn, Major::k, Accumulate::direct>(int);
template Instance instance<Bf16, Bf16, Major::mn, Major::mn, Accumulate::direct>(int);
}  // namespace mixprec::cuda::sm90
