// The kernel of csrc/cuda/gemm/kernel/gemm_finish.cuh as C functions over host memory, for ctypes.
#include "cuda/gemm/kernel/gemm_finish.cuh"

using namespace mixprec;
using namespace mixprec::cuda;

// As the caller lays it out (test_gemm_finish.py: FinishCall).
struct FinishCall {
  const float* partial;
  int splits, m, n;
  Epilogue epilogue;
  int sms;
};

extern "C" {

void seed(uint64_t value) { cuda_on_cpu::set_seed(value); }

int finish(const FinishCall* call) {
  return gemm_finish(call->partial, call->splits, call->m, call->n, call->epilogue, call->sms,
                     nullptr);
}

// One element at a time, as a GEMM kernel uses the epilogue that has the sum in its registers.
void store_one(const FinishCall* call, int64_t row, int64_t col, float sum) {
  const Epilogue& e = call->epilogue;
  store_finished(e, finished(e, sum, row, col), row, col);
}
}
