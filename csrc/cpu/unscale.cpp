// unscale_ and grad_stats_.
#include <atomic>

#include "cpu/loops.h"
#include "cpu/parallel.h"
#include "ops.h"

namespace mixprec::cpu {

namespace {

Dtype check_grad(const Tensor& grad, const char* what) {
  Dtype dtype = dtype_of(grad, what);
  STD_TORCH_CHECK(!is_fp8(dtype) && on_cpu(grad), what, " must be floating point on the CPU");
  return dtype;
}

void raise_flag(const Tensor& found_inf) {
  *static_cast<float*>(found_inf.mutable_data_ptr()) = 1.0f;
}

}  // namespace

void unscale_(TensorList grads, Tensor inv_scale, Tensor found_inf) {
  check_scalar(found_inf, ScalarType::Float, "unscale_: found_inf");
  float s = read_scalar(inv_scale, 1.0f, "unscale_: inv_scale");
  std::vector<Dtype> dtypes(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    dtypes[i] = check_grad(grads[i], "unscale_: a gradient");
    STD_TORCH_CHECK(is_writable(grads[i]), "unscale_: the elements of a gradient share memory");
  }

  TensorList flat = grads;
  for (Tensor& t : flat) {
    if (!is_dense(t)) t = torch::stable::contiguous(t);
  }
  std::vector<void*> data;
  for (const Tensor& t : flat) data.push_back(t.mutable_data_ptr());
  std::atomic<bool> bad{false};
  for_pieces(cut(flat), [&](int64_t, const Piece& p) {
    Dtype d = dtypes[p.tensor];
    if (loops().unscale(d, at(data[p.tensor], d, p.begin), s, p.end - p.begin)) bad = true;
  });
  for (size_t i = 0; i < grads.size(); ++i) {
    if (flat[i].get() != grads[i].get()) torch::stable::copy_(grads[i], flat[i]);
  }
  if (bad) raise_flag(found_inf);
}

void grad_stats_(TensorList grads, MaybeTensor inv_scale, Tensor found_inf, Tensor sum_sq) {
  check_scalar(found_inf, ScalarType::Float, "grad_stats_: found_inf");
  check_scalar(sum_sq, ScalarType::Double, "grad_stats_: sum_sq");
  float s = read_scalar(inv_scale, 1.0f, "grad_stats_: inv_scale");
  std::vector<Dtype> dtypes(grads.size());
  std::vector<const void*> data(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    dtypes[i] = check_grad(grads[i], "grad_stats_: a gradient");
  }

  for (size_t i = 0; i < grads.size(); ++i) {
    if (!is_dense(grads[i])) grads[i] = torch::stable::contiguous(grads[i]);
    data[i] = grads[i].const_data_ptr();
  }
  std::vector<Piece> pieces = cut(grads);
  std::vector<double> partial(pieces.size());
  std::atomic<bool> bad{false};
  for_pieces(pieces, [&](int64_t i, const Piece& p) {
    Dtype d = dtypes[p.tensor];
    if (loops().grad_stats(d, at(data[p.tensor], d, p.begin), s, p.end - p.begin, &partial[i])) {
      bad = true;
    }
  });
  double total = 0.0;
  for (double part : partial) total += part;
  *static_cast<double*>(sum_sq.mutable_data_ptr()) = total;
  if (bad) raise_flag(found_inf);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("unscale_", TORCH_BOX(&mixprec::cpu::unscale_));
  m.impl("grad_stats_", TORCH_BOX(&mixprec::cpu::grad_stats_));
}
