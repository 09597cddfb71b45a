// The loops of recurrent and recurrent_backward over the units of a row. Included once per
// instruction set, after side_by_side.h.

// f(load, store) for all units < n, several vectors at a time; the last ones by way of a buffer.
template <class F>
inline void for_units(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + Several::count <= n; i += Several::count) {
    f([i](const float* x) { return load_several(x + i); },
      [i](float* y, const Several& a) { store_several(y + i, a); });
  }
  if (i == n) return;
  int64_t rest = n - i;
  f(
      [i, rest](const float* x) {
        float buffer[Several::count] = {};
        __builtin_memcpy(buffer, x + i, rest * sizeof *x);
        return load_several(buffer);
      },
      [i, rest](float* y, const Several& a) {
        float buffer[Several::count];
        store_several(buffer, a);
        __builtin_memcpy(y + i, buffer, rest * sizeof *y);
      });
}

template <bool saves>
__attribute__((noinline, flatten)) void lstm_row(const RecurrentRow& row, int64_t n) {
  const float *x = row.x, *s = row.sums;
  const int64_t ld = row.ld, ld_s = row.ld_sums;
  float *c = row.c, *h = row.h, *saved = row.saved;
  for_units(n, [=](auto at, auto set) {
    auto before = at(c);
    LstmStep<Several> y(at(x) + at(s), at(x + ld) + at(s + ld_s), at(x + 2 * ld) + at(s + 2 * ld_s),
                        at(x + 3 * ld) + at(s + 3 * ld_s), before);
    if constexpr (saves) {
      set(saved, y.i), set(saved + ld, y.f), set(saved + 2 * ld, y.g), set(saved + 3 * ld, y.o);
      set(saved + 4 * ld, before);
    }
    set(c, y.next_c), set(h, y.h);
  });
}

template <bool saves>
__attribute__((noinline, flatten)) void gru_row(const RecurrentRow& row, int64_t n) {
  const float *x = row.x, *s = row.sums, *bias = row.bias;
  const int64_t ld = row.ld, ld_s = row.ld_sums;
  float *h = row.h, *saved = row.saved;
  for_units(n, [=](auto at, auto set) {
    auto q = at(s + 2 * ld_s) + at(bias);
    GruStep<Several> y(at(x) + at(s), at(x + ld) + at(s + ld_s), at(x + 2 * ld), q, at(h));
    if constexpr (saves) {
      set(saved, y.r), set(saved + ld, y.z), set(saved + 2 * ld, y.n), set(saved + 3 * ld, q);
      set(saved + 4 * ld, y.rest);
    }
    set(h, y.next_h);
  });
}

template <bool is_tanh, bool saves>
__attribute__((noinline, flatten)) void plain_row(const RecurrentRow& row, int64_t n) {
  const float *x = row.x, *s = row.sums;
  float *h = row.h, *saved = row.saved;
  for_units(n, [=](auto at, auto set) {
    auto sum = at(x) + at(s);
    Several y = is_tanh ? hyperbolic_tangent(sum) : rectified(sum);
    if constexpr (saves) set(saved, y);
    set(h, y);
  });
}

template <bool saves>
inline void recurrent_row(const RecurrentRow& row, int64_t n) {
  switch (row.cell) {
    case Cell::lstm:
      return lstm_row<saves>(row, n);
    case Cell::gru:
      return gru_row<saves>(row, n);
    case Cell::tanh:
      return plain_row<true, saves>(row, n);
    default:
      return plain_row<false, saves>(row, n);
  }
}

void recurrent(const RecurrentRow& row, int64_t n) {
  row.saved != nullptr ? recurrent_row<true>(row, n) : recurrent_row<false>(row, n);
}

__attribute__((noinline, flatten)) void lstm_grads(const RecurrentGrads& row, int64_t n) {
  const float *saved = row.saved, *g = row.g;
  const int64_t ld = row.ld;
  float *dh = row.dh, *dc = row.dc, *dx = row.dx;
  for_units(n, [=](auto at, auto set) {
    LstmGrads<Several> y(at(saved), at(saved + ld), at(saved + 2 * ld), at(saved + 3 * ld),
                         at(saved + 4 * ld), at(g) + at(dh), at(dc));
    set(dx, y.i), set(dx + ld, y.f), set(dx + 2 * ld, y.g), set(dx + 3 * ld, y.o);
    set(dc, y.c), set(dh, Several{});
  });
}

__attribute__((noinline, flatten)) void gru_grads(const RecurrentGrads& row, int64_t n) {
  const float *saved = row.saved, *g = row.g;
  const int64_t ld = row.ld;
  float *dh = row.dh, *dx = row.dx, *dq = row.dq;
  for_units(n, [=](auto at, auto set) {
    GruGrads<Several> y(at(saved), at(saved + ld), at(saved + 2 * ld), at(saved + 3 * ld),
                        at(saved + 4 * ld), at(g) + at(dh));
    set(dx, y.r), set(dx + ld, y.z), set(dx + 2 * ld, y.n);
    set(dq, y.q), set(dh, y.h);
  });
}

template <bool is_tanh>
__attribute__((noinline, flatten)) void plain_grads(const RecurrentGrads& row, int64_t n) {
  const float *saved = row.saved, *g = row.g;
  float *dh = row.dh, *dx = row.dx;
  for_units(n, [=](auto at, auto set) {
    auto y = at(saved), d = at(g) + at(dh);
    if constexpr (is_tanh) {
      set(dx, d * (1.0f - y * y));
    } else {
      // Where y is 0 none, where it is NaN all of it, as in torch.
      set(dx, if_negative(-y, d, if_negative(y - 0x1p-126f, Several{}, d)));
    }
    set(dh, Several{});
  });
}

void recurrent_backward(const RecurrentGrads& row, int64_t n) {
  switch (row.cell) {
    case Cell::lstm:
      return lstm_grads(row, n);
    case Cell::gru:
      return gru_grads(row, n);
    case Cell::tanh:
      return plain_grads<true>(row, n);
    default:
      return plain_grads<false>(row, n);
  }
}
