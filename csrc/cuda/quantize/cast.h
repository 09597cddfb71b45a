// quantize for the passes of a layer: without results that no product reads, the small ones in one
// allocation, and two matrices in the launches of one where they agree.
#pragma once

#include <vector>

#include "arguments/casts.h"

namespace mixprec::cuda {

// x: [R, C]; cast: without a scale; given, record: those of delayed scaling, in the GPU's memory,
// or null.
struct ToCast {
  Tensor x;
  Cast cast;
  const float* given;
  float* record;
};

struct LayerCast {
  Tensor data;
  MaybeTensor data_t;
  Tensor scale_inv;
  MaybeTensor scale_inv_t;
};

// Of one matrix, or of two.
std::vector<LayerCast> cast_for_layer(std::vector<ToCast> matrices);

}  // namespace mixprec::cuda
