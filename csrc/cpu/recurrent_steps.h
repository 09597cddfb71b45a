// What recurrent and its backward share: the steps of a sequence, and the product of each step with
// a weight that is packed once. Threads share the units of the state, of which each computes the
// sums and then the state, so that they meet once a step.
#pragma once

#include "cpu/gemm_output.h"
#include "math/recurrent.h"

namespace mixprec::cpu {

constexpr int64_t kPanelsAtOnce = 6;     // of units, whose sums are computed before the state
constexpr double kWorthAThread = 1.0e6;  // multiplications and additions of a step
constexpr int64_t kMaxGates = 4;

inline Cell cell_of(const Text& name, const char* op) {
  if (name == "lstm") return Cell::lstm;
  if (name == "gru") return Cell::gru;
  STD_TORCH_CHECK(name == "tanh" || name == "relu", op, ": cell must be lstm, gru, tanh or relu");
  return name == "tanh" ? Cell::tanh : Cell::relu;
}

// Step t has the rows [begin[t], begin[t + 1]), which are the first ones of the batch.
class Steps {
 public:
  Steps(int64_t rows, int64_t batch, const MaybeTensor& sizes, bool reverse, const char* op)
      : reverse_(reverse), begin_{0} {
    if (sizes.has_value()) {
      STD_TORCH_CHECK(sizes->dim() == 1 && sizes->scalar_type() == ScalarType::Long &&
                          on_cpu(*sizes) && sizes->is_contiguous(),
                      op, ": batch_sizes must be int64 [T], contiguous");
      const int64_t* size = static_cast<const int64_t*>(sizes->const_data_ptr());
      for (int64_t t = 0, most = batch; t < sizes->numel(); most = size[t++]) {
        STD_TORCH_CHECK(0 < size[t] && size[t] <= most, op, ": batch_sizes must not increase");
        begin_.push_back(begin_.back() + size[t]);
      }
    } else if (batch > 0) {
      for (int64_t t = 0; t < rows / batch; ++t) begin_.push_back(begin_.back() + batch);
    }
    STD_TORCH_CHECK(begin_.back() == rows, op, ": the rows must be those of batch_sizes");
  }

  int64_t count() const { return static_cast<int64_t>(begin_.size()) - 1; }
  // Of the step that is computed at this turn.
  int64_t first_row(int64_t turn) const { return begin_[at(turn)]; }
  int64_t rows(int64_t turn) const { return begin_[at(turn) + 1] - begin_[at(turn)]; }

 private:
  int64_t at(int64_t turn) const { return reverse_ ? count() - 1 - turn : turn; }

  bool reverse_;
  std::vector<int64_t> begin_;
};

// Units [first, last) of the state.
struct Units {
  int64_t first, last;
  int64_t count() const { return last - first; }
};

// The products of a [rows, K] with a weight, K being `parts` times the units of the state, and the
// columns `gates` times these units. a is packed by those who compute its units.
class StepProduct {
 public:
  StepProduct(Dtype dtype, int64_t rows, int64_t units, int64_t parts, int64_t gates)
      : kernel_(dtype == Dtype::f16 ? loops().gemm_f32 : loops().gemm_bf16),
        dtype_(dtype),
        units_(units),
        gates_(gates),
        part_(kernel_.words(units)),
        words_(part_ * parts) {
    static thread_local Scratch for_a[2], for_b;
    for (int i = 0; i < 2; ++i) a_[i] = panels(for_a[i], rows, kernel_.mr, words_);
    b_ = panels(for_b, blocks() * gates * kernel_.nr, kernel_.nr, words_);
  }

  int64_t blocks() const { return ceil_div(units_, kernel_.nr); }
  // f(units) on all threads.
  template <class F>
  void for_units(int64_t rows, const F& f) const {
    double work = static_cast<double>(rows * words_ * kernel_.k_per_word * gates_ * kernel_.nr);
    int64_t grain = static_cast<int64_t>(kWorthAThread / std::max(work, 1.0)) + 1;
    torch::stable::parallel_for(0, blocks(), grain, [&](int64_t begin, int64_t end) {
      int64_t groups = ceil_div(end - begin, kPanelsAtOnce);
      for (int64_t i = 0; i < groups; ++i) {
        int64_t first = begin + (end - begin) * i / groups;
        int64_t last = begin + (end - begin) * (i + 1) / groups;
        f(Units{first * kernel_.nr, std::min(units_, last * kernel_.nr)});
      }
    });
  }

  // The weight of `units` columns of a gate and of one part of K.
  void pack_weight(Matrix weight, int64_t gate, int64_t part) {
    torch::stable::parallel_for(0, blocks(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t rows = std::min(kernel_.nr, units_ - i * kernel_.nr);
        kernel_.pack_b(dtype_, at(weight.data, dtype_, i * kernel_.nr * weight.stride_i),
                       weight.stride_i, weight.stride_k, rows, units_,
                       b(i, gate) + part * part_ * kernel_.nr, words_, kernel_.nr);
      }
    });
  }

  // Units of a part of a, of `rows` rows (row stride ld), for the product of this turn.
  void pack_state(int64_t turn, const void* x, int64_t ld, int64_t rows, int64_t part, Units u) {
    int64_t width = kernel_.width_a(rows);
    uint32_t* to = a_[turn % 2] + (part * part_ + u.first / kernel_.k_per_word) * width;
    kernel_.pack_a(dtype_, at(x, dtype_, u.first), ld, 1, rows, u.count(), to, words_, width);
  }

  // f(row, sums of `units`, the stride between those of gates) for each row.
  template <class F>
  void run(int64_t turn, int64_t rows, Units units, const F& f) const {
    alignas(64) static thread_local float sums[kMaxRows * kMaxGates * kPanelsAtOnce * kMaxCols];
    const int64_t nr = kernel_.nr, width = kernel_.width_a(rows), ld = kPanelsAtOnce * nr;
    for (int64_t row = 0; row < rows; row += width) {
      const uint32_t* a = a_[turn % 2] + row * words_;
      for (int64_t at = 0; at < units.count(); at += nr) {
        for (int64_t gate = 0; gate < gates_; ++gate) {
          kernel_.micro(width, words_, a, b((units.first + at) / nr, gate), sums + gate * ld + at,
                        gates_ * ld, false);
        }
      }
      int64_t end = std::min(rows, row + width);
      for (int64_t i = row; i < end; ++i) f(i, sums + (i - row) * gates_ * ld, ld);
    }
  }

 private:
  uint32_t* b(int64_t block, int64_t gate) const {
    return b_ + (block * gates_ + gate) * words_ * kernel_.nr;
  }

  const GemmKernel& kernel_;
  Dtype dtype_;
  int64_t units_, gates_, part_, words_;
  uint32_t *a_[2], *b_;
};

// Rows of `units` numbers in fp32 (row stride ld), rounded to dtype.
inline void round_rows(const float* x, int64_t ld, int64_t rows, int64_t units, Dtype dtype,
                       void* out, int64_t ld_out) {
  static const std::vector<float> row_ones(kTileRows, 1.0f);
  for (int64_t row = 0; row < rows; row += kTileRows) {
    for (int64_t col = 0; col < units; col += kTileCols) {
      SumTile tile = {x + row * ld + col, ld, std::min(kTileRows, rows - row),
                      std::min(kTileCols, units - col)};
      loops().store_tile(dtype, tile, {row_ones.data(), ones(), nullptr},
                         at(out, dtype, row * ld_out + col), ld_out);
    }
  }
}

inline bool is_fp32_matrix(const Tensor& t, int64_t rows, int64_t cols) {
  return t.scalar_type() == ScalarType::Float && on_cpu(t) && t.dim() == 2 && t.size(0) == rows &&
         t.size(1) == cols;
}

inline Dtype weight_dtype(const Tensor& weight, int64_t rows, int64_t cols, const char* op) {
  Dtype dtype = dtype_of(weight, op);
  STD_TORCH_CHECK((dtype == Dtype::bf16 || dtype == Dtype::f16) && on_cpu(weight) &&
                      weight.dim() == 2 && weight.size(0) == rows && weight.size(1) == cols,
                  op, ": weight must be [G * H, H], bf16 or fp16");
  return dtype;
}

}  // namespace mixprec::cpu
