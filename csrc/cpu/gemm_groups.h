// The groups of a grouped product: their ranges along S, their operands and scales, and how they
// are divided among threads. S is the rows of a [S, K] beside b [E, K, N], and the K of a [M, S]
// beside b [S, N].
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/gemm_arguments.h"

namespace mixprec::cpu {

constexpr int64_t kPackedBytesOfThread = 1 << 20;  // of b at a time, where each thread has its own

struct Group {
  int64_t index, begin, size;  // size: along S
};

inline std::vector<Group> groups_of(const Tensor& offs, int64_t s, const char* op) {
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
    first_.data = static_cast<const float*>(t->const_data_ptr());
    if (t->numel() == 1) return;
    for (const ScaleForm& form : forms) {
      if (t->dim() == form.dim) form_ = form;
    }
    bool fits = form_.dim == t->dim() && (t->dim() == 2 || t->sizes()[0] == groups);
    int64_t r = fits ? t->sizes()[form_.rows_dim] : -1, c = fits ? t->sizes()[form_.k_dim] : -1;
    bool of_all = t->dim() == 3 && r == 1 && c == 1;
    bool of_blocks = form_.s_dim < 0 && r == ceil_div(form_.rows, kChunk) && c == form_.chunks;
    fits = of_all || ((r == form_.rows || of_blocks) && (c == 1 || c == form_.chunks));
    STD_TORCH_CHECK(fits, op, ": ", name, " has a shape that fits no granularity");
    first_.rows_per = r == form_.rows ? 1 : kChunk;
    if (r > 1) first_.row_stride = t->strides()[form_.rows_dim];
    if (c > 1) first_.chunk_stride = t->strides()[form_.k_dim];
    first_.by_chunk = c > 1;
    if (t->dim() == 3) group_stride_ = t->strides()[0];
    if (t->numel() == 0) first_.data = nullptr;
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

}  // namespace mixprec::cpu
