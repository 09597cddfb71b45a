// gemm_grouped and gemm_grouped_accumulate_: the products of all groups in one call. A group with
// much work runs on all threads, small ones side by side.
#include <cstring>

#include "arguments/check.h"
#include "cpu/gemm_groups.h"

namespace mixprec::cpu {

namespace {

// The arguments of both ops, checked.
struct Grouped {
  bool by_rows;
  Matrix a, b;  // of the first group, or all of S
  int64_t b_stride, k, n, m;
  std::vector<Group> groups;
  GroupScales of_a, of_b;

  Grouped(const Tensor& x, const Tensor& y, const MaybeTensor& x_scale_inv,
          const MaybeTensor& y_scale_inv, const Tensor& offs, const char* op)
      : by_rows(check(x, y, offs, op)),
        a(rows_of(x)),
        b{dtype_of(y, op), y.const_data_ptr(), last(y.sizes()), last(y.strides()),
          y.strides()[y.dim() - 2]},
        b_stride(by_rows ? y.strides()[0] : 0),
        k(x.sizes()[1]),
        n(last(y.sizes())),
        m(x.sizes()[0]),
        groups(groups_of(offs, by_rows ? m : k, op)),
        of_a(x_scale_inv,
             by_rows ? Forms{{2, 0, 1, 0, m, ceil_div(k, kChunk)}}
                     : Forms{{2, 0, 1, 1, m, ceil_div(k, kChunk)}, {3, 1, 2, -1, m, 1}},
             offs.numel(), op, "a_scale_inv"),
        of_b(y_scale_inv,
             by_rows ? Forms{{3, 2, 1, -1, n, ceil_div(k, kChunk)}}
                     : Forms{{2, 1, 0, 0, n, ceil_div(k, kChunk)}, {3, 2, 1, -1, n, 1}},
             offs.numel(), op, "b_scale_inv") {
    for (const Group& group : groups) {
      STD_TORCH_CHECK(
          group.size == 0 || group.begin % kChunk == 0 || !(of_a.along_s() || of_b.along_s()), op,
          ": offs must begin each group at a multiple of 128");
    }
  }

  static bool check(const Tensor& x, const Tensor& y, const Tensor& offs, const char* op) {
    STD_TORCH_CHECK(x.dim() == 2 && (y.dim() == 2 || y.dim() == 3), op,
                    ": a must be [S, K] or [M, S], b [E, K, N] or [S, N]");
    STD_TORCH_CHECK(x.sizes()[1] == y.sizes()[y.dim() - 2], op, ": a and b must agree in K or S");
    check_devices_and_dtypes(x, y, op);
    STD_TORCH_CHECK(y.dim() == 2 || offs.numel() == y.sizes()[0], op, ": offs must be [E]");
    return y.dim() == 3;
  }

  template <class Sizes>
  static int64_t last(const Sizes& sizes) {
    return sizes[sizes.size() - 1];
  }

  // The estimated time of a group: arithmetic, packing of b and of a, storing.
  double work(const Group& group) const {
    double rows = static_cast<double>(by_rows ? group.size : m), cols = static_cast<double>(n);
    double depth = static_cast<double>(by_rows ? k : group.size);
    if (rows * cols == 0 || (by_rows && group.size == 0)) return 0;
    return rows * cols * depth + 32 * depth * (rows + cols) + 8 * rows * cols;
  }

  // result_of(group): where the product of a group goes.
  template <class ResultOf>
  void multiply_groups(const ResultOf& result_of) const {
    const GemmKernel& kernel = a.dtype == Dtype::f16 ? loops().gemm_f32 : loops().gemm_bf16;
    auto run = [&](const Group& group, Resources use) {
      Matrix left = a, right = b;
      int64_t depth = by_rows ? k : group.size;
      if (by_rows) {
        left.rows = group.size;
        left.data = at(a.data, a.dtype, group.begin * a.stride_i);
        right.data = at(b.data, b.dtype, group.index * b_stride);
      } else {
        left = along_k(a, group.begin), right = along_k(b, group.begin);
      }
      Result result = result_of(group);
      if (result.adds && depth == 0) return;
      Scales columns = of_b.of(group);
      std::vector<float> wide = columns_of(columns, n, depth);
      BothScales scales = {of_a.of(group), wide.data(), n, columns.by_chunk};
      multiply(kernel, left, right, depth, scales, result, use);
    };
    for_groups(groups, [&](const Group& group) { return work(group); }, run);
  }

  using Forms = std::vector<ScaleForm>;
};

}  // namespace

// a [S, K], b [E, K, N] -> [S, N]; a [M, S], b [S, N] -> [E, M, N]; offs [E]: the ends of the
// groups along S. Scales: see mixprec/ops/gemm_grouped.py.
Tensor gemm_grouped(Tensor a, Tensor b, MaybeTensor a_scale_inv, MaybeTensor b_scale_inv,
                    Tensor offs, ScalarType out_type, bool /*fast_accum*/) {
  const char* op = "gemm_grouped";
  Grouped all(a, b, a_scale_inv, b_scale_inv, offs, op);
  Dtype out_dtype = float_dtype(out_type, "gemm_grouped: out_dtype");
  int64_t experts = offs.numel(), m = all.m, n = all.n;
  std::vector<int64_t> shape{m, n};
  if (!all.by_rows) shape.insert(shape.begin(), experts);
  Tensor out = empty(shape, out_type);
  if (out.numel() == 0) return out;
  void* data = out.mutable_data_ptr();
  all.multiply_groups([&](const Group& group) {
    int64_t first = all.by_rows ? group.begin : group.index * m;
    char* to = static_cast<char*>(at(data, out_dtype, first * n));
    return Result{out_dtype, to, n, 1, false, nullptr};
  });
  if (all.by_rows) {
    int64_t end = experts == 0 ? 0 : all.groups.back().begin + all.groups.back().size;
    std::memset(at(data, out_dtype, end * n), 0, (m - end) * n * element_size(out_dtype));
  }
  return out;
}

// acc [E, M, N] fp32 += a [M, S] @ b [S, N] of each group along S
void gemm_grouped_accumulate_(Tensor acc, Tensor a, Tensor b, MaybeTensor a_scale_inv,
                              MaybeTensor b_scale_inv, Tensor offs) {
  const char* op = "gemm_grouped_accumulate_";
  Grouped all(a, b, a_scale_inv, b_scale_inv, offs, op);
  STD_TORCH_CHECK(!all.by_rows, op, ": b must be [S, N]");
  STD_TORCH_CHECK(acc.dim() == 3 && acc.sizes()[0] == offs.numel() && acc.sizes()[1] == all.m &&
                      acc.sizes()[2] == all.n && acc.scalar_type() == ScalarType::Float &&
                      on_cpu(acc) && is_writable(acc),
                  op, ": acc must be [E, M, N], fp32, on the CPU, writable");
  STD_TORCH_CHECK(!ranges_overlap(acc, a) && !ranges_overlap(acc, b) &&
                      !(a_scale_inv.has_value() && ranges_overlap(acc, *a_scale_inv)) &&
                      !(b_scale_inv.has_value() && ranges_overlap(acc, *b_scale_inv)),
                  op, ": acc must not overlap in memory with what it is made from");
  if (acc.numel() == 0) return;
  char* data = static_cast<char*>(acc.mutable_data_ptr());
  auto stride = acc.strides();
  all.multiply_groups([&](const Group& group) {
    char* to = at(data, Dtype::f32, group.index * stride[0]);
    return Result{Dtype::f32, to, stride[1], stride[2], true, nullptr};
  });
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("gemm_grouped", TORCH_BOX(&mixprec::cpu::gemm_grouped));
  m.impl("gemm_grouped_accumulate_", TORCH_BOX(&mixprec::cpu::gemm_grouped_accumulate_));
}
