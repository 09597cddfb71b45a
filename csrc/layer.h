// The passes of a linear layer: its casts and products, the same on every device. A device casts
// and multiplies; how, says the integer that mixprec/_recipe_checks.py makes of a recipe.
#pragma once

#include "arguments/casts.h"

namespace mixprec {

enum class Role : int { x, w, g };
enum class Grain : int { none, tensor, row, block1x128, block128x128, mx };  // none: 16 bits

// Of one operand, in 10 bits of the code.
struct RoleCast {
  Grain grain;
  ScalarType type;     // of the codes
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

// A matrix [R, C] as it is stored, of these elements; scale_inv: none in 16 bits.
struct Stored {
  MaybeTensor data, scale_inv, tensor_scale_inv;
};

// A cast operand, and its transpose where that was cast as well.
struct CastOperand {
  Stored matrix;
  std::optional<Stored> own_t;
};

// An operand of a product: a matrix, or its transpose.
struct Read {
  Stored stored;
  RoleCast how;
  bool transposed;
};

// What the cast of x, or of g, reads and records of delayed scaling: its scale, which is 0 before
// the first, and the largest amax since the last update.
struct Delayed {
  MaybeTensor scale, amax;
  int64_t index;
};

// A cast of x [R, C] that is to be made.
struct CastCall {
  Tensor x;
  RoleCast how;
  bool own_t;
  const Delayed* delayed;
  MaybeTensor seed;
  CastOperand* result;
};

// The recipe of a call. k_major: FP8 products read operands with K contiguous, so that the
// transposes are cast too.
struct LayerCall {
  int64_t recipe;
  bool k_major;

  RoleCast role(Role r) const { return RoleCast(recipe, r); }
  bool has_own_t(const RoleCast& how) const {
    bool fp8 = how.grain == Grain::tensor || how.grain == Grain::block128x128;
    return how.separate_transpose() || (fp8 && k_major);
  }
};

// The results of linear_forward: y; of x and of w, if they were cast: the matrix (data, scale_inv,
// tensor_scale_inv) and its transpose, if that was cast as well.
using LayerResults =
    std::tuple<Tensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor,
               MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor>;

// A Device is made of `choice`, which says how it multiplies, and of `offs`, with which the rows
// are those of groups, each with a weight of its own. It has
//   void cast(std::vector<CastCall>)
//   Tensor multiply(Read a, Read b, ScalarType, bias, product)          a @ b^T + bias
//   void accumulate(acc, Read a, Read b)                                acc += a @ b^T
//   MaybeTensor sum_of_rows(g, ScalarType)                              for the bias, or none
// and `product` is the place of a product in a recipe: 0, 1 or 2, for forward, grad_input and
// grad_weight.
template <class Device>
struct LayerPass {
  Device device;
  LayerCall call;

  // y [M, N] = x [M, K] @ weight [N, K]^T + bias. x, weight: to be cast, or cast, with scale_inv.
  // Of groups, weight is [E, N, K], and so are its gradient and main_grad.
  LayerResults forward(Stored x, Stored w, const MaybeTensor& bias, const MaybeTensor& scale,
                       const MaybeTensor& amax, bool use_x_t, bool use_w_t, ScalarType out_type) {
    RoleCast how_x = call.role(Role::x), how_w = call.role(Role::w);
    STD_TORCH_CHECK(x.data->dim() == 2 && w.data->dim() == (device.offs ? 3 : 2),
                    "linear: x must be [M, K], weight [N, K], or of groups [E, N, K]");
    Delayed delayed = {scale, amax, 0};
    // A tensor that is not cast is the caller's: an op may not return its arguments.
    CastOperand of_x = {}, of_w = {};
    bool cast_x = is_uncast(x, how_x), cast_w = is_uncast(w, how_w);
    bool x_t = use_x_t && call.has_own_t(how_x), w_t = use_w_t && call.has_own_t(how_w);
    std::vector<CastCall> calls;
    if (cast_x) calls.push_back({*x.data, how_x, x_t, &delayed, {}, &of_x});
    if (cast_w) calls.push_back({*w.data, how_w, w_t, nullptr, {}, &of_w});
    device.cast(calls);
    if (cast_x) x = of_x.matrix;
    if (cast_w) w = of_w.matrix;
    Tensor y = device.multiply({x, how_x, false}, {w, how_w, false}, out_type, bias, 0);
    Stored mx = of_x.matrix, mw = of_w.matrix, none = {};
    Stored tx = of_x.own_t.value_or(none), tw = of_w.own_t.value_or(none);
    return {y,
            mx.data,
            mx.scale_inv,
            mx.tensor_scale_inv,
            tx.data,
            tx.scale_inv,
            tx.tensor_scale_inv,
            mw.data,
            mw.scale_inv,
            mw.tensor_scale_inv,
            tw.data,
            tw.scale_inv,
            tw.tensor_scale_inv};
  }

  // The gradients of x, weight and bias for g [M, N]. x, w: what forward made for the product with
  // g, the transpose if it was cast as well; none where that gradient is not computed. main_grad:
  // fp32 [N, K], to which that of weight is added. by_columns: that of weight is made with these
  // contiguous.
  std::tuple<MaybeTensor, MaybeTensor, MaybeTensor> backward(
      const Tensor& g, const Stored& x, const Stored& w, const MaybeTensor& main_grad,
      const MaybeTensor& scale, const MaybeTensor& amax, const MaybeTensor& seed, ScalarType x_type,
      ScalarType w_type, std::optional<ScalarType> bias_type, bool by_columns) {
    STD_TORCH_CHECK(g.dim() == 2, "linear: g must be [M, N]");
    RoleCast how_x = call.role(Role::x), how_w = call.role(Role::w), how_g = call.role(Role::g);
    MaybeTensor grad_x, grad_w, grad_bias;
    // What is written comes last: a call that fails has changed nothing, but for an amax.
    if (bias_type) grad_bias = device.sum_of_rows(g, *bias_type);
    if (x.data || w.data) {
      Delayed delayed = {scale, amax, 1};
      Stored of_g = {g, {}, {}};
      bool own_t = x.data.has_value() && call.has_own_t(how_g);
      CastOperand cast = {of_g, {}};
      if (is_uncast(of_g, how_g)) device.cast({{g, how_g, own_t, &delayed, seed, &cast}});
      if (w.data) {
        Read b = {w, how_w, !call.has_own_t(how_w)};
        grad_x = device.multiply({cast.matrix, how_g, false}, b, x_type, {}, 1);
      }
      if (x.data) {
        Read a = {own_t ? *cast.own_t : cast.matrix, how_g, !own_t};
        Read b = {x, how_x, !call.has_own_t(how_x)};
        if (main_grad) {
          device.accumulate(*main_grad, a, b);
        } else if (by_columns) {  // (b @ a^T)^T, which has the same sums
          grad_w = torch::stable::transpose(device.multiply(b, a, w_type, {}, 2), 0, 1);
        } else {
          grad_w = device.multiply(a, b, w_type, {}, 2);
        }
      }
    }
    return {grad_x, grad_w, grad_bias};
  }

  static bool is_uncast(const Stored& s, const RoleCast& how) {
    return !s.scale_inv && (how.grain != Grain::none || s.data->scalar_type() != how.type);
  }
};

template <class Device>
LayerResults linear_forward(Tensor x, MaybeTensor x_scale_inv, MaybeTensor x_tensor_scale_inv,
                            Tensor weight, MaybeTensor w_scale_inv, MaybeTensor w_tensor_scale_inv,
                            MaybeTensor bias, MaybeTensor scale, MaybeTensor amax, int64_t recipe,
                            int64_t choice, bool k_major, bool use_x_t, bool use_w_t,
                            ScalarType out_type, MaybeTensor offs) {
  LayerPass<Device> pass = {{choice, offs}, {recipe, k_major}};
  return pass.forward({x, x_scale_inv, x_tensor_scale_inv},
                      {weight, w_scale_inv, w_tensor_scale_inv}, bias, scale, amax, use_x_t,
                      use_w_t, out_type);
}

template <class Device>
std::tuple<MaybeTensor, MaybeTensor, MaybeTensor> linear_backward(
    Tensor g, MaybeTensor x, MaybeTensor x_scale_inv, MaybeTensor x_tensor_scale_inv, MaybeTensor w,
    MaybeTensor w_scale_inv, MaybeTensor w_tensor_scale_inv, MaybeTensor main_grad,
    MaybeTensor scale, MaybeTensor amax, MaybeTensor seed, int64_t recipe, int64_t choice,
    bool k_major, ScalarType x_type, ScalarType w_type, std::optional<ScalarType> bias_type,
    bool by_columns, MaybeTensor offs) {
  LayerPass<Device> pass = {{choice, offs}, {recipe, k_major}};
  return pass.backward(g, {x, x_scale_inv, x_tensor_scale_inv},
                       {w, w_scale_inv, w_tensor_scale_inv}, main_grad, scale, amax, seed, x_type,
                       w_type, bias_type, by_columns);
}

}  // namespace mixprec
