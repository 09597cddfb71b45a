// Shared by the optimizer updates: arguments, checks, and the parallel loop over all params. Each
// update adds its constants and its loop (adamw.cpp, sgd.cpp).
#pragma once

#include "cpu/parallel.h"
#include "cpu/simd/loops.h"
#include "math/state8.h"
#include "ops.h"

namespace mixprec::cpu {

struct StepState {
  const char* name;
  TensorList tensors;  // one per param
};

// The arguments of every update, documented in mixprec/ops/adamw.py.
struct StepArguments {
  const char* op;
  TensorList params, grads;
  std::vector<StepState> states;  // at most two
  TensorList masters;             // empty, or one per param
  Tensor steps;
  TensorList state_scales;  // empty, or for each state in turn one per param
  double lr;
  bool maximize;
  double max_value;
  bool stochastic_rounding;
  int64_t seed;
  std::vector<int64_t> indices;
  MaybeTensor lr_tensor, inv_scale, clip, found_inf;
};

class Step {
 public:
  // Checks all arguments; nothing is written before run.
  explicit Step(StepArguments);

  double lr() const { return lr_; }
  const GradSettings& grad() const { return grad_; }

  // Unless the step is skipped, counts it and calls update(arrays, begin, end, constants) for all
  // elements of all params on all threads, where constants = make(count).
  template <class Make, class Update>
  void run(const Make& make, const Update& update) {
    if (skipped_) return;
    prepare();
    // Adjacent params usually have the same step count: reuse its constants.
    std::vector<decltype(make(int64_t{}))> constants;
    std::vector<int32_t> constants_of(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      int64_t count = rows_[i].arrays.step;
      if (i == 0 || count != rows_[i - 1].arrays.step) constants.push_back(make(count));
      constants_of[i] = static_cast<int32_t>(constants.size()) - 1;
    }
    for_pieces(cut(arguments_.params), [&](int64_t, const Piece& p) {
      update(rows_[p.tensor].arrays, p.begin, p.end, constants[constants_of[p.tensor]]);
    });
    write_back();
  }

 private:
  // A param and its tensors, with the results of the checks: computing these twice would be
  // measurable with a thousand small tensors.
  struct Row {
    StepArrays arrays;
    bool contiguous;  // all tensors are, so that no memory order needs matching
    bool random;      // random bits are drawn, in row-major order
  };

  void check_row(size_t i);
  void prepare();
  void flatten(size_t i);
  void write_back();

  StepArguments arguments_;
  std::vector<Row> rows_;
  std::vector<std::pair<Tensor, Tensor>> copies_;  // original, contiguous copy
  double lr_;
  GradSettings grad_;
  bool skipped_;
};

}  // namespace mixprec::cpu
