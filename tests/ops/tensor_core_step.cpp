// csrc/math/tensor_core.h for Python: chained steps of each of `count` dot products.
#include "math/tensor_core.h"

extern "C" void chain(int gpu, int dtype_a, int dtype_b, const float* a, const float* b,
                      const float* c, float* d, int64_t count, int64_t k) {
  using namespace mixprec;
  Dtype of_a = static_cast<Dtype>(dtype_a), of_b = static_cast<Dtype>(dtype_b);
  TensorCore core = tensor_core(static_cast<Gpu>(gpu), of_a);
  for (int64_t i = 0; i < count; ++i) {
    float sum = c[i];
    for (int64_t at = 0; at < k; at += core.terms) {
      int64_t left = k - at;
      sum = tensor_core_step(core, a + i * k + at, 1, min_exponent(of_a), b + i * k + at, 1,
                             min_exponent(of_b), left < core.terms ? int(left) : core.terms, sum);
    }
    d[i] = sum;
  }
}
