// From a dtype known at run time to a C++ type: generic lambdas, no macros.
#pragma once

#include "math/convert.h"

namespace mixprec {

// Of an optimizer's tensors only: u8, states of 8 bits; i16 and i8, the remainders of masters;
// none, no tensor.
enum class Dtype : int32_t { f32, bf16, f16, e4m3, e5m2, f64, u8, i16, i8, none };

constexpr int64_t element_size(Dtype d) {
  return d == Dtype::f64 ? 8 : d == Dtype::f32 ? 4 : d == Dtype::bf16 || d == Dtype::f16 ? 2 : 1;
}

// The largest finite value of a low-precision format; 0 for fp32 and fp64.
constexpr float format_max(Dtype d) {
  return d == Dtype::e4m3   ? 448.0f
         : d == Dtype::e5m2 ? 57344.0f
         : d == Dtype::f16  ? 65504.0f
         : d == Dtype::bf16 ? 0x1.FEp127f
                            : 0.0f;
}

template <class T>
struct Type {
  using type = T;
};

// f(Type<T>{}) for d, which is fp32, bf16 or fp16.
template <class F>
MIXPREC_HD auto with_float(Dtype d, F&& f) {
  switch (d) {
    case Dtype::f32:
      return f(Type<float>{});
    case Dtype::bf16:
      return f(Type<Bf16>{});
    default:
      return f(Type<Fp16>{});
  }
}

// f(Type<T>{}) for d, which is an fp8 or 16-bit format.
template <class F>
MIXPREC_HD auto with_low(Dtype d, F&& f) {
  switch (d) {
    case Dtype::e4m3:
      return f(Type<E4m3>{});
    case Dtype::e5m2:
      return f(Type<E5m2>{});
    case Dtype::bf16:
      return f(Type<Bf16>{});
    default:
      return f(Type<Fp16>{});
  }
}

}  // namespace mixprec
