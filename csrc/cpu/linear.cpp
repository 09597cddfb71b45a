// linear_forward and linear_backward: the casts and products of a linear layer, a pass in one call.
// What they compute is what quantize, quantize_mx and gemm compute one after the other.
#include "arguments/layer.h"
#include "cpu/gemm.h"
#include "cpu/quantize.h"

namespace mixprec::cpu {

namespace {

const char* kOp = "linear";

// A cast operand, and its transpose where that has scales of its own.
struct Operand {
  Stored matrix, transposed;
  float amax = 0.0f;
};

const Text& name_of(BlockFormat format) {
  static const Text names[] = {"mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2",
                               "mxfp6_e2m3", "mxfp4",      "nvfp4"};
  return names[static_cast<int>(format)];
}

// t [R, C], cast for the products that read it; use_t: also its transpose. given: its scale, or 0.
Operand cast(const Tensor& t, const RoleCast& how, bool use_t, float given,
             const MaybeTensor& seed = {}) {
  if (how.grain == Grain::none) {
    return {{t.scalar_type() == how.type ? t : torch::stable::to(t, how.type), {}, {}}, {}};
  }
  bool transpose = use_t && how.separate_transpose();
  if (how.grain == Grain::mx) {
    static const Text modes[] = {"floor", "ceil", "even", "rceil"};
    auto [data, data_t, scale, scale_t, tensor, amax] = quantize_mx(
        t, name_of(how.format), modes[static_cast<int>(how.mode)], transpose, seed, false, false);
    MaybeTensor tensor_scale;
    if (how.format == BlockFormat::nvfp4) tensor_scale = tensor;
    Operand out = {{data, scale, tensor_scale}, {}};
    if (transpose) out.transposed = {data_t, scale_t, tensor_scale};
    return out;
  }
  constexpr Blocks blocks[] = {{0, 0}, {0, 0}, {1, 0}, {1, kBlock}, {kBlock, kBlock}};
  CastMatrix c = cast_matrix(t, how.type, given, transpose, blocks[static_cast<int>(how.grain)],
                             how.power_of_two);
  return {{c.data, c.scale_inv, {}}, {c.data_t, c.scale_inv_t, {}}, c.amax};
}

// What a product reads: `stored`, or its transpose.
struct Read {
  const Stored& stored;
  bool transposed;
};

// How many elements a row of codes has, with the one that fills up an odd number of half bytes.
int64_t columns_of(const Read& r, const RoleCast& how) {
  return r.stored.data->size(1) * (2 / block_bytes(how.format, 2));
}

// The two sides of a @ b^T, and what keeps their memory. Block formats are decoded to bf16.
struct Sides {
  Stored stored_a, stored_b;
  Side a, b;
  int64_t k;

  static Side side(const Stored& m, bool transposed, const char* name) {
    int64_t rows_dim = transposed ? 1 : 0, k_dim = 1 - rows_dim;
    Matrix matrix = matrix_of(*m.data, rows_dim, k_dim);
    return {matrix, scales_of(m.scale_inv, matrix.rows, m.data->size(k_dim),
                              static_cast<int>(rows_dim), kOp, name)};
  }
  static Stored decoded(const Read& r, const RoleCast& how, const Read& other,
                        const RoleCast& how_other) {
    if (how.grain != Grain::mx) return r.stored;
    int64_t columns = std::min(columns_of(r, how), columns_of(other, how_other));
    return {dequantize_mx(*r.stored.data, *r.stored.scale_inv, std::nullopt, name_of(how.format),
                          columns, ScalarType::BFloat16),
            r.stored.tensor_scale_inv,
            {}};
  }
  Sides(const Read& of_a, const RoleCast& how_a, const Read& of_b, const RoleCast& how_b)
      : stored_a(decoded(of_a, how_a, of_b, how_b)),
        stored_b(decoded(of_b, how_b, of_a, how_a)),
        a(side(stored_a, of_a.transposed, "a_scale_inv")),
        b(side(stored_b, of_b.transposed, "b_scale_inv")),
        k(stored_a.data->size(of_a.transposed ? 0 : 1)) {
    STD_TORCH_CHECK(k == stored_b.data->size(of_b.transposed ? 0 : 1), kOp,
                    ": operands must agree in the dimension that is summed over");
    check_devices_and_dtypes(*stored_a.data, *stored_b.data, kOp);
  }
  Tensor multiplied(ScalarType type, const MaybeTensor& bias = {}) const {
    return product(a, b, k, {a.matrix.rows, b.matrix.rows}, type, bias, kOp);
  }
};

float scale_at(const MaybeTensor& scale, int64_t i) {
  if (!scale.has_value()) return 0.0f;
  STD_TORCH_CHECK(scale->scalar_type() == ScalarType::Float && scale->numel() == 2 &&
                      scale->is_contiguous() && on_cpu(*scale),
                  kOp, ": scale must be fp32 [2]");
  return read_fp32(*scale)[i];
}

// *largest = max(*largest, amax), where NaN stays: it keeps the step out of the history.
void record(const MaybeTensor& largest, float amax) {
  if (!largest.has_value()) return;
  check_scalar(*largest, ScalarType::Float, *largest, kOp, "amax");
  float& seen = *fp32_of(*largest);
  seen = std::isnan(seen) || std::isnan(amax) ? seen + amax : std::max(seen, amax);
}

}  // namespace

// y [M, N] = x [M, K] @ weight [N, K]^T + bias. x, weight: to be cast, or cast, with their
// scale_inv. scale, amax: of delayed scaling.
LayerResults linear_forward(Tensor x, MaybeTensor x_scale_inv, MaybeTensor x_tensor_scale_inv,
                            Tensor weight, MaybeTensor w_scale_inv, MaybeTensor w_tensor_scale_inv,
                            MaybeTensor bias, MaybeTensor scale, MaybeTensor amax, int64_t recipe,
                            bool use_x_t, bool use_w_t, ScalarType out_type) {
  RoleCast how_x(recipe, Role::x), how_w(recipe, Role::w);
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, kOp, ": x must be [M, K], weight [N, K]");
  Operand of_x = {{x, x_scale_inv, x_tensor_scale_inv}, {}};
  Operand of_w = {{weight, w_scale_inv, w_tensor_scale_inv}, {}};
  if (!x_scale_inv) {
    of_x = cast(x, how_x, use_x_t, scale_at(scale, 0));
    record(amax, of_x.amax);
  }
  if (!w_scale_inv) of_w = cast(weight, how_w, use_w_t, 0.0f);
  Sides sides({of_x.matrix, false}, how_x, {of_w.matrix, false}, how_w);
  Tensor y = sides.multiplied(out_type, bias);
  // A tensor that was not cast is the caller's: an op may not return its arguments.
  Stored& mx = of_x.matrix;
  Stored& mw = of_w.matrix;
  if (x_scale_inv || x.scalar_type() == how_x.type) mx = {};
  if (w_scale_inv || weight.scalar_type() == how_w.type) mw = {};
  Stored &tx = of_x.transposed, &tw = of_w.transposed;
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

// The gradients of x, weight and bias for g [M, N]. x, w: what forward stored for the product
// with g: the transpose where that has scales of its own; none
// where that gradient is not computed. main_grad: fp32 [N, K], to which that of weight is added.
std::tuple<MaybeTensor, MaybeTensor, MaybeTensor> linear_backward(
    Tensor g, MaybeTensor x, MaybeTensor x_scale_inv, MaybeTensor x_tensor_scale_inv, MaybeTensor w,
    MaybeTensor w_scale_inv, MaybeTensor w_tensor_scale_inv, MaybeTensor main_grad,
    MaybeTensor scale, MaybeTensor amax, MaybeTensor seed, int64_t recipe, ScalarType x_type,
    ScalarType w_type, std::optional<ScalarType> bias_type, bool by_columns) {
  RoleCast how_x(recipe, Role::x), how_w(recipe, Role::w), how_g(recipe, Role::g);
  MaybeTensor grad_x, grad_w, grad_bias;
  STD_TORCH_CHECK(g.dim() == 2, kOp, ": g must be [M, N]");
  if (x || w) {
    Operand of_g = cast(g, how_g, x.has_value(), scale_at(scale, 1), seed);
    record(amax, of_g.amax);
    if (w) {
      Stored stored = {w, w_scale_inv, w_tensor_scale_inv};
      Sides sides({of_g.matrix, false}, how_g, {stored, !how_w.separate_transpose()}, how_w);
      grad_x = sides.multiplied(x_type);
    }
    if (x) {
      Stored stored = {x, x_scale_inv, x_tensor_scale_inv};
      bool own = how_g.separate_transpose();
      Sides sides({own ? of_g.transposed : of_g.matrix, !own}, how_g,
                  {stored, !how_x.separate_transpose()}, how_x);
      int64_t n = sides.a.matrix.rows, k = sides.b.matrix.rows;
      if (main_grad) {
        check_accumulator(*main_grad, {n, k}, *sides.stored_a.data, *sides.stored_b.data, {}, {},
                          kOp);
        add_product(*main_grad, sides.a, sides.b, sides.k);
      } else if (by_columns) {
        grad_w = torch::stable::transpose(
            product(sides.b, sides.a, sides.k, {k, n}, w_type, {}, kOp), 0, 1);
      } else {
        grad_w = sides.multiplied(w_type);
      }
    }
  }
  if (bias_type) {  // in 16 bits only: as ones [1, M] @ g, which is the sum in FP32, rounded once
    int64_t m = g.size(0), n = g.size(1);
    Dtype dtype = dtype_of(g, kOp);
    uint16_t one = dtype == Dtype::bf16 ? 0x3F80 : 0x3C00;
    std::vector<uint16_t> ones(static_cast<size_t>(m), one);
    Side a = {{dtype, ones.data(), 1, 0, 1}, {}}, b = {matrix_of(g, 1, 0), {}};
    grad_bias = product(a, b, m, {n}, *bias_type, {}, kOp);
  }
  return {grad_x, grad_w, grad_bias};
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("linear_forward", TORCH_BOX(&mixprec::cpu::linear_forward));
  m.impl("linear_backward", TORCH_BOX(&mixprec::cpu::linear_backward));
}
