// rotary.
#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

void check_factor(const Tensor& factor, const Tensor& x, const char* name) {
  STD_TORCH_CHECK(factor.scalar_type() == ScalarType::Float && factor.dim() == 2 &&
                      factor.size(0) == x.size(2) && factor.size(1) == x.size(3) / 2,
                  "rotary: ", name, " must be fp32 [T, D/2]");
}

}  // namespace

// x [B, H, T, D], cos and sin fp32 [T, D/2] -> x's shape
Tensor rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved) {
  Dtype dtype = float_dtype(x, "rotary: x");
  STD_TORCH_CHECK(x.dim() == 4 && x.size(3) % 2 == 0, "rotary: x must be [B, H, T, D], D even");
  check_factor(cos, x, "cos");
  check_factor(sin, x, "sin");
  x = dense_rows(x);
  cos = dense_rows(cos);
  sin = dense_rows(sin);
  int64_t heads = x.size(1), positions = x.size(2), d = x.size(3);
  Tensor y = empty({x.size(0), positions, heads, d}, x.scalar_type());
  const void* from = x.const_data_ptr();
  void* to = y.mutable_data_ptr();
  auto strides = x.strides();
  for_each(x.size(0) * positions, heads * d, [&](int64_t i) {
    int64_t b = i / positions, t = i % positions;
    const float* c = read_fp32(cos) + t * cos.strides()[0];
    const float* s = read_fp32(sin) + t * sin.strides()[0];
    for (int64_t h = 0; h < heads; ++h) {
      int64_t offset = b * strides[0] + h * strides[1] + t * strides[2];
      loops().rotary(dtype, interleaved, at(from, dtype, offset), c, s,
                     at(to, dtype, (i * heads + h) * d), d);
    }
  });
  return torch::stable::transpose(y, 1, 2);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) { m.impl("rotary", TORCH_BOX(&mixprec::cpu::rotary)); }
