// linear_forward and linear_backward on the CPU. What they compute is what quantize, quantize_mx
// and gemm compute one after the other; with groups, what functional/_grouped_linear.py computes.
#include "cpu/gemm.h"
#include "cpu/grouped_casts.h"
#include "layer.h"

namespace mixprec::cpu {

namespace {

const char* kOp = "linear";

const Text& name_of(BlockFormat format) {
  static const Text names[] = {"mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2",
                               "mxfp6_e2m3", "mxfp4",      "nvfp4"};
  return names[static_cast<int>(format)];
}

const Text& name_of(ScaleMode mode) {
  static const Text names[] = {"floor", "ceil", "even", "rceil"};
  return names[static_cast<int>(mode)];
}

// That t has all of its memory: a parameter that was freed, or replaced, would be read beyond it.
const Tensor& whole(const Tensor& t) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  Extent used = extent_of(t);
  auto element = static_cast<int64_t>(t.element_size());
  int64_t size = static_cast<int64_t>(used.end - used.begin) + t.storage_offset() * element;
  STD_TORCH_CHECK(t.numel() == 0 || size <= bytes, kOp, ": a tensor lies beyond its storage");
  return t;
}

Tensor transposed(const Tensor& t) { return torch::stable::transpose(t, 0, 1); }

// How many elements a row of codes has, with the one that fills up an odd number of half bytes.
int64_t columns_of(const Read& r) {
  const Tensor& codes = *r.stored.data;
  return codes.size(codes.dim() - 1) * (2 / block_bytes(r.how.format, 2));
}

// Block formats decoded to bf16.
Stored decoded(const Read& r, const Read& other) {
  if (r.how.grain != Grain::mx) return r.stored;
  int64_t columns = std::min(columns_of(r), columns_of(other));
  return {dequantize_mx(*r.stored.data, *r.stored.scale_inv, std::nullopt, name_of(r.how.format),
                        columns, ScalarType::BFloat16),
          r.stored.tensor_scale_inv,
          {}};
}

// The two sides of a @ b^T, and what keeps their memory.
struct Sides {
  Stored stored_a, stored_b;
  Side a, b;
  int64_t k;

  static Side side(const Stored& m, bool transposed, const char* name) {
    int64_t rows_dim = transposed ? 1 : 0, k_dim = 1 - rows_dim;
    Matrix matrix = matrix_of(whole(*m.data), rows_dim, k_dim);
    return {matrix, scales_of(m.scale_inv, matrix.rows, m.data->size(k_dim),
                              static_cast<int>(rows_dim), kOp, name)};
  }
  Sides(const Read& of_a, const Read& of_b)
      : stored_a(decoded(of_a, of_b)),
        stored_b(decoded(of_b, of_a)),
        a(side(stored_a, of_a.transposed, "a_scale_inv")),
        b(side(stored_b, of_b.transposed, "b_scale_inv")),
        k(stored_a.data->size(of_a.transposed ? 0 : 1)) {
    STD_TORCH_CHECK(k == stored_b.data->size(of_b.transposed ? 0 : 1), kOp,
                    ": operands must agree in the dimension that is summed over");
    check_devices_and_dtypes(*stored_a.data, *stored_b.data, kOp);
  }
};

// Those of the products of groups.
struct GroupedSides {
  Stored stored_a, stored_b;
  GroupedSide a, b;

  GroupedSides(const Read& of_a, const Read& of_b)
      : stored_a(decoded(of_a, of_b)),
        stored_b(decoded(of_b, of_a)),
        a{whole(*stored_a.data), stored_a.scale_inv, of_a.transposed},
        b{whole(*stored_b.data), stored_b.scale_inv, of_b.transposed} {}
};

struct CpuLayer {
  int64_t choice;  // a CPU has one kernel
  MaybeTensor offs;

  void cast(const std::vector<CastCall>& calls) const {
    for (const CastCall& c : calls) *c.result = cast(c.x, c.how, c.own_t, c.delayed, c.seed);
  }
  CastOperand cast(const Tensor& t, const RoleCast& how, bool own_t, const Delayed* delayed,
                   const MaybeTensor& seed) const {
    whole(t);
    if (how.grain == Grain::none) return {{torch::stable::to(t, how.type), {}, {}}, {}};
    if (offs) return cast_of_groups(t, how, own_t, delayed, seed);
    if (how.grain == Grain::mx) {
      auto [data, data_t, scale, scale_t, tensor, amax] =
          quantize_mx(t, name_of(how.format), name_of(how.mode), own_t, seed, false, false);
      MaybeTensor tensor_scale;
      if (how.format == BlockFormat::nvfp4) tensor_scale = tensor;
      CastOperand out = {{data, scale, tensor_scale}, {}};
      if (own_t) out.own_t = {data_t, scale_t, tensor_scale};
      return out;
    }
    float given = delayed == nullptr ? 0.0f : scale_of(*delayed);
    CastMatrix c = cast_matrix(t, how.type, given, own_t, blocks_of(how), how.power_of_two);
    if (delayed != nullptr) record(delayed->amax, c.amax);
    CastOperand out = {{c.data, c.scale_inv, {}}, {}};
    if (own_t) out.own_t = {c.data_t, c.scale_inv_t, {}};
    return out;
  }
  Tensor multiply(const Read& a, const Read& b, ScalarType type, const MaybeTensor& bias,
                  int /*product*/) const {
    if (offs) {
      GroupedSides s(a, b);
      return grouped_product(s.a, s.b, groups_of_product(s, a.how), type, kOp);
    }
    Sides s(a, b);
    if (!s.stored_a.scale_inv && !s.stored_b.scale_inv) {
      const Tensor &x = *s.stored_a.data, &w = *s.stored_b.data;
      MaybeTensor y = torchs_product(a.transposed ? transposed(x) : x,
                                     b.transposed ? w : transposed(w), bias, type);
      if (y) return *y;
    }
    return product(s.a, s.b, s.k, {s.a.matrix.rows, s.b.matrix.rows}, type, bias, kOp);
  }
  void accumulate(const Tensor& acc, const Read& a, const Read& b) const {
    if (offs) {
      GroupedSides s(a, b);
      return add_grouped_product(acc, s.a, s.b, groups_of_product(s, a.how), kOp);
    }
    Sides s(a, b);
    check_accumulator(acc, {s.a.matrix.rows, s.b.matrix.rows}, *s.stored_a.data, *s.stored_b.data,
                      {}, {}, kOp);
    add_product(acc, s.a, s.b, s.k);
  }
  // As ones [1, M] @ g, in 16 bits only: the sum in FP32, rounded once.
  MaybeTensor sum_of_rows(const Tensor& g, ScalarType type) const {
    Dtype dtype = dtype_of(g, kOp);
    std::vector<uint16_t> ones(static_cast<size_t>(g.size(0)),
                               dtype == Dtype::bf16 ? 0x3F80 : 0x3C00);
    Side a = {{dtype, ones.data(), 1, 0, 1}, {}}, b = {matrix_of(whole(g), 1, 0), {}};
    return product(a, b, g.size(0), {g.size(1)}, type, {}, kOp);
  }

 private:
  // The groups of a product; those of grad_weight are along what `cast_groups` made.
  std::vector<Group> groups_of_product(const GroupedSides& s, const RoleCast& how) const {
    bool along_k = s.b.data.dim() == 2;
    int64_t length = s.a.data.size(along_k ? s.a.k_dim() : s.a.rows_dim());
    std::vector<Group> groups = groups_of(whole(*offs), length, kOp);
    return along_k && lies_apart(how) ? apart(std::move(groups)) : groups;
  }
  CastOperand cast_of_groups(const Tensor& t, const RoleCast& how, bool own_t,
                             const Delayed* delayed, const MaybeTensor& seed) const {
    Tensor x = row_major(t);
    std::vector<Group> groups;
    if (x.dim() == 2) groups = groups_of(whole(*offs), x.size(0), kOp);
    for (int64_t e = 0; x.dim() == 3 && e < x.size(0); ++e) {
      groups.push_back({e, e * x.size(1), x.size(1)});
    }
    GroupCast cast = {how, own_t, delayed != nullptr && delayed->scale, 0.0f, nullptr};
    if (cast.is_shared) cast.given = scale_of(*delayed);
    if (seed) {
      STD_TORCH_CHECK(seed->scalar_type() == ScalarType::Long && on_cpu(*seed) &&
                          seed->is_contiguous() && seed->numel() == (own_t ? 2 : 1),
                      kOp, ": seed must be int64, one number for each cast");
      cast.seeds = static_cast<const int64_t*>(seed->const_data_ptr());
    }
    float amax = 0.0f;
    CastOperand out = cast_groups(x, groups, cast, amax);
    if (cast.is_shared) record(delayed->amax, amax);
    return out;
  }
  static float scale_of(const Delayed& d) {
    if (!d.scale.has_value()) return 0.0f;
    STD_TORCH_CHECK(d.scale->scalar_type() == ScalarType::Float && d.scale->numel() == 2 &&
                        d.scale->is_contiguous() && on_cpu(*d.scale),
                    kOp, ": scale must be fp32 [2]");
    return read_fp32(*d.scale)[d.index];
  }
  static void record(const MaybeTensor& largest, float amax) {
    if (!largest.has_value()) return;
    check_scalar(*largest, ScalarType::Float, *largest, kOp, "amax");
    recorded(largest, amax);
  }
};

}  // namespace

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("linear_forward", TORCH_BOX(&mixprec::linear_forward<mixprec::cpu::CpuLayer>));
  m.impl("linear_backward", TORCH_BOX(&mixprec::linear_backward<mixprec::cpu::CpuLayer>));
}
