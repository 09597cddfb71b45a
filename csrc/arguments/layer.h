// How a layer casts its operands: the integer that mixprec/recipes.py makes of a recipe.
#pragma once

#include "arguments/casts.h"

namespace mixprec {

enum class Role : int { x, w, g };
enum class Grain : int { none, tensor, row, block1x128, block128x128, mx };  // none: 16 bits

// Of one operand, in 10 bits of the code.
struct RoleCast {
  Grain grain;
  ScalarType type;     // of the elements
  BlockFormat format;  // of mx, and of nvfp4
  ScaleMode mode;
  bool power_of_two;

  RoleCast(int64_t recipe, Role role) {
    int64_t code = recipe >> (10 * static_cast<int>(role));
    int64_t which = code >> 3 & 7;
    grain = static_cast<Grain>(code & 7);
    format = static_cast<BlockFormat>(which);
    mode = static_cast<ScaleMode>(code >> 6 & 3);
    power_of_two = code >> 8 & 1;
    constexpr ScalarType types[] = {ScalarType::Half, ScalarType::BFloat16,
                                    ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};
    bool is_known = grain == Grain::mx ? which < 6 : grain < Grain::mx && which < 4;
    STD_TORCH_CHECK(is_known, "linear: recipe has an unknown code");
    type = grain == Grain::mx ? element_type(format) : types[which];
  }
  // Whether the transpose is cast with other scales.
  bool separate_transpose() const {
    return grain == Grain::row || grain == Grain::block1x128 || grain == Grain::mx;
  }
};

// A matrix [R, C] as it is stored; scale_inv: none in 16 bits.
struct Stored {
  MaybeTensor data, scale_inv, tensor_scale_inv;
};

// The results of linear_forward: y; of x and of w, if they were cast: the matrix (data, scale_inv,
// tensor_scale_inv) and, where it has its own scales and is read, its transpose.
using LayerResults =
    std::tuple<Tensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor,
               MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor>;

}  // namespace mixprec
