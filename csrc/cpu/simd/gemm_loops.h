// Loops of gemm: the fp32 micro-kernel, and the store of a tile. Included once per
// instruction set, which defines Vec (a vector of floats), fma(a, b, c), and the tile MR x NV.

static_assert(MR <= kMaxRows && NR <= kMaxCols);

constexpr int kWordsAhead = 32;  // words of K, the time in which data comes from the L3 cache

template <int mr, int nv>
inline void prefetch(const uint32_t* a, const uint32_t* b) {
  constexpr int per_line = 16, width = nv * sizeof(Vec) / sizeof(uint32_t);
  __builtin_prefetch(a + kWordsAhead * mr);
#pragma GCC unroll 4
  for (int i = 0; i < width; i += per_line) __builtin_prefetch(b + kWordsAhead * width + i);
}

template <int mr, int nv>
void micro_f32(int64_t words, const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
               bool accumulate) {
  constexpr int lanes = sizeof(Vec) / sizeof(float);
  Vec acc[mr][nv];
#pragma GCC unroll 16
  for (int i = 0; i < mr; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) {
      acc[i][j] = accumulate ? load(c + i * ldc + j * lanes) : Vec{};
    }
  }
  for (int64_t w = 0; w < words; ++w, a += mr, b += nv * lanes) {
    prefetch<mr, nv>(a, b);
    Vec row[nv];
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) row[j] = load(reinterpret_cast<const float*>(b) + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < mr; ++i) {
      Vec x = broadcast(bits_float(a[i]));
#pragma GCC unroll 4
      for (int j = 0; j < nv; ++j) acc[i][j] = fma(x, row[j], acc[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < mr; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; ++j) store(c + i * ldc + j * lanes, acc[i][j]);
  }
}

// The epilogue of n sums. Where n is 16, GCC would unroll the loops before it could vectorise them.
template <class T>
inline void store_sums(const float* __restrict sum, float a_scale_inv,
                       const float* __restrict b_scale_inv, const float* __restrict bias,
                       T* __restrict out, int64_t n) {
  if (bias != nullptr) {
#pragma GCC unroll 1
    for (int64_t j = 0; j < n; ++j) {
      out[j] = Convert<T>::encode(sum[j] * a_scale_inv * b_scale_inv[j] + bias[j]);
    }
  } else {
#pragma GCC unroll 1
    for (int64_t j = 0; j < n; ++j) {
      out[j] = Convert<T>::encode(sum[j] * a_scale_inv * b_scale_inv[j]);
    }
  }
}

void store_tile(Dtype out_dtype, const SumTile& sums, const Epilogue& e, void* out, int64_t ld) {
  with_float(out_dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    T* to = static_cast<T*>(out);
    const float* sum = sums.data;
    for (int64_t i = 0; i < sums.rows; ++i, sum += sums.ld, to += ld) {
      if (sums.cols == NR) {
        store_sums(sum, e.a_scale_inv[i], e.b_scale_inv, e.bias, to, NR);
      } else {
        store_sums(sum, e.a_scale_inv[i], e.b_scale_inv, e.bias, to, sums.cols);
      }
    }
  });
}

void accumulate_tile(const SumTile& sums, const Epilogue& e, float* out, int64_t stride_i,
                     int64_t stride_j) {
  const float* __restrict b_scale_inv = e.b_scale_inv;
  for (int64_t i = 0; i < sums.rows; ++i) {
    const float* __restrict sum = sums.data + i * sums.ld;
    float* __restrict to = out + i * stride_i;
    float a_scale_inv = e.a_scale_inv[i];
    if (stride_j == 1) {
      for (int64_t j = 0; j < sums.cols; ++j) to[j] += sum[j] * a_scale_inv * b_scale_inv[j];
    } else {
      for (int64_t j = 0; j < sums.cols; ++j) {
        to[j * stride_j] += sum[j] * a_scale_inv * b_scale_inv[j];
      }
    }
  }
}
