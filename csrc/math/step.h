// The updates of the optimizers, one element at a time; the order of operations is part of the
// specification (docs/numerics.md).
//
// A rule is a struct of the settings of an optimizer: the learning rate, then the settings of its
// op in their order, all fp64. It has
//   kVariants           how many forms its formula has
//   states(variant)     how many arrays of state a form uses, at most two
//   variant(n, step)    the form for a param with n arrays of state at this step
//   Scalars<Real>       the constants of a step, each formed in fp64 and rounded once to Real
//   scalars<Real>(grad, step)
//   update<variant>(p, grad, first, second, scalars)   p after the step; the states that the form
//                       uses are updated in place. Without decay an infinite p must stay infinite:
//                       0 * Inf would be NaN.
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

// beta^step by multiplication only: pow differs between math libraries.
MIXPREC_HD double power(double beta, int64_t step) {
  double result = 1.0;
  for (; step > 0; step >>= 1, beta *= beta) {
    if (step & 1) result *= beta;
  }
  return result;
}

struct AdamW {
  double lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay;

  static constexpr const char* kName = "adamw_";
  static constexpr int kVariants = 2;  // with L2 regularization, with decoupled weight decay
  static constexpr int states(int) { return 2; }  // exp_avg, exp_avg_sq
  MIXPREC_HD int variant(int, int64_t) const { return decoupled_weight_decay != 0; }

  template <class Real>
  struct Scalars {
    GradScalars<Real> grad;
    Real decay;  // lr * weight_decay if decoupled, else weight_decay
    Real one_minus_beta1, beta2, one_minus_beta2, eps;
    Real step_size;     // lr / (1 - beta1^step)
    Real inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^step)
  };

  template <class Real>
  MIXPREC_HD Scalars<Real> scalars(const GradSettings& grad, int64_t step) const {
    double bc1 = 1.0 - power(beta1, step), bc2 = 1.0 - power(beta2, step);
    double decay = decoupled_weight_decay != 0 ? lr * weight_decay : weight_decay;
    return {grad_scalars<Real>(grad),       static_cast<Real>(decay),
            static_cast<Real>(1.0 - beta1), static_cast<Real>(beta2),
            static_cast<Real>(1.0 - beta2), static_cast<Real>(eps),
            static_cast<Real>(lr / bc1),    static_cast<Real>(1.0 / square_root(bc2))};
  }

  template <int variant, class Real>
  MIXPREC_HD static Real update(Real p, Real grad, Real& m, Real& v, const Scalars<Real>& s) {
    Real g = usable_grad(grad, s.grad);
    if (variant == 1) {
      p = s.decay != 0 ? p - p * s.decay : p;
    } else {
      g = s.decay != 0 ? g + p * s.decay : g;
    }
    m = m + (g - m) * s.one_minus_beta1;
    v = v * s.beta2 + (g * g) * s.one_minus_beta2;
    return p - (m / (square_root(v) * s.inv_sqrt_bc2 + s.eps)) * s.step_size;
  }
};

struct Sgd {
  double lr, momentum, dampening, weight_decay, nesterov;

  // Without momentum; with it, 1 + 2 * nesterov + (first step, which the buffer begins with).
  static constexpr const char* kName = "sgd_";
  static constexpr int kVariants = 5;
  static constexpr int states(int variant) { return variant == 0 ? 0 : 1; }  // momentum_buffer
  MIXPREC_HD int variant(int count, int64_t step) const {
    return count == 0 ? 0 : 1 + (nesterov != 0 ? 2 : 0) + (step == 1 ? 1 : 0);
  }

  template <class Real>
  struct Scalars {
    GradScalars<Real> grad;
    Real weight_decay, momentum, one_minus_dampening, lr;
  };

  template <class Real>
  MIXPREC_HD Scalars<Real> scalars(const GradSettings& grad, int64_t) const {
    return {grad_scalars<Real>(grad), static_cast<Real>(weight_decay), static_cast<Real>(momentum),
            static_cast<Real>(1.0 - dampening), static_cast<Real>(lr)};
  }

  template <int variant, class Real>
  MIXPREC_HD static Real update(Real p, Real grad, Real& b, Real&, const Scalars<Real>& s) {
    Real g = usable_grad(grad, s.grad);
    g = s.weight_decay != 0 ? g + p * s.weight_decay : g;
    if (variant > 0) {
      b = (variant - 1) % 2 == 1 ? g : b * s.momentum + g * s.one_minus_dampening;
      g = (variant - 1) / 2 == 1 ? g + b * s.momentum : b;
    }
    return p - g * s.lr;
  }
};

struct Lion {
  double lr, beta1, beta2, weight_decay;

  static constexpr const char* kName = "lion_";
  static constexpr int kVariants = 1;
  static constexpr int states(int) { return 1; }  // exp_avg
  MIXPREC_HD int variant(int, int64_t) const { return 0; }

  template <class Real>
  struct Scalars {
    GradScalars<Real> grad;
    Real decay;  // lr * weight_decay
    Real one_minus_beta1, one_minus_beta2, lr;
  };

  template <class Real>
  MIXPREC_HD Scalars<Real> scalars(const GradSettings& grad, int64_t) const {
    return {grad_scalars<Real>(grad), static_cast<Real>(lr * weight_decay),
            static_cast<Real>(1.0 - beta1), static_cast<Real>(1.0 - beta2), static_cast<Real>(lr)};
  }

  template <int, class Real>
  MIXPREC_HD static Real update(Real p, Real grad, Real& m, Real&, const Scalars<Real>& s) {
    Real g = usable_grad(grad, s.grad);
    p = s.decay != 0 ? p - p * s.decay : p;
    Real c = m + (g - m) * s.one_minus_beta1;
    // In this form GCC vectorises it. NaN stays; +-0 give 0, so that a p of -0 stays.
    Real sign = (c > 0 ? Real(1) : Real(0)) - (c < 0 ? Real(1) : Real(0));
    sign = c == c ? sign : c;
    m = m + (g - m) * s.one_minus_beta2;
    return p - sign * s.lr;
  }
};

struct MuonDirection {
  double lr;  // as every rule has it; not used
  double momentum, nesterov;

  static constexpr const char* kName = "muon_direction_";
  static constexpr int kVariants = 2;             // without and with nesterov
  static constexpr int states(int) { return 1; }  // momentum_buffer
  MIXPREC_HD int variant(int, int64_t) const { return nesterov != 0; }

  template <class Real>
  struct Scalars {
    GradScalars<Real> grad;
    Real one_minus_momentum;
  };

  template <class Real>
  MIXPREC_HD Scalars<Real> scalars(const GradSettings& grad, int64_t) const {
    return {grad_scalars<Real>(grad), static_cast<Real>(1.0 - momentum)};
  }

  // The element of the matrix to orthogonalize; p is not used.
  template <int variant, class Real>
  MIXPREC_HD static Real update(Real, Real grad, Real& b, Real&, const Scalars<Real>& s) {
    Real g = usable_grad(grad, s.grad);
    b = b + (g - b) * s.one_minus_momentum;
    return variant == 1 ? b + (g - b) * s.one_minus_momentum : b;
  }
};

}  // namespace mixprec
