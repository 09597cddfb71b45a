// quantize for the passes of a layer: without results that no product reads, and with the small
// ones in one allocation.
#pragma once

#include "arguments/casts.h"

namespace mixprec::cuda {

struct LayerCast {
  Tensor data;
  MaybeTensor data_t;
  Tensor scale_inv;
  MaybeTensor scale_inv_t;
  Tensor amax;
};

// x: [R, C]; the other arguments are those of quantize, checked.
LayerCast cast_for_layer(Tensor x, const Cast& cast);

}  // namespace mixprec::cuda
