// adamw_: the optimizer's update.
#include "cpu/loops.h"
#include "cpu/parallel.h"
#include "ops.h"

namespace mixprec::cpu {

namespace {

// What the checks learn of params[i] and the tensors beside it. With a thousand small tensors each
// question asked twice would show.
struct Row {
  Dtype param, grad;
  bool contiguous;  // all of them, so that no memory order needs matching
};

// (Not the device: with a tensor on another one the dispatcher would not have come here.)
bool matches(const Tensor& t, ScalarType type, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  auto own = t.sizes();
  bool same = own.size() == sizes.size();
  for (size_t d = 0; same && d < sizes.size(); ++d) same = own[d] == sizes[d];
  return same && t.scalar_type() == type;
}

std::vector<Row> check_lists(const TensorList& params, const TensorList& grads,
                             const std::vector<TensorList*>& state, const TensorList& steps) {
  STD_TORCH_CHECK(grads.size() == params.size() && steps.size() == params.size(),
                  "adamw_: grads and steps must have one tensor per param");
  for (const TensorList* list : state) {
    STD_TORCH_CHECK(list->size() == params.size(),
                    "adamw_: exp_avgs, exp_avg_sqs and masters must have one tensor per param");
  }
  std::vector<Row> rows(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor &param = params[i], &grad = grads[i];
    Dtype p = dtype_of(param, "adamw_: a param"), g = dtype_of(grad, "adamw_: a grad");
    auto sizes = param.sizes();
    bool contiguous = param.is_contiguous();
    STD_TORCH_CHECK(!is_fp8(p) && (contiguous || is_writable(param)),
                    "adamw_: a param must be floating point and writable");
    STD_TORCH_CHECK(
        (p == Dtype::f64 ? g == Dtype::f64 : is_float(g)) &&
            matches(grad, grad.scalar_type(), sizes),
        "adamw_: a grad must have its param's shape and be fp32, bf16 or fp16 (fp64 for "
        "an fp64 param)");
    contiguous = contiguous && grad.is_contiguous();
    ScalarType real = p == Dtype::f64 ? ScalarType::Double : ScalarType::Float;
    for (const TensorList* list : state) {
      const Tensor& t = (*list)[i];
      bool t_contiguous = t.is_contiguous();
      STD_TORCH_CHECK(matches(t, real, sizes) && (t_contiguous || is_writable(t)),
                      "adamw_: state and masters must be fp32 (fp64 for an fp64 param), of their "
                      "param's shape, writable");
      contiguous = contiguous && t_contiguous;
    }
    check_scalar(steps[i], ScalarType::Float, "adamw_: a step");
    rows[i] = {p, g, contiguous};
  }
  return rows;
}

// Gives every list a tensor whose memory can be walked as one flat range in the order of params[i];
// where that needs a copy, the written ones are copied back at the end.
class Flattened {
 public:
  explicit Flattened(std::vector<TensorList*> written) : written_(std::move(written)) {}

  void flatten(size_t i, TensorList& grads) {
    const Tensor& param = (*written_[0])[i];
    bool flat = is_dense(param) && same_strides(param, grads[i]);
    for (const TensorList* list : written_) flat = flat && same_strides(param, (*list)[i]);
    if (flat) return;
    grads[i] = torch::stable::contiguous(grads[i]);
    for (TensorList* list : written_) {
      Tensor original = (*list)[i];
      if (original.is_contiguous()) continue;
      (*list)[i] = torch::stable::contiguous(original);
      copies_.emplace_back(original, (*list)[i]);
    }
  }

  void write_back() {
    for (auto& [original, copy] : copies_) torch::stable::copy_(original, copy);
  }

 private:
  std::vector<TensorList*> written_;
  std::vector<std::pair<Tensor, Tensor>> copies_;
};

}  // namespace

void adamw_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
            TensorList masters, TensorList steps, double lr, double beta1, double beta2, double eps,
            double weight_decay, bool maximize, MaybeTensor inv_scale, MaybeTensor clip,
            MaybeTensor found_inf) {
  std::vector<TensorList*> state{&exp_avgs, &exp_avg_sqs};
  if (!masters.empty()) state.push_back(&masters);
  std::vector<Row> rows = check_lists(params, grads, state, steps);
  AdamWSettings settings{lr,
                         beta1,
                         beta2,
                         eps,
                         weight_decay,
                         read_scalar(inv_scale, 1.0f, "adamw_: inv_scale"),
                         read_scalar(clip, 1.0f, "adamw_: clip")};
  if (maximize) settings.clip = -settings.clip;
  if (read_scalar(found_inf, 0.0f, "adamw_: found_inf") != 0.0f) return;

  std::vector<TensorList*> written{&params};
  written.insert(written.end(), state.begin(), state.end());
  Flattened lists(written);
  size_t count = params.size();
  std::vector<AdamWArrays> arrays(count);
  // Neighbours usually share their step: form its constants once.
  std::vector<int32_t> constants_of(count);
  std::vector<AdamWScalars<float>> narrow;
  std::vector<AdamWScalars<double>> wide;
  // All counts are read before one is written: a step that two params share advances once.
  std::vector<float> count_of(count);
  for (size_t i = 0; i < count; ++i) {
    count_of[i] = *static_cast<const float*>(steps[i].const_data_ptr()) + 1.0f;
  }
  float last_step = -1.0f;
  for (size_t i = 0; i < count; ++i) {
    if (!rows[i].contiguous) lists.flatten(i, grads);
    arrays[i] = {params[i].mutable_data_ptr(), grads[i].const_data_ptr(),
                 exp_avgs[i].mutable_data_ptr(), exp_avg_sqs[i].mutable_data_ptr(),
                 masters.empty() ? nullptr : masters[i].mutable_data_ptr()};
    *static_cast<float*>(steps[i].mutable_data_ptr()) = count_of[i];
    if (count_of[i] != last_step) {
      last_step = count_of[i];
      narrow.push_back(adamw_scalars<float>(settings, static_cast<int64_t>(last_step)));
      wide.push_back(adamw_scalars<double>(settings, static_cast<int64_t>(last_step)));
    }
    constants_of[i] = static_cast<int32_t>(narrow.size()) - 1;
  }
  for_pieces(cut(params), [&](int64_t, const Piece& p) {
    Dtype pd = rows[p.tensor].param, gd = rows[p.tensor].grad;
    Dtype real = pd == Dtype::f64 ? Dtype::f64 : Dtype::f32;
    const AdamWArrays& all = arrays[p.tensor];
    AdamWArrays part{at(all.param, pd, p.begin), at(all.grad, gd, p.begin),
                     at(all.exp_avg, real, p.begin), at(all.exp_avg_sq, real, p.begin),
                     all.master == nullptr ? nullptr : at(all.master, real, p.begin)};
    int32_t c = constants_of[p.tensor];
    if (pd == Dtype::f64) {
      loops().adamw_f64(part, p.end - p.begin, wide[c]);
    } else {
      loops().adamw(pd, gd, part, p.end - p.begin, narrow[c]);
    }
  });
  lists.write_back();
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) { m.impl("adamw_", TORCH_BOX(&mixprec::cpu::adamw_)); }
