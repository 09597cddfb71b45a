// Loops of cross_entropy and cross_entropy_backward over a row of logits. Included once per
// instruction set, after activation_loops.h. A row is processed in blocks of kPart.

__attribute__((noinline, flatten)) void cap_logits(const float* __restrict x, Softcap softcap,
                                                   float* __restrict y, int64_t n) {
  for_numbers<true>(
      n, [&](auto at, auto set) { set(y, softcap_tanh(at(x), softcap.scale) * softcap.value); });
}

// `least` or the largest of x, but not a NaN, which the exponentials will hold.
inline float largest_of(const float* x, int64_t n, float least) {
  Vec best = broadcast(least);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Vec v = load(x + i);
    best = v > best ? v : best;
  }
  float each[kLanes];
  store(each, best);
  for (int j = 0; j < kLanes; ++j) least = each[j] > least ? each[j] : least;
  for (; i < n; ++i) least = x[i] > least ? x[i] : least;
  return least;
}

inline float total_of(const Several& a) {
  float each[Several::count], total = 0.0f;
  store_several(each, a);
  for (float x : each) total += x;
  return total;
}

// total += the sum of e^(x - shift), sum += that of x.
__attribute__((noinline, flatten)) void add_logits(const float* __restrict x, float shift,
                                                   int64_t n, float* total, float* sum) {
  Several exps = {}, logits = {};
  int64_t i = 0;
  for (; i + Several::count <= n; i += Several::count) {
    Several v = load_several(x + i);
    exps = exps + bounded_exp(v - shift);
    logits = logits + v;
  }
  float exp_sum = total_of(exps), logit_sum = total_of(logits);
  for (; i < n; ++i) {
    exp_sum += bounded_exp(x[i] - shift);
    logit_sum += x[i];
  }
  *total += exp_sum;
  *sum += logit_sum;
}

void cross_entropy(const float* logits, int64_t n, int64_t target, Softcap softcap, float* row) {
  alignas(64) float buffer[kPart];
  float maximum = row[0], total = row[1], sum = row[3];
  for (int64_t i = 0; i < n; i += kPart) {
    int64_t count = n - i < kPart ? n - i : kPart;
    const float* x = logits + i;
    if (softcap.value != 0.0f) {
      cap_logits(x, softcap, buffer, count);
      x = buffer;
    }
    if (i <= target && target < i + count) row[2] = x[target - i];
    float largest = largest_of(x, count, maximum);
    float shift = largest == -__builtin_inff() ? 0.0f : largest;
    total *= bounded_exp(maximum - shift);
    maximum = largest;
    add_logits(x, shift, count, &total, &sum);
  }
  row[0] = maximum;
  row[1] = total;
  row[3] = sum;
}

template <bool capped>
__attribute__((noinline, flatten)) void logit_grads(const float* __restrict x,
                                                    const CrossEntropyRow& row, Softcap softcap,
                                                    float* __restrict g, int64_t n) {
  for_numbers<true>(
      n, [&](auto at, auto set) { set(g, cross_entropy_grad<capped>(at(x), 0.0f, row, softcap)); });
}

void cross_entropy_backward(const float* logits, int64_t n, int64_t target, float label,
                            const CrossEntropyRow& row, Softcap softcap, Dtype dtype, void* g) {
  alignas(64) float buffer[kPart];
  bool capped = softcap.value != 0.0f;
  with_float(dtype, [&]<class T>(Type<T>) {
    T* __restrict out = static_cast<T*>(g);
    if (row.weight == 0.0f) {
      for (int64_t i = 0; i < n; ++i) out[i] = T{};
      return;
    }
    for (int64_t i = 0; i < n; i += kPart) {
      int64_t count = n - i < kPart ? n - i : kPart;
      auto grads = capped ? logit_grads<true> : logit_grads<false>;
      grads(logits + i, row, softcap, buffer, count);
      if (i <= target && target < i + count) {
        float x = logits[target];
        buffer[target - i] = capped ? cross_entropy_grad<true>(x, label, row, softcap)
                                    : cross_entropy_grad<false>(x, label, row, softcap);
      }
      for (int64_t j = 0; j < count; ++j) out[i + j] = Convert<T>::encode(buffer[j]);
    }
  });
}
