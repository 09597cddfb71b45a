// unscale_ and grad_stats_.
#include <atomic>

#include "arguments/grads.h"
#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

// The optional counts: collected per piece, then summed per tensor, so that no two threads write to
// the same number.
class Counts {
 public:
  Counts(const MaybeTensor& out, size_t tensors) : out_(out), tensors_(tensors) {}
  void resize(size_t pieces) {
    if (out_) of_pieces_.resize(4 * pieces);
  }
  uint32_t* of_piece(int64_t i) { return out_ ? &of_pieces_[4 * i] : nullptr; }
  void store(const std::vector<Piece>& pieces) {
    if (!out_) return;
    int64_t* out = static_cast<int64_t*>(out_->mutable_data_ptr());
    std::fill(out, out + 4 * tensors_, 0);
    for (size_t i = 0; i < pieces.size(); ++i) {
      for (int k = 0; k < 4; ++k) out[4 * pieces[i].tensor + k] += of_pieces_[4 * i + k];
    }
  }

 private:
  MaybeTensor out_;
  size_t tensors_;
  std::vector<uint32_t> of_pieces_;
};

}  // namespace

// grads: n tensors of any shapes; inv_scale, found_inf: fp32, one element; counts: int64 [n, 4]
void unscale_(TensorList grads, Tensor inv_scale, Tensor found_inf, MaybeTensor counts) {
  std::vector<Dtype> dtypes = check_grads(grads, inv_scale, found_inf, counts, "unscale_");
  check_written(grads, "unscale_");
  float s = *read_fp32(inv_scale);
  Counts kinds(counts, grads.size());
  TensorList flat = grads;
  for (Tensor& t : flat) {
    if (!is_dense(t)) t = to_contiguous(t);
  }
  std::vector<void*> data;
  for (const Tensor& t : flat) data.push_back(t.mutable_data_ptr());
  std::vector<Piece> pieces = cut(flat);
  kinds.resize(pieces.size());
  std::atomic<bool> bad{false};
  for_pieces(pieces, [&](int64_t i, const Piece& p) {
    Dtype d = dtypes[p.tensor];
    void* g = at(data[p.tensor], d, p.begin);
    if (loops().unscale(d, g, s, p.end - p.begin, kinds.of_piece(i))) bad = true;
  });
  for (size_t i = 0; i < grads.size(); ++i) {
    if (flat[i].get() != grads[i].get()) torch::stable::copy_(grads[i], flat[i]);
  }
  kinds.store(pieces);
  if (bad) *fp32_of(found_inf) = 1.0f;
}

// as above; sum_sq: fp64 [n]
void grad_stats_(TensorList grads, MaybeTensor inv_scale, Tensor found_inf, Tensor sum_sq,
                 MaybeTensor counts) {
  int64_t count = static_cast<int64_t>(grads.size());
  std::vector<Dtype> dtypes = check_grads(grads, inv_scale, found_inf, counts, "grad_stats_");
  check_table(sum_sq, ScalarType::Double, {count}, found_inf, "grad_stats_", "sum_sq");
  float s = inv_scale.has_value() ? *read_fp32(*inv_scale) : 1.0f;
  Counts kinds(counts, grads.size());
  std::vector<const void*> data(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!is_dense(grads[i])) grads[i] = to_contiguous(grads[i]);
    data[i] = grads[i].const_data_ptr();
  }
  std::vector<Piece> pieces = cut(grads);
  std::vector<double> partial(pieces.size());
  kinds.resize(pieces.size());
  std::atomic<bool> bad{false};
  for_pieces(pieces, [&](int64_t i, const Piece& p) {
    Dtype d = dtypes[p.tensor];
    const void* g = at(data[p.tensor], d, p.begin);
    if (loops().grad_stats(d, g, s, p.end - p.begin, &partial[i], kinds.of_piece(i))) bad = true;
  });
  double* sums = static_cast<double*>(sum_sq.mutable_data_ptr());
  std::fill(sums, sums + count, 0.0);
  for (size_t i = 0; i < pieces.size(); ++i) sums[pieces[i].tensor] += partial[i];
  kinds.store(pieces);
  if (bad) *fp32_of(found_inf) = 1.0f;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("unscale_", TORCH_BOX(&mixprec::cpu::unscale_));
  m.impl("grad_stats_", TORCH_BOX(&mixprec::cpu::grad_stats_));
}
