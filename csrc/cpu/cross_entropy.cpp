// cross_entropy and cross_entropy_backward.
#include "math/cross_entropy.h"

#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

constexpr int64_t kColumns = 4;

bool is_vector(const Tensor& t, ScalarType type, int64_t n) {
  return t.scalar_type() == type && t.dim() == 1 && t.size(0) == n;
}

void check_tile(const Tensor& logits, const Tensor& target, const char* op) {
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 2, op,
                  ": logits must be fp32 [N, T]");
  STD_TORCH_CHECK(is_vector(target, ScalarType::Long, logits.size(0)), op,
                  ": target must be int64 [N]");
}

// f(row, its logits, the column of its target) on all threads.
template <class F>
void for_rows(const Tensor& logits, const Tensor& target, int64_t first, const F& f) {
  int64_t cols = logits.size(1);
  const int64_t* targets = static_cast<const int64_t*>(target.const_data_ptr());
  for_each(logits.size(0), cols, [&](int64_t i) {
    // A target before `first`, negative ones too, is in no column.
    f(i, read_fp32(logits) + i * cols, targets[i] < first ? -1 : targets[i] - first);
  });
}

}  // namespace

// logits fp32 [N, T], target [N], rows fp32 [N, 4] -> the new rows
Tensor cross_entropy(Tensor logits, Tensor target, Tensor rows, int64_t first, double softcap) {
  check_tile(logits, target, "cross_entropy");
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Float && rows.dim() == 2 &&
                      rows.size(0) == logits.size(0) && rows.size(1) == kColumns,
                  "cross_entropy: rows must be fp32 [N, 4]");
  logits = row_major(logits);
  target = row_major(target);
  rows = row_major(rows);
  Tensor result = empty({logits.size(0), kColumns}, ScalarType::Float);
  float* out = fp32_of(result);
  Softcap cap = make_softcap(softcap);
  for_rows(logits, target, first, [&](int64_t i, const float* x, int64_t column) {
    std::copy_n(read_fp32(rows) + i * kColumns, kColumns, out + i * kColumns);
    loops().cross_entropy(x, logits.size(1), column, cap, out + i * kColumns);
  });
  return result;
}

// logits fp32 [N, T]; target, logsumexp, weight [N] -> the gradient of the logits
Tensor cross_entropy_backward(Tensor logits, Tensor target, Tensor logsumexp, Tensor weight,
                              int64_t first, int64_t classes, double label_smoothing, double z_loss,
                              double softcap, ScalarType out_dtype) {
  const char* op = "cross_entropy_backward";
  check_tile(logits, target, op);
  for (const Tensor* t : {&logsumexp, &weight}) {
    STD_TORCH_CHECK(is_vector(*t, ScalarType::Float, logits.size(0)), op,
                    ": logsumexp and weight must be fp32 [N]");
  }
  Dtype dtype = float_dtype(out_dtype, "cross_entropy_backward: out_dtype");
  logits = row_major(logits);
  target = row_major(target);
  logsumexp = row_major(logsumexp);
  weight = row_major(weight);
  int64_t cols = logits.size(1);
  Tensor g = empty({logits.size(0), cols}, out_dtype);
  void* out = g.mutable_data_ptr();
  Softcap cap = make_softcap(softcap);
  float z = static_cast<float>(2.0 * z_loss), label = static_cast<float>(1.0 - label_smoothing);
  float smoothing = static_cast<float>(label_smoothing / static_cast<double>(classes));
  for_rows(logits, target, first, [&](int64_t i, const float* x, int64_t column) {
    float lse = read_fp32(logsumexp)[i];
    CrossEntropyRow row{lse, lse * z + 1.0f, smoothing, read_fp32(weight)[i]};
    loops().cross_entropy_backward(x, cols, column, label, row, cap, dtype,
                                   at(out, dtype, i * cols));
  });
  return g;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("cross_entropy", TORCH_BOX(&mixprec::cpu::cross_entropy));
  m.impl("cross_entropy_backward", TORCH_BOX(&mixprec::cpu::cross_entropy_backward));
}
