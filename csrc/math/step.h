// What the formulas of the optimizers share: the gradient as they use it, and the form of a rule.
//
// A rule is a struct of the settings of an optimizer: the learning rate, then the settings of its
// op in their order, all fp64. It has
//   kVariants           how many forms its formula has
//   states(variant)     how many arrays of state a form uses, at most two
//   variant(n, step)    the form for a param with n arrays of state at this step
//   Scalars<Real>       the constants of a step, each formed in fp64 and rounded once to Real
//   scalars<Real>(grad, step)
//   update<variant>(p, grad, first, second, scalars)   p after the step; the states that the form
//                       uses are updated in place
#pragma once

#include "hd.h"

namespace mixprec {

template <class Real>
struct GradScalars {
  Real inv_scale;
  Real clip;  // negated to maximize
  Real max_value;
};

template <class Real>
MIXPREC_HD Real usable_grad(Real grad, const GradScalars<Real>& s) {
  Real g = grad * s.inv_scale * s.clip;
  g = g > s.max_value ? s.max_value : g;  // NaN stays NaN
  return g < -s.max_value ? -s.max_value : g;
}

// The caller's hyperparameters, from which the scalars of a step are computed.
struct GradSettings {
  double inv_scale, clip, max_value;
  bool maximize;
};

template <class Real>
MIXPREC_HD GradScalars<Real> grad_scalars(const GradSettings& s) {
  return {static_cast<Real>(s.inv_scale), static_cast<Real>(s.maximize ? -s.clip : s.clip),
          static_cast<Real>(s.max_value)};
}

// The number of settings of a rule's op.
template <class Rule>
constexpr int kSettings = static_cast<int>(sizeof(Rule) / sizeof(double)) - 1;

template <class Rule>
Rule make_rule(double lr, const double* settings) {
  static_assert(sizeof(Rule) % sizeof(double) == 0 && alignof(Rule) == alignof(double));
  Rule rule;
  __builtin_memcpy(&rule, &lr, sizeof lr);
  __builtin_memcpy(reinterpret_cast<char*>(&rule) + sizeof lr, settings, sizeof rule - sizeof lr);
  return rule;
}

// The constants of a step in both widths of the arithmetic; `wide` for fp64 params.
template <class Rule>
struct StepConstants {
  typename Rule::template Scalars<float> narrow;
  typename Rule::template Scalars<double> wide;
};

template <class Rule>
MIXPREC_HD StepConstants<Rule> step_constants(const Rule& rule, const GradSettings& grad,
                                              int64_t step) {
  return {rule.template scalars<float>(grad, step), rule.template scalars<double>(grad, step)};
}

}  // namespace mixprec
