// unscale_ and grad_stats_.
#include <atomic>

#include "arguments/step.h"
#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

// run(piece, its index, gradients, counts) of pieces of dense gradients on all threads, which
// returns whether one is not finite. The optional counts are collected per piece, then summed per
// tensor, so that no two threads write to the same number.
template <class Run>
void for_grads(const TensorList& grads, const std::vector<Piece>& pieces,
               const std::vector<Dtype>& dtypes, const Tensor& found_inf, const MaybeTensor& counts,
               const Run& run) {
  std::vector<void*> data;
  for (const Tensor& t : grads) data.push_back(const_cast<void*>(t.const_data_ptr()));
  std::vector<uint32_t> kinds(counts ? 4 * pieces.size() : 0);
  std::atomic<bool> bad{false};
  for_pieces(pieces, [&](int64_t i, const Piece& p) {
    void* g = at(data[p.tensor], dtypes[p.tensor], p.begin);
    if (run(p, i, g, counts ? &kinds[4 * i] : nullptr)) bad = true;
  });
  if (bad) *fp32_of(found_inf) = 1.0f;
  if (counts) {
    int64_t* out = static_cast<int64_t*>(counts->mutable_data_ptr());
    std::fill(out, out + counts->numel(), 0);
    for (size_t i = 0; i < kinds.size(); ++i) out[4 * pieces[i / 4].tensor + i % 4] += kinds[i];
  }
}

TensorList dense(TensorList grads) {
  for (Tensor& t : grads) {
    if (!is_dense(t)) t = to_contiguous(t);
  }
  return grads;
}

}  // namespace

// grads: n tensors of any shapes; inv_scale, found_inf: fp32, one element; counts: int64 [n, 4]
void unscale_(TensorList grads, Tensor inv_scale, Tensor found_inf, MaybeTensor counts) {
  std::vector<Dtype> dtypes = check_grads(grads, inv_scale, found_inf, counts, "unscale_");
  check_written(grads, "unscale_");
  float s = *read_fp32(inv_scale);
  TensorList flat = dense(grads);
  for_grads(flat, cut(flat), dtypes, found_inf, counts,
            [&](const Piece& p, int64_t, void* g, uint32_t* kinds) {
              return loops().unscale(dtypes[p.tensor], g, s, p.end - p.begin, kinds);
            });
  for (size_t i = 0; i < grads.size(); ++i) {
    if (flat[i].get() != grads[i].get()) torch::stable::copy_(grads[i], flat[i]);
  }
}

// as above; sum_sq: fp64 [n]
void grad_stats_(TensorList grads, MaybeTensor inv_scale, Tensor found_inf, Tensor sum_sq,
                 MaybeTensor counts) {
  int64_t count = static_cast<int64_t>(grads.size());
  std::vector<Dtype> dtypes = check_grads(grads, inv_scale, found_inf, counts, "grad_stats_");
  check_table(sum_sq, ScalarType::Double, {count}, found_inf, "grad_stats_", "sum_sq");
  float s = inv_scale.has_value() ? *read_fp32(*inv_scale) : 1.0f;
  TensorList flat = dense(grads);
  std::vector<Piece> pieces = cut(flat);
  std::vector<double> partial(pieces.size());
  for_grads(flat, pieces, dtypes, found_inf, counts,
            [&](const Piece& p, int64_t i, void* g, uint32_t* kinds) {
              return loops().grad_stats(dtypes[p.tensor], g, s, p.end - p.begin, &partial[i],
                                        kinds);
            });
  double* sums = static_cast<double*>(sum_sq.mutable_data_ptr());
  std::fill(sums, sums + count, 0.0);
  for (size_t i = 0; i < pieces.size(); ++i) sums[pieces[i].tensor] += partial[i];
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("unscale_", TORCH_BOX(&mixprec::cpu::unscale_));
  m.impl("grad_stats_", TORCH_BOX(&mixprec::cpu::grad_stats_));
}
