// Loops of the optimizer updates. Included once per instruction set.
//
// A piece is processed in blocks that stay in the L1 cache: arrays narrower than fp32 are widened
// into a buffer, the fp32 loop of the algorithm runs, and the results are narrowed. Any mix of
// dtypes thus needs only one loop per dtype and one per algorithm. fp64 params have their own
// loops.

// out[i] = f(in[i]...) for i < n
template <class F, class Out, class... In>
__attribute__((noinline)) void map(int64_t n, const F f, Out* __restrict out,
                                   const In* __restrict... in) {
  for (int64_t i = 0; i < n; ++i) out[i] = f(in[i]...);
}

// In two loops: the first works on 16 elements at a time. `codes` starts with a block.
template <bool is_signed>
void widen_state8(const uint8_t* codes, const float* scale, float* out, int64_t n) {
  alignas(64) uint16_t values[kState8Block];
  for (int64_t i = 0; i < n; i += kState8Block) {
    int64_t count = n - i < kState8Block ? n - i : kState8Block;
    map(count, [](uint8_t code) { return state8_value<is_signed>(code); }, values, codes + i);
    auto scaled = [by = *scale++](uint16_t bf16) { return decode(Bf16{bf16}) * by; };
    map(count, scaled, out + i, values);
  }
}

__attribute__((noinline)) uint32_t largest_magnitude(const float* __restrict x, int64_t n) {
  int32_t largest = 0;  // as an integer: NaN is larger than Inf
  for (int64_t i = 0; i < n; ++i) {
    int32_t magnitude = static_cast<int32_t>(float_bits(x[i]) & 0x7FFFFFFFu);
    largest = largest > magnitude ? largest : magnitude;
  }
  return static_cast<uint32_t>(largest);
}

// offset: of the first block; those of the others are 2 apart.
template <bool is_signed>
void narrow_state8(const float* x, const uint16_t* bits, const uint16_t* offset, uint8_t* codes,
                   float* scale, int64_t n) {
  for (int64_t i = 0; i < n; i += kState8Block, ++scale, offset += 2) {
    int64_t count = n - i < kState8Block ? n - i : kState8Block;
    *scale = state8_scale(largest_magnitude(x + i, count));
    auto encode = [block = *offset, inverse = state8_inverse(*scale)](float x, uint16_t bits) {
      return encode_state8<is_signed>(x, inverse, block_random(bits, block));
    };
    map(count, encode, codes + i, x + i, bits);
  }
}

constexpr int64_t kBlock = 512;  // a multiple of 8, the elements of one Philox call, and of 256
constexpr int64_t kDrawn = 64;   // blocks of 256, whose random bits are drawn together

struct Buffers {
  alignas(64) float param[kBlock], grad[kBlock], state[2][kBlock];
  alignas(64) uint64_t words[kBlock / 4];
  alignas(64) uint16_t bits[kBlock];
  // See draw_blocks. Of the param, and of both states.
  alignas(64) uint16_t in_block[3][kState8Block], block_bits[2 * kDrawn];
};

template <class T>
inline void widen(const T* x, float* out, int64_t n) {
  map(n, [](T value) { return decode(value); }, out, x);
}

template <class T>
inline void narrow(const float* x, T* out, int64_t n) {
  map(n, [](float value) { return Convert<T>::encode(value); }, out, x);
}

template <class T>
inline void join(const Bf16* param, const T* remainder, float* out, int64_t n) {
  auto joined = [](Bf16 high, T low) { return join_master(high, remainder_16(low)); };
  map(n, joined, out, param, remainder);
}

__attribute__((noinline)) void split(const float* __restrict x, Bf16* __restrict param,
                                     int16_t* __restrict remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    SplitMaster both = split_master(x[i]);
    param[i] = both.param;
    remainder[i] = both.remainder;
  }
}

// n <= kState8Block elements of one block.
__attribute__((noinline)) void split_stochastic(const float* __restrict x,
                                                const uint16_t* __restrict in_block,
                                                uint16_t block_bits, Bf16* __restrict param,
                                                int8_t* __restrict remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    SplitMaster both = split_master(stochastic_24(x[i], block_random(in_block[i], block_bits)));
    param[i] = both.param;
    remainder[i] = static_cast<int8_t>(both.remainder >> 8);
  }
}

template <class T>
T* element(void* base, int64_t i) {
  return static_cast<T*>(base) + i;
}

// n values of `data` from `begin` on, in fp32: in place, or widened into `buffer`.
inline float* in_fp32(Dtype dtype, const void* data, int64_t begin, int64_t n, float* buffer) {
  void* values = const_cast<void*>(data);  // written only where they are in place
  if (dtype == Dtype::f32) return element<float>(values, begin);
  with_float(dtype, [&]<class T>(Type<T>) { widen(element<T>(values, begin), buffer, n); });
  return buffer;
}

inline float* read_param(const StepArrays& a, int64_t begin, int64_t n, float* buffer) {
  switch (a.master_dtype) {
    case Dtype::f32:
      return element<float>(a.master, begin);
    case Dtype::i16:
      join(element<Bf16>(a.param, begin), element<int16_t>(a.master, begin), buffer, n);
      return buffer;
    case Dtype::i8:
      join(element<Bf16>(a.param, begin), element<int8_t>(a.master, begin), buffer, n);
      return buffer;
    default:
      return in_fp32(a.param_dtype, a.param, begin, n, buffer);
  }
}

// b.bits: 16 random bits for each element, of the stream of an array of the param.
inline void draw(const StepArrays& a, Stream stream, int64_t begin, int64_t n, Buffers& b) {
  // The low half of a word comes first, as in memory.
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && kBlock / 8 % kAtOnce == 0);
  RandomStream s = random_stream(a.seed, a.step, a.index, stream);
  random_words(begin / 8, s.step, s.index_and_stream, s.seed, (n + 7) / 8, b.words);
  __builtin_memcpy(b.bits, b.words, sizeof b.bits);
}

inline void write_stochastic(const StepArrays& a, Stream stream, const float* x, void* out,
                             int64_t begin, int64_t n, Buffers& b) {
  draw(a, stream, begin, n, b);
  auto rounded = [](float value, uint16_t bits) { return stochastic_bf16(value, bits); };
  map(n, rounded, element<Bf16>(out, begin), x, b.bits);
}

inline void write_param(const StepArrays& a, const float* p, int64_t begin, int64_t n, Buffers& b) {
  if (a.master_dtype == Dtype::i16) {
    split(p, element<Bf16>(a.param, begin), element<int16_t>(a.master, begin), n);
  } else if (a.master_dtype == Dtype::i8) {
    for (int64_t i = 0; i < n; i += kState8Block) {
      int64_t at = begin + i, left = n - i < kState8Block ? n - i : kState8Block;
      split_stochastic(p + i, b.in_block[kParamStream],
                       b.block_bits[2 * (at / kState8Block % kDrawn)], element<Bf16>(a.param, at),
                       element<int8_t>(a.master, at), left);
    }
  } else if (a.stochastic) {
    write_stochastic(a, kParamStream, p, a.param, begin, n, b);
  } else if (a.param_dtype != Dtype::f32 || a.master_dtype == Dtype::f32) {
    with_float(a.param_dtype, [&]<class T>(Type<T>) { narrow(p, element<T>(a.param, begin), n); });
  }  // else p is the param itself
}

// State s from `begin` on, as in_fp32 returns it.
inline float* read_state(const StepArrays& a, int s, int64_t begin, int64_t n, float* buffer) {
  if (a.state_dtype[s] != Dtype::u8) return in_fp32(a.state_dtype[s], a.state[s], begin, n, buffer);
  const float* scale = a.scale[s] + begin / kState8Block;
  auto* widen = s == 0 ? widen_state8<true> : widen_state8<false>;
  widen(element<uint8_t>(a.state[s], begin), scale, buffer, n);
  return buffer;
}

// Draws the random bits of what has them by blocks (state8.h), for those from element `begin` on.
inline void draw_blocks(const StepArrays& a, int64_t begin, Buffers& b) {
  auto keep = [&](Stream stream, int64_t first, uint16_t* out, int64_t n) {
    draw(a, stream, first, n, b);
    __builtin_memcpy(out, b.bits, n * sizeof(uint16_t));
  };
  keep(kParamStream, 0, b.in_block[kParamStream], kState8Block);
  keep(kFirstStateStream, 0, b.in_block[kFirstStateStream], kState8Block);
  keep(kSecondStateStream, 0, b.in_block[kSecondStateStream], kState8Block);
  keep(kBlockStream, 2 * (begin / kState8Block), b.block_bits, 2 * kDrawn);
}

inline void write_states(const StepArrays& a, float* const (&state)[2], int64_t begin, int64_t n,
                         Buffers& b) {
  for (int s = 0; s < 2; ++s) {
    if (!a.state[s]) continue;
    if (a.state_dtype[s] == Dtype::bf16) {
      Stream stream = s == 0 ? kFirstStateStream : kSecondStateStream;
      write_stochastic(a, stream, state[s], a.state[s], begin, n, b);
    } else if (a.state_dtype[s] == Dtype::u8) {
      int64_t block = begin / kState8Block;
      auto* narrow = s == 0 ? narrow_state8<true> : narrow_state8<false>;
      narrow(state[s], b.in_block[kFirstStateStream + s], b.block_bits + 2 * (block % kDrawn) + s,
             element<uint8_t>(a.state[s], begin), a.scale[s] + block, n);
    }
  }
}

// update(p, grad, state 0, state 1, n) over blocks; a missing state is null.
template <class Update>
inline void for_blocks(const StepArrays& a, int64_t begin, int64_t end, const Update& update) {
  Buffers b;
  bool blocks =
      a.state_dtype[0] == Dtype::u8 || a.state_dtype[1] == Dtype::u8 || a.master_dtype == Dtype::i8;
  for (int64_t first = begin; begin < end; begin += kBlock) {
    int64_t n = end - begin < kBlock ? end - begin : kBlock;
    if (blocks && (begin - first) % (kDrawn * kState8Block) == 0) draw_blocks(a, begin, b);
    float* p = read_param(a, begin, n, b.param);
    const float* grad = in_fp32(a.grad_dtype, a.grad, begin, n, b.grad);
    float* state[2] = {};
    for (int s = 0; s < 2; ++s) {
      if (a.state[s]) state[s] = read_state(a, s, begin, n, b.state[s]);
    }
    update(p, grad, state[0], state[1], n);
    write_states(a, state, begin, n, b);
    write_param(a, p, begin, n, b);
  }
}

// The same for fp64 params, whose arrays are all fp64: in place, without blocks.
template <class Update>
inline void for_f64(const StepArrays& a, int64_t begin, int64_t end, const Update& update) {
  int64_t n = end - begin;
  double* param = element<double>(a.param, begin);
  double* p = a.master_dtype == Dtype::none ? param : element<double>(a.master, begin);
  double* state[2] = {};
  for (int s = 0; s < 2; ++s) {
    if (a.state[s]) state[s] = element<double>(a.state[s], begin);
  }
  update(p, static_cast<const double*>(a.grad) + begin, state[0], state[1], n);
  if (p != param) __builtin_memcpy(param, p, n * sizeof(double));
}

template <class Rule, int variant, class Real>
__attribute__((noinline)) void rule_row(Real* __restrict p, const Real* __restrict grad,
                                        Real* __restrict first, Real* __restrict second, int64_t n,
                                        const typename Rule::template Scalars<Real> s) {
  constexpr int states = Rule::states(variant);
  for (int64_t i = 0; i < n; ++i) {
    Real m = states > 0 ? first[i] : Real(0), v = states > 1 ? second[i] : Real(0);
    p[i] = Rule::template update<variant>(p[i], grad[i], m, v, s);
    if (states > 0) first[i] = m;
    if (states > 1) second[i] = v;
  }
}

// rule_row of the form that is known only now.
template <class Rule, class Real, int from = 0>
inline void rule_rows(int variant, Real* p, const Real* grad, Real* first, Real* second, int64_t n,
                      const typename Rule::template Scalars<Real>& s) {
  if constexpr (from + 1 < Rule::kVariants) {
    if (variant != from) {
      return rule_rows<Rule, Real, from + 1>(variant, p, grad, first, second, n, s);
    }
  }
  rule_row<Rule, from>(p, grad, first, second, n, s);
}

template <class Rule>
void step_loop(const StepArrays& a, int64_t begin, int64_t end, int variant,
               const StepConstants<Rule>& c) {
  if (a.param_dtype == Dtype::f64) {
    for_f64(a, begin, end, [&](double* p, const double* g, double* m, double* v, int64_t n) {
      rule_rows<Rule>(variant, p, g, m, v, n, c.wide);
    });
  } else {
    for_blocks(a, begin, end, [&](float* p, const float* g, float* m, float* v, int64_t n) {
      rule_rows<Rule>(variant, p, g, m, v, n, c.narrow);
    });
  }
}
