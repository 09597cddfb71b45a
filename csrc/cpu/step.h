// What the optimizer updates have in common: the arguments, their checks, and the parallel loop
// over all params. An update adds its constants and its loop (adamw.cpp, sgd.cpp).
#pragma once

#include "cpu/simd/loops.h"
#include "cpu/parallel.h"
#include "ops.h"

namespace mixprec::cpu {

struct StepState {
  const char* name;
  TensorList tensors;  // one per param
};

// The arguments that every update has; their meaning is in mixprec/ops/adamw.py.
struct StepArguments {
  const char* op;
  TensorList params, grads;
  std::vector<StepState> states;  // at most two
  TensorList masters;             // empty, or one per param
  Tensor steps;
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
  // Checks every argument; nothing is written before run.
  explicit Step(StepArguments);

  double lr() const { return lr_; }
  const GradSettings& grad() const { return grad_; }

  // Unless the step is skipped: counts it, and runs update(arrays, begin, end, constants) over all
  // elements of all params on all threads, with the constants that make(count) gives.
  template <class Make, class Update>
  void run(const Make& make, const Update& update) {
    if (skipped_) return;
    prepare();
    // Neighbours usually share their count: form its constants once.
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
  // A param and the tensors beside it. With a thousand small ones, each question asked twice would
  // show: what the checks learn is kept.
  struct Row {
    StepArrays arrays;
    bool contiguous;  // all of them, so that no memory order needs matching
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
