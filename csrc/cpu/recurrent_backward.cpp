// recurrent_backward: the steps of recurrent from the last to the first.
#include <algorithm>

#include "arguments/check.h"
#include "cpu/recurrent_steps.h"

namespace mixprec::cpu {

namespace {

const char* const kOp = "recurrent_backward";

// A tensor like g, or of zeros.
Tensor start_of(const MaybeTensor& g, int64_t batch, int64_t units) {
  Tensor y = empty({batch, units}, ScalarType::Float);
  if (!g.has_value()) {
    std::fill_n(fp32_of(y), y.numel(), 0.0f);
    return y;
  }
  STD_TORCH_CHECK(is_fp32_matrix(*g, batch, units), kOp, ": g_h and g_c must be fp32 [B, H]");
  Tensor dense = row_major(*g);
  std::copy_n(read_fp32(dense), y.numel(), fp32_of(y));
  return y;
}

}  // namespace

// g [N, H], g_h and g_c [B, H], weight [G * H, H], saved [N, S * H], batch_sizes [T]
// -> dx [N, G * H] fp32, dgates [N, G * H] of weight's dtype, dh and dc [B, H]
std::tuple<Tensor, Tensor, Tensor, Tensor> recurrent_backward(Tensor g, Tensor g_h, MaybeTensor g_c,
                                                              Tensor weight, Tensor saved,
                                                              MaybeTensor batch_sizes,
                                                              Text cell_name, bool reverse) {
  Cell cell = cell_of(cell_name, kOp);
  int64_t gates = gates_of(cell), kept = saved_of(cell);
  STD_TORCH_CHECK(g.dim() == 2 && g_h.dim() == 2, kOp, ": g must be [N, H], g_h [B, H]");
  int64_t rows = g.size(0), units = g.size(1), batch = g_h.size(0), ld = gates * units;
  Dtype low = weight_dtype(weight, ld, units, kOp);
  STD_TORCH_CHECK(is_fp32_matrix(g, rows, units) && is_fp32_matrix(saved, rows, kept * units), kOp,
                  ": g must be fp32 [N, H], saved fp32 [N, S * H]");
  bool is_lstm = cell == Cell::lstm;
  Steps steps(rows, batch, batch_sizes, !reverse, kOp);
  g = row_major(g);
  saved = row_major(saved);
  Tensor dh = start_of(g_h, batch, units);
  Tensor dc = is_lstm ? start_of(g_c, batch, units) : empty({0, units}, ScalarType::Float);
  Tensor dx = empty({rows, ld}, ScalarType::Float),
         dgates = empty({rows, ld}, weight.scalar_type());
  if (rows == 0 || units == 0) return {dx, dgates, dh, dc};

  StepProduct product(low, batch, units, gates, 1);
  int64_t stride_n = weight.strides()[0], stride_k = weight.strides()[1];
  for (int64_t gate = 0; gate < gates; ++gate) {
    const void* gate_weight = at(weight.const_data_ptr(), low, gate * units * stride_n);
    product.pack_weight({low, gate_weight, units, stride_k, stride_n}, 0, gate);
  }
  float *state = fp32_of(dh), *cells = is_lstm ? fp32_of(dc) : nullptr, *dx_rows = fp32_of(dx);
  void* dgates_rows = dgates.mutable_data_ptr();
  const float *all_g = read_fp32(g), *all_saved = read_fp32(saved);
  auto add_product = [&](int64_t turn, Units u) {  // of the gates of the turn before this one
    product.run(turn, steps.rows(turn - 1), u, [&](int64_t i, const float* sums, int64_t) {
      float* to = state + i * units + u.first;
      for (int64_t j = 0; j < u.count(); ++j) to[j] += sums[j];
    });
  };
  for (int64_t turn = 0; turn < steps.count(); ++turn) {
    int64_t count = steps.rows(turn), first = steps.first_row(turn);
    product.for_units(count, [&](Units u) {
      if (turn > 0) add_product(turn, u);
      static thread_local Scratch scratch;
      float* dq_rows = static_cast<float*>(scratch.get(count * u.count() * 4 + 64));
      for (int64_t i = 0; i < count; ++i) {
        int64_t at_state = i * units + u.first, row = first + i;
        RecurrentGrads grads = {cell,
                                all_saved + row * kept * units + u.first,
                                all_g + row * units + u.first,
                                units,
                                state + at_state,
                                is_lstm ? cells + at_state : nullptr,
                                dx_rows + row * ld + u.first,
                                dq_rows + i * u.count()};
        loops().recurrent_backward(grads, u.count());
      }
      for (int64_t gate = 0; gate < gates; ++gate) {
        bool is_q = cell == Cell::gru && gate == 2;
        const float* from = is_q ? dq_rows : dx_rows + first * ld + gate * units + u.first;
        void* to = at(dgates_rows, low, first * ld + gate * units);
        round_rows(from, is_q ? u.count() : ld, count, u.count(), low, at(to, low, u.first), ld);
        product.pack_state(turn + 1, to, ld, count, gate, u);
      }
    });
  }
  int64_t last = steps.count();
  product.for_units(steps.rows(last - 1), [&](Units u) { add_product(last, u); });
  return {dx, dgates, dh, dc};
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("recurrent_backward", TORCH_BOX(&mixprec::cpu::recurrent_backward));
}
