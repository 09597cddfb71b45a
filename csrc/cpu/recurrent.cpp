// recurrent: a layer of an LSTM, a GRU or a plain recurrent network in one direction.
#include <algorithm>

#include "arguments/check.h"
#include "cpu/recurrent_steps.h"

namespace mixprec::cpu {

namespace {

const char* const kOp = "recurrent";

Tensor copy_of(const Tensor& x) {
  Tensor y = empty(x.sizes(), ScalarType::Float);
  std::copy_n(read_fp32(x), x.numel(), fp32_of(y));
  return y;
}

}  // namespace

// x [N, G * H], weight [G * H, H], bias [H], h and c [B, H], batch_sizes [T]
// -> out [N, H], h_n, c_n [B, H], h_prev [N, H], saved [N, S * H]
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> recurrent(Tensor x, Tensor weight,
                                                             MaybeTensor bias, Tensor h,
                                                             MaybeTensor c, MaybeTensor batch_sizes,
                                                             Text cell_name, bool reverse,
                                                             bool save, ScalarType out_type) {
  Cell cell = cell_of(cell_name, kOp);
  int64_t gates = gates_of(cell), kept = saved_of(cell);
  STD_TORCH_CHECK(h.dim() == 2 && x.dim() == 2, kOp, ": x must be [N, G * H], h [B, H]");
  int64_t batch = h.size(0), units = h.size(1), rows = x.size(0), ld = gates * units;
  Dtype low = weight_dtype(weight, ld, units, kOp), out_dtype = float_dtype(out_type, kOp);
  STD_TORCH_CHECK(is_fp32_matrix(x, rows, ld) && is_fp32_matrix(h, batch, units), kOp,
                  ": x must be fp32 [N, G * H], h fp32 [B, H]");
  bool is_lstm = cell == Cell::lstm;
  STD_TORCH_CHECK(c.has_value() == is_lstm && (!is_lstm || is_fp32_matrix(*c, batch, units)), kOp,
                  ": c must be fp32 [B, H] for an LSTM, None for others");
  STD_TORCH_CHECK(
      !bias.has_value() || (cell == Cell::gru && bias->dim() == 1 && bias->numel() == units &&
                            bias->scalar_type() == ScalarType::Float && on_cpu(*bias)),
      kOp, ": bias must be fp32 [H], of a GRU only");
  Steps steps(rows, batch, batch_sizes, reverse, kOp);
  x = row_major(x);
  std::vector<float> bias_n(cell == Cell::gru ? units : 0);
  if (bias.has_value()) std::copy_n(read_fp32(row_major(*bias)), units, bias_n.begin());
  Tensor h_n = copy_of(row_major(h));
  Tensor c_n = is_lstm ? copy_of(row_major(*c)) : empty({0, units}, ScalarType::Float);
  Tensor out = empty({rows, units}, out_type);
  Tensor h_prev = empty({save ? rows : 0, units}, weight.scalar_type());
  Tensor saved = empty({save ? rows : 0, kept * units}, ScalarType::Float);
  if (rows == 0 || units == 0) return {out, h_n, c_n, h_prev, saved};

  StepProduct product(low, batch, units, 1, gates);
  int64_t stride_n = weight.strides()[0], stride_k = weight.strides()[1];
  for (int64_t g = 0; g < gates; ++g) {
    const void* gate_weight = at(weight.const_data_ptr(), low, g * units * stride_n);
    product.pack_weight({low, gate_weight, units, stride_n, stride_k}, g, 0);
  }
  static thread_local Scratch scratch;
  void* two_steps = save ? nullptr : scratch.get(2 * batch * units * element_size(low));
  auto before = [&](int64_t turn) {  // the state that the step of this turn multiplies
    return save ? at(h_prev.mutable_data_ptr(), low, steps.first_row(turn) * units)
                : at(two_steps, low, turn % 2 * batch * units);
  };
  float *state = fp32_of(h_n), *cells = is_lstm ? fp32_of(c_n) : nullptr;
  auto hand_on = [&](int64_t turn, Units u) {
    void* to = at(before(turn), low, u.first);
    round_rows(state + u.first, units, steps.rows(turn), u.count(), low, to, units);
    product.pack_state(turn, before(turn), units, steps.rows(turn), 0, u);
  };
  product.for_units(steps.rows(0), [&](Units u) { hand_on(0, u); });
  const float* all_x = read_fp32(x);
  float* all_saved = save ? fp32_of(saved) : nullptr;
  void* all_out = out.mutable_data_ptr();
  for (int64_t turn = 0; turn < steps.count(); ++turn) {
    int64_t count = steps.rows(turn), first = steps.first_row(turn);
    product.for_units(count, [&](Units u) {
      product.run(turn, count, u, [&](int64_t i, const float* sums, int64_t ld_sums) {
        int64_t at_state = i * units + u.first;
        RecurrentRow row = {cell,
                            all_x + (first + i) * ld + u.first,
                            sums,
                            bias_n.data() + u.first,
                            units,
                            ld_sums,
                            is_lstm ? cells + at_state : nullptr,
                            state + at_state,
                            save ? all_saved + (first + i) * kept * units + u.first : nullptr};
        loops().recurrent(row, u.count());
      });
      void* to = at(all_out, out_dtype, first * units + u.first);
      round_rows(state + u.first, units, count, u.count(), out_dtype, to, units);
      if (turn + 1 < steps.count()) hand_on(turn + 1, u);
    });
  }
  return {out, h_n, c_n, h_prev, saved};
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("recurrent", TORCH_BOX(&mixprec::cpu::recurrent));
}
