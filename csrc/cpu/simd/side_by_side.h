// Several vectors as one number, for formulas that are long chains of operations: each operation
// of the formula is done for all of them before the next.
// Included once per instruction set. Callers are `flatten`: the formula lies between them and these
// operators, which it cannot inline itself, being compiled for any processor.

constexpr int kTogether = 3;  // more leave too few of AVX2's registers for constants
typedef int32_t Bits __attribute__((vector_size(sizeof(Vec))));

struct Several {
  static constexpr int64_t count = kTogether * sizeof(Vec) / sizeof(float);
  Vec v[kTogether];
};

template <class F>
inline Several each_vector(const F& f) {
  Several r;
#pragma GCC unroll 3
  for (int i = 0; i < kTogether; ++i) r.v[i] = f(i);
  return r;
}

inline Several load_several(const float* p) {
  constexpr int64_t lanes = Several::count / kTogether;
  return each_vector([&](int i) { return load(p + i * lanes); });
}

inline void store_several(float* p, const Several& a) {
  constexpr int64_t lanes = Several::count / kTogether;
#pragma GCC unroll 3
  for (int i = 0; i < kTogether; ++i) store(p + i * lanes, a.v[i]);
}

inline Several operator+(const Several& a, const Several& b) {
  return each_vector([&](int i) { return a.v[i] + b.v[i]; });
}
inline Several operator-(const Several& a, const Several& b) {
  return each_vector([&](int i) { return a.v[i] - b.v[i]; });
}
inline Several operator*(const Several& a, const Several& b) {
  return each_vector([&](int i) { return a.v[i] * b.v[i]; });
}
inline Several operator/(const Several& a, const Several& b) {
  return each_vector([&](int i) { return a.v[i] / b.v[i]; });
}
inline Several operator+(const Several& a, float b) {
  return each_vector([&](int i) { return a.v[i] + broadcast(b); });
}
inline Several operator-(const Several& a, float b) {
  return each_vector([&](int i) { return a.v[i] - broadcast(b); });
}
inline Several operator*(const Several& a, float b) {
  return each_vector([&](int i) { return a.v[i] * broadcast(b); });
}
inline Several operator-(float a, const Several& b) {
  return each_vector([&](int i) { return broadcast(a) - b.v[i]; });
}
inline Several operator/(float a, const Several& b) {
  return each_vector([&](int i) { return broadcast(a) / b.v[i]; });
}
inline Several operator-(const Several& a) {
  return each_vector([&](int i) { return -a.v[i]; });
}

// The functions with bits of math/exp.h and math/activation.h.
inline Several times_power(const Several& y, const Several& shifted) {
  return each_vector([&](int i) { return (Vec)((Bits)y.v[i] + ((Bits)shifted.v[i] << 23)); });
}
inline Several magnitude(const Several& x) {
  return each_vector([&](int i) { return (Vec)((Bits)x.v[i] & 0x7FFFFFFF); });
}
inline Several high_part(const Several& x) {
  return each_vector([&](int i) { return (Vec)(((Bits)x.v[i] + 0x800) & ~0xFFF); });
}
inline Several if_negative(const Several& x, const Several& then, const Several& otherwise) {
  return each_vector([&](int i) { return x.v[i] < 0.0f ? then.v[i] : otherwise.v[i]; });
}
inline Several if_negative(const Several& x, float then, const Several& otherwise) {
  return each_vector([&](int i) { return x.v[i] < 0.0f ? broadcast(then) : otherwise.v[i]; });
}
