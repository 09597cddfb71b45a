// One step of a recurrent layer, and its derivative, for one unit. As in torch.nn, from which the
// order of the gates is. x: the products of the input with the weights, and biases; s: the products
// of the state before, h, with the weights of the state.
#pragma once

#include "cross_entropy.h"

namespace mixprec {

enum class Cell : int32_t { lstm, gru, tanh, relu };

constexpr int64_t gates_of(Cell cell) { return cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : 1; }
// How many numbers of a unit backward reads.
constexpr int64_t saved_of(Cell cell) { return cell == Cell::lstm || cell == Cell::gru ? 5 : 1; }

// 0 where bounded_exp has its bound, so that an infinite state times 0 is NaN, as in torch.
template <class F>
MIXPREC_HD F sigmoid(F x) {
  return if_negative(x + 87.0f, 0.0f, 1.0f / (bounded_exp(-x) + 1.0f));
}

template <class F>
MIXPREC_HD F hyperbolic_tangent(F x) {
  return softcap_tanh(x, 2.0f);
}

// i, f, g, o: sums of x and s. c: before this step.
template <class F>
struct LstmStep {
  F i, f, g, o, next_c, h;
  MIXPREC_HD LstmStep(F sum_i, F sum_f, F sum_g, F sum_o, F c)
      : i(sigmoid(sum_i)),
        f(sigmoid(sum_f)),
        g(hyperbolic_tangent(sum_g)),
        o(sigmoid(sum_o)),
        next_c(f * c + i * g),
        h(o * hyperbolic_tangent(next_c)) {}
};

// The gradients of the sums and of c, from those of h and of the new c.
template <class F>
struct LstmGrads {
  F i, f, g, o, c;
  MIXPREC_HD LstmGrads(F s_i, F s_f, F s_g, F s_o, F s_c, F dh, F dc) {
    F t = hyperbolic_tangent(s_f * s_c + s_i * s_g);
    F total = dc + (dh * s_o) * (1.0f - t * t);
    i = (total * s_g) * (s_i * (1.0f - s_i));
    f = (total * s_c) * (s_f * (1.0f - s_f));
    g = (total * s_i) * (1.0f - s_g * s_g);
    o = (dh * t) * (s_o * (1.0f - s_o));
    c = total * s_f;
  }
};

// r, z: sums of x and s; q = s + bias of the gate n.
template <class F>
struct GruStep {
  F r, z, n, rest, next_h;
  MIXPREC_HD GruStep(F sum_r, F sum_z, F x_n, F q, F h)
      : r(sigmoid(sum_r)),
        z(sigmoid(sum_z)),
        n(hyperbolic_tangent(x_n + r * q)),
        rest(h - n),
        next_h(n + z * rest) {}
};

// h: without what comes through the sums.
template <class F>
struct GruGrads {
  F r, z, n, q, h;
  MIXPREC_HD GruGrads(F s_r, F s_z, F s_n, F s_q, F rest, F dh) {
    n = (dh * (1.0f - s_z)) * (1.0f - s_n * s_n);
    q = n * s_r;
    r = (n * s_q) * (s_r * (1.0f - s_r));
    z = (dh * rest) * (s_z * (1.0f - s_z));
    h = dh * s_z;
  }
};

// NaN stays.
template <class F>
MIXPREC_HD F rectified(F x) {
  return if_negative(x, 0.0f, x);
}

}  // namespace mixprec
