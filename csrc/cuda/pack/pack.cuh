// pack and unpack on the GPU. A thread has a run of 16 elements, of which Philox gives the random
// bits in one evaluation; 8 threads have a group, and exchange what it shares.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"
#include "dispatch.h"
#include "math/pack.h"
#include "math/philox.h"

namespace mixprec::cuda {

constexpr int kRun = kPackRandom, kRunsOfGroup = kPackGroup / kRun;

struct Min {
  static __device__ __forceinline__ uint32_t apply(uint32_t a, uint32_t b) { return a < b ? a : b; }
};
struct SignedMax {
  static __device__ __forceinline__ int32_t apply(int32_t a, int32_t b) { return a > b ? a : b; }
};
struct Xor {
  static __device__ __forceinline__ uint32_t apply(uint32_t a, uint32_t b) { return a ^ b; }
};

// The range of the group of which this thread has these values; all of a warp must call it.
__device__ __forceinline__ PackRange range_of(const float (&x)[kRun], float levels) {
  uint32_t first = float_bits(x[0]);
  Limits<int32_t, uint32_t> limits = {static_cast<int32_t>(first), first, first};
#pragma unroll
  for (float value : x) {
    uint32_t u = float_bits(value);
    limits.most = SignedMax::apply(limits.most, static_cast<int32_t>(u));
    limits.farthest = Max::apply(limits.farthest, u);
    limits.nearest = Min::apply(limits.nearest, u);
  }
  limits.most = warp_reduce<SignedMax>(limits.most, kRunsOfGroup);
  limits.farthest = warp_reduce<Max>(limits.farthest, kRunsOfGroup);
  limits.nearest = warp_reduce<Min>(limits.nearest, kRunsOfGroup);
  return pack_range(bits_float(limits.least()), bits_float(limits.greatest()), levels);
}

// What the random bits are a function of, beside the element.
struct PackRandom {
  uint64_t seed, counter;
  const int64_t* offset;  // null, or on the device: added to counter
};

// x[0, count) to codes, ranges: two numbers for each group.
template <class X, int bits>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const X* __restrict__ x, uint8_t* __restrict__ codes, Bf16* __restrict__ ranges,
                int64_t count, PackRandom from) {
  constexpr int levels = (1 << bits) - 1, per_byte = 8 / bits, bytes = kRun / per_byte;
  bool aligned = is_aligned(x) && is_aligned(codes);
  int64_t runs = packed_groups(count) * kRunsOfGroup;
  uint64_t counter = from.counter;
  if (from.offset != nullptr) counter += static_cast<uint64_t>(*from.offset);
  for (int64_t block = int64_t{blockIdx.x} * kThreads; block < runs;
       block += int64_t{gridDim.x} * kThreads) {
    int64_t run = block + threadIdx.x, begin = run * kRun;
    int kept = static_cast<int>(begin + kRun <= count ? kRun : begin < count ? count - begin : 0);
    X in[kRun];
    if (kept == kRun && aligned) {
      load(x + begin, in);
    } else {  // the last element changes no limit of its group
#pragma unroll
      for (int j = 0; j < kRun; ++j) in[j] = x[j < kept ? begin + j : count - 1];
    }
    float value[kRun];
#pragma unroll
    for (int j = 0; j < kRun; ++j) value[j] = to_float(in[j]);
    PackRange range = range_of(value, static_cast<float>(levels));

    PhiloxWords random = {{static_cast<uint32_t>(run), static_cast<uint32_t>(run >> 32),
                           static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32)}};
    random = philox(random, from.seed);
    uint32_t all = random.word[0] ^ random.word[1] ^ random.word[2] ^ random.word[3];
    float dither = pack_dither(warp_reduce<Xor>(all, kRunsOfGroup));
    float minimum = decode(range.minimum), factor = pack_factor(range.step);
    bool bad = is_nonfinite(minimum);
    uint8_t out[bytes] = {};
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      uint8_t byte = static_cast<uint8_t>(random.word[j / 4] >> (8 * (j % 4)));
      uint32_t steps = pack_steps(bad ? 0.0f : value[j], bad ? 0.0f : minimum, factor, dither);
      uint8_t code = pack_code(static_cast<uint16_t>(steps), byte, levels << 8);
      out[j / per_byte] |= bad || j >= kept ? 0 : code << (j % per_byte * bits);
    }
    uint8_t* to = codes + run * bytes;
    if (kept == kRun && aligned) {
      store(to, out);
    } else {
#pragma unroll
      for (int j = 0; j < bytes; ++j) {
        if (j * per_byte < kept) to[j] = out[j];
      }
    }
    if (run < runs && run % kRunsOfGroup == 0) {
      ranges[run / kRunsOfGroup * 2] = range.minimum;
      ranges[run / kRunsOfGroup * 2 + 1] = range.step;
    }
  }
}

template <class Y, int bits>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const uint8_t* __restrict__ codes, const Bf16* __restrict__ ranges,
                  Y* __restrict__ y, int64_t count) {
  constexpr int levels = (1 << bits) - 1, per_byte = 8 / bits, bytes = kRun / per_byte;
  bool aligned = is_aligned(y) && is_aligned(codes);
  for (int64_t run = int64_t{blockIdx.x} * kThreads + threadIdx.x; run * kRun < count;
       run += int64_t{gridDim.x} * kThreads) {
    int64_t begin = run * kRun, group = run / kRunsOfGroup;
    int kept = static_cast<int>(begin + kRun <= count ? kRun : count - begin);
    uint8_t in[bytes] = {};
    if (kept == kRun && aligned) {
      load(codes + run * bytes, in);
    } else {
#pragma unroll
      for (int j = 0; j < bytes; ++j) {
        if (j * per_byte < kept) in[j] = codes[run * bytes + j];
      }
    }
    float minimum = decode(ranges[2 * group]), step = decode(ranges[2 * group + 1]);
    float value[kRun];
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      int code = in[j / per_byte] >> (j % per_byte * bits) & levels;
      value[j] = unpack_bounded(unpack_value(code, minimum, step), kLargest<Y>);
    }
    Y out[kRun];
    round_all(value, out);
    if (kept == kRun && aligned) {
      store(y + begin, out);
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        if (j < kept) y[begin + j] = out[j];
      }
    }
  }
}

// f(Int<bits>{}) for 8, 4 or 2 bits.
template <class F>
auto with_bits(int64_t bits, const F& f) {
  return bits == 8 ? f(Int<8>{}) : bits == 4 ? f(Int<4>{}) : f(Int<2>{});
}

inline cudaError_t pack(Dtype dtype, int64_t bits, const void* x, uint8_t* codes, Bf16* ranges,
                        int64_t count, const PackRandom& random, const Gpu& gpu) {
  if (count == 0) return cudaSuccess;
  int64_t blocks = (packed_groups(count) * kRunsOfGroup + kThreads - 1) / kThreads;
  return with_float(dtype, [&]<class X>(Type<X>) {
    return with_bits(bits, [&]<int n>(Int<n>) {
      auto* kernel = pack_kernel<X, n>;
      return launch_over(kernel, blocks, gpu, static_cast<const X*>(x), codes, ranges, count,
                         random);
    });
  });
}

inline cudaError_t unpack(Dtype dtype, int64_t bits, const uint8_t* codes, const Bf16* ranges,
                          void* y, int64_t count, const Gpu& gpu) {
  if (count == 0) return cudaSuccess;
  int64_t blocks = (count + kRun * kThreads - 1) / (kRun * kThreads);
  return with_float(dtype, [&]<class Y>(Type<Y>) {
    return with_bits(bits, [&]<int n>(Int<n>) {
      auto* kernel = unpack_kernel<Y, n>;
      return launch_over(kernel, blocks, gpu, codes, ranges, static_cast<Y*>(y), count);
    });
  });
}

}  // namespace mixprec::cuda
