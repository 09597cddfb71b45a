// The kernels of csrc/cuda as plain C functions over host memory, for ctypes. Each returns 0 or
// CUDA's error code.
#include <vector>

#include "cuda/adamw.cuh"
#include "cuda/dequantize.cuh"
#include "cuda/grad_stats.cuh"
#include "cuda/quantize.cuh"
#include "cuda/unscale.cuh"

using namespace mixprec;
using namespace mixprec::cuda;

namespace {

GradList grad_list(int count, const int* dtypes, void** data, const int64_t* numels) {
  GradList grads;
  for (int i = 0; i < count; ++i) {
    grads.push_back({static_cast<Dtype>(dtypes[i]), data[i], numels[i]});
  }
  return grads;
}

// What the scratch memory of a kernel must hold again when it is done.
bool is_clear(const AmaxState& state) { return state.largest == 0 && state.done == 0; }

constexpr int kScratchLeftDirty = -1;

// What the shim itself must get right, one number per primitive and thread.
void primitives_kernel(int* out) {
  int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  int* shared = static_cast<int*>(cuda_on_cpu::dynamic_shared());
  out += (static_cast<int>(blockIdx.x) * threads + t) * 6;
  shared[t] = t;
  __syncwarp();
  out[0] = shared[t ^ 1];
  __syncthreads();
  out[1] = shared[threads - 1 - t];
  out[2] = __shfl_down_sync(0xFFFFFFFFu, t, 2);
  out[3] = static_cast<int>(__ballot_sync(0xFFFFFFFFu, t % 3 == 0));
  out[4] = __syncthreads_or(t == 40);
  out[5] = __syncthreads_or(0);
}

// Thread 0 waits for its block, its warp for thread 0.
void deadlock_kernel() {
  if (threadIdx.x == 0) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

}  // namespace

extern "C" {

void seed(uint64_t value) { cuda_on_cpu::set_seed(value); }

int primitives(int blocks, int threads, int* out) {
  return launch(primitives_kernel, blocks, threads, threads * int64_t{sizeof(int)}, nullptr, out);
}

int deadlock() { return launch(deadlock_kernel, 1, 64, 0, nullptr); }

int unscale(int count, const int* dtypes, void** data, const int64_t* numels,
            const float* inv_scale, float* found_inf, int sms) {
  return mixprec::cuda::unscale(grad_list(count, dtypes, data, numels), inv_scale, found_inf, sms,
                                nullptr);
}

int grad_stats(int count, const int* dtypes, void** data, const int64_t* numels,
               const float* inv_scale, float* found_inf, double* sum_sq, int sms) {
  GradList grads = grad_list(count, dtypes, data, numels);
  std::vector<double> partials(grad_stats_chunks(grads), __builtin_nan(""));
  unsigned done = 0;
  GradStats stats = {inv_scale, found_inf, sum_sq, partials.data(), 0, &done};
  int error = mixprec::cuda::grad_stats(grads, stats, sms, nullptr);
  return error != 0 ? error : done != 0 ? kScratchLeftDirty : 0;
}

int amax(int dtype, const void* x, int64_t count, float* result, int sms) {
  AmaxState state = {0, 0};
  int error = mixprec::cuda::amax(static_cast<Dtype>(dtype), x, count, &state, result, ScaleOut{},
                                  sms, nullptr);
  return error != 0 ? error : is_clear(state) ? 0 : kScratchLeftDirty;
}

int quantize(int x_dtype, int q_dtype, const void* x, void* q, void* q_t, int64_t rows,
             int64_t cols, int transpose, int power_of_two_scale, const float* scale,
             float* scale_inv, float* amax, int sms) {
  AmaxState state = {0, 0};
  float current_scale = __builtin_nanf("");
  Quantize args = {static_cast<Dtype>(x_dtype),
                   static_cast<Dtype>(q_dtype),
                   x,
                   q,
                   q_t,
                   rows,
                   cols,
                   transpose != 0,
                   power_of_two_scale != 0,
                   scale,
                   scale_inv,
                   amax,
                   &current_scale,
                   &state};
  int error = mixprec::cuda::quantize(args, sms, nullptr);
  return error != 0 ? error : is_clear(state) ? 0 : kScratchLeftDirty;
}

int dequantize(int data_dtype, int out_dtype, const void* data, void* out, int64_t count,
               const float* scale_inv, int sms) {
  return mixprec::cuda::dequantize(static_cast<Dtype>(data_dtype), static_cast<Dtype>(out_dtype),
                                   data, out, count, scale_inv, sms, nullptr);
}

// pointers: [count][6] param, grad, exp_avg, exp_avg_sq, master, step; dtypes: [count][2]
int adamw(int count, const int* dtypes, void** pointers, const int64_t* numels,
          const double* settings, int maximize, const float* inv_scale, const float* clip,
          const float* found_inf, int sms) {
  std::vector<AdamWTensor> tensors;
  for (int i = 0; i < count; ++i) {
    void** p = pointers + 6 * i;
    tensors.push_back({static_cast<Dtype>(dtypes[2 * i]), static_cast<Dtype>(dtypes[2 * i + 1]),
                       p[0], p[1], p[2], p[3], p[4], static_cast<float*>(p[5]), numels[i]});
  }
  AdamWSettings s = {settings[0], settings[1], settings[2], settings[3], settings[4], 1.0, 1.0};
  std::vector<AdamWConstants> constants(count);
  return mixprec::cuda::adamw(tensors, s, maximize != 0, {inv_scale, clip, found_inf},
                              constants.data(), sms, nullptr);
}
}
