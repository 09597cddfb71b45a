// gemm_grouped and gemm_grouped_accumulate_: the products of all groups in one call. A group with
// much work runs on all threads, small ones side by side. S is the rows of a [S, K] beside b [E, K,
// N], and the K of a [M, S] beside b [S, N].
#include "cpu/gemm_grouped.h"

#include <cstring>

#include "cpu/gemm_multiply.h"

namespace mixprec::cpu {

std::vector<Group> groups_of(const Tensor& offs, int64_t s, const char* op) {
  STD_TORCH_CHECK(offs.dim() == 1 && offs.scalar_type() == ScalarType::Int && on_cpu(offs), op,
                  ": offs must be [E], int32, on the CPU");
  const int32_t* ends = static_cast<const int32_t*>(offs.const_data_ptr());
  std::vector<Group> groups(static_cast<size_t>(offs.numel()));
  int64_t begin = 0;
  for (int64_t e = 0; e < offs.numel(); ++e) {
    int64_t end = ends[e * offs.strides()[0]];
    STD_TORCH_CHECK(begin <= end && end <= s, op, ": offs must be ascending, from 0 to S");
    groups[e] = {e, begin, end - begin};
    begin = end;
  }
  return groups;
}

namespace {

constexpr int64_t kPackedBytesOfThread = 1 << 20;  // of b at a time, where each thread has its own

// A valid form of a tensor of scales: its number of dimensions (of 3, the first is the group's),
// which of them is along rows (of a; columns of b) and which along K, which of the two runs along S
// (-1: none), and their sizes, of which that along K may also be 1.
struct ScaleForm {
  int64_t dim;
  int rows_dim, k_dim, s_dim;
  int64_t rows, chunks;
};

// The scales of an operand for each group.
class GroupScales {
 public:
  GroupScales(const MaybeTensor& t, const std::vector<ScaleForm>& forms, int64_t groups,
              const char* op, const char* name) {
    if (!t.has_value()) return;
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && on_cpu(*t), op, ": ", name,
                    " must be fp32 on the CPU");
    first_.data = read_fp32(*t);
    if (t->numel() == 1) return;
    for (const ScaleForm& form : forms) {
      if (t->dim() == form.dim) form_ = form;
    }
    bool fits = form_.dim == t->dim() && (t->dim() == 2 || t->sizes()[0] == groups);
    int64_t r = fits ? t->sizes()[form_.rows_dim] : -1, c = fits ? t->sizes()[form_.k_dim] : -1;
    bool per_group = t->dim() == 3 && r == 1 && c == 1;
    bool per_block = form_.s_dim < 0 && r == ceil_div(form_.rows, kChunk) && c == form_.chunks;
    fits = per_group || ((r == form_.rows || per_block) && (c == 1 || c == form_.chunks));
    STD_TORCH_CHECK(fits, op, ": ", name, " has a shape that fits no granularity");
    first_ = read_scales(*t, form_.rows_dim, form_.k_dim, form_.rows);
    if (t->dim() == 3) group_stride_ = t->stride(0);
  }

  // Whether each group has to begin at a multiple of kChunk.
  bool along_s() const { return first_.by_chunk && form_.s_dim == form_.k_dim; }

  Scales of(const Group& group) const {
    Scales scales = first_;
    if (scales.data == nullptr) return scales;
    scales.data += group.index * group_stride_;
    if (form_.s_dim == form_.k_dim) scales.data += group.begin / kChunk * scales.chunk_stride;
    if (form_.s_dim == form_.rows_dim) scales.data += group.begin * scales.row_stride;
    return scales;
  }

 private:
  Scales first_;
  ScaleForm form_{0, 0, 1, -1, 0, 0};
  int64_t group_stride_ = 0;
};

// run(group, resources) for all groups: first those with more work than a thread's share, one after
// the other on all threads; then each of the others on one thread. work(group): its estimated time.
template <class Work, class Run>
void for_groups(const std::vector<Group>& groups, const Work& work, const Run& run) {
  double total = 0;
  for (const Group& group : groups) total += work(group);
  Resources all = all_threads();
  std::vector<Group> small;
  for (const Group& group : groups) {
    if (work(group) * static_cast<double>(all.threads) > total) {
      run(group, all);
    } else {
      small.push_back(group);
    }
  }
  std::sort(small.begin(), small.end(),
            [&](const Group& x, const Group& y) { return work(x) > work(y); });
  std::atomic<size_t> next{0};
  int64_t threads = total < 2e5 ? 1 : std::min<int64_t>(all.threads, small.size());
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (size_t i = next++; i < small.size(); i = next++) {
        run(small[i], Resources{1, kPackedBytesOfThread});
      }
    }
  });
}

// Both operands, checked.
struct Grouped {
  bool by_rows;
  Matrix a, b;  // of the first group, or all of S
  int64_t b_stride, k, n, m;
  const std::vector<Group>& groups;
  GroupScales a_scales, b_scales;

  Grouped(const GroupedSide& x, const GroupedSide& y, const std::vector<Group>& groups,
          const char* op)
      : by_rows(check(x, y, groups, op)),
        a(matrix(x)),
        b(matrix(y)),
        b_stride(by_rows ? y.data.stride(0) : 0),
        k(x.data.size(x.k_dim())),
        n(b.rows),
        m(a.rows),
        groups(groups),
        a_scales(x.scale_inv, forms(x, true), size(groups), op, "a_scale_inv"),
        b_scales(y.scale_inv, forms(y, false), size(groups), op, "b_scale_inv") {
    for (const Group& group : groups) {
      STD_TORCH_CHECK(group.size == 0 || group.begin % kChunk == 0 ||
                          !(a_scales.along_s() || b_scales.along_s()),
                      op, ": offs must begin each group at a multiple of 128");
    }
  }

  static int64_t size(const std::vector<Group>& groups) {
    return static_cast<int64_t>(groups.size());
  }
  static Matrix matrix(const GroupedSide& s) { return matrix_of(s.data, s.rows_dim(), s.k_dim()); }

  static bool check(const GroupedSide& x, const GroupedSide& y, const std::vector<Group>& groups,
                    const char* op) {
    int64_t dims = y.data.dim();
    STD_TORCH_CHECK(x.data.dim() == 2 && (dims == 2 || dims == 3), op,
                    ": a must be [S, K] or [M, S], b [E, K, N] or [S, N]");
    STD_TORCH_CHECK(x.data.size(x.k_dim()) == y.data.size(y.k_dim()), op,
                    ": a and b must agree in K or S");
    check_devices_and_dtypes(x.data, y.data, op);
    STD_TORCH_CHECK(dims == 2 || size(groups) == y.data.size(0), op, ": offs must be [E]");
    int64_t s = dims == 2 ? x.data.size(x.k_dim()) : x.data.size(x.rows_dim());
    STD_TORCH_CHECK(groups.empty() || groups.back().begin + groups.back().size <= s, op,
                    ": offs must end within S");
    return dims == 3;
  }

  // The valid forms of the scales of an operand.
  std::vector<ScaleForm> forms(const GroupedSide& side, bool is_a) const {
    int rows = side.transposed ? 1 : 0, along = 1 - rows;
    int64_t count = is_a ? m : n, chunks = ceil_div(k, kChunk);
    ScaleForm per_group = {3, 1 + rows, 1 + along, -1, count, 1};
    if (!by_rows) return {{2, rows, along, along, count, chunks}, per_group};
    if (is_a) return {{2, rows, along, rows, count, chunks}, per_group};
    per_group.chunks = chunks;
    return {per_group};
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
    const GemmKernel& kernel = kernel_for(a.dtype);
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
      BothScales scales = {a_scales.of(group), b_scales.of(group), n, depth};
      multiply(kernel, {left, right, depth, std::move(scales), result}, use);
    };
    for_groups(groups, [&](const Group& group) { return work(group); }, run);
  }
};

}  // namespace

Tensor grouped_product(const GroupedSide& a, const GroupedSide& b, const std::vector<Group>& groups,
                       ScalarType out_type, const char* op) {
  Grouped all(a, b, groups, op);
  Dtype out_dtype = float_dtype(out_type, std::string(op) + ": out_dtype");
  int64_t m = all.m, n = all.n;
  std::vector<int64_t> shape{m, n};
  if (!all.by_rows) shape.insert(shape.begin(), all.size(groups));
  Tensor out = empty(shape, out_type);
  if (out.numel() == 0) return out;
  void* data = out.mutable_data_ptr();
  all.multiply_groups([&](const Group& group) {
    int64_t first = all.by_rows ? group.begin : group.index * m;
    char* to = static_cast<char*>(at(data, out_dtype, first * n));
    return Result{out_dtype, to, n, 1, false, nullptr};
  });
  if (all.by_rows) {
    int64_t end = groups.empty() ? 0 : groups.back().begin + groups.back().size;
    std::memset(at(data, out_dtype, end * n), 0, (m - end) * n * element_size(out_dtype));
  }
  return out;
}

void add_grouped_product(const Tensor& acc, const GroupedSide& a, const GroupedSide& b,
                         const std::vector<Group>& groups, const char* op) {
  Grouped all(a, b, groups, op);
  STD_TORCH_CHECK(!all.by_rows, op, ": b must be [S, N]");
  check_accumulator(acc, {all.size(groups), all.m, all.n}, a.data, b.data, a.scale_inv, b.scale_inv,
                    op);
  if (acc.numel() == 0) return;
  char* data = static_cast<char*>(acc.mutable_data_ptr());
  auto stride = acc.strides();
  all.multiply_groups([&](const Group& group) {
    char* to = at(data, Dtype::f32, group.index * stride[0]);
    return Result{Dtype::f32, to, stride[1], stride[2], true, nullptr};
  });
}

// a [S, K], b [E, K, N] -> [S, N]; a [M, S], b [S, N] -> [E, M, N]; offs [E]: the ends of the
// groups along S. Scales: see mixprec/ops/gemm_grouped.py.
Tensor gemm_grouped(Tensor a, Tensor b, MaybeTensor a_scale_inv, MaybeTensor b_scale_inv,
                    Tensor offs, ScalarType out_type, bool /*fast_accum*/) {
  const char* op = "gemm_grouped";
  STD_TORCH_CHECK(
      b.dim() == 2 || !a_scale_inv || a_scale_inv->dim() < 3 || a_scale_inv->numel() == 1, op,
      ": a_scale_inv must be [S, 1] or [S, ceil(K/128)]");
  return grouped_product({a, a_scale_inv, false}, {b, b_scale_inv, true},
                         groups_of(offs, a.size(b.dim() == 3 ? 0 : 1), op), out_type, op);
}

// acc [E, M, N] fp32 += a [M, S] @ b [S, N] of each group along S
void gemm_grouped_accumulate_(Tensor acc, Tensor a, Tensor b, MaybeTensor a_scale_inv,
                              MaybeTensor b_scale_inv, Tensor offs) {
  const char* op = "gemm_grouped_accumulate_";
  add_grouped_product(acc, {a, a_scale_inv, false}, {b, b_scale_inv, true},
                      groups_of(offs, a.size(b.dim() == 3 ? 0 : 1), op), op);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("gemm_grouped", TORCH_BOX(&mixprec::cpu::gemm_grouped));
  m.impl("gemm_grouped_accumulate_", TORCH_BOX(&mixprec::cpu::gemm_grouped_accumulate_));
}
