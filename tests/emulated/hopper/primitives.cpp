// Small kernels, each about one group of instructions, for test_hopper_model.py. `fault` 0 is the
// kernel as it should be; every other number is one misuse, which the model has to report.
#include "cuda/common/launch.h"
#include "cuda/gemm/kernel/tensor_map_sm90.h"
#include "cuda/gemm/kernel/wgmma_sm90.cuh"
#include "scheduler.h"

using namespace mixprec;
using namespace mixprec::cuda;
using namespace mixprec::cuda::sm90;

namespace {

constexpr int kBarriers = 64 << 10;  // where mbarriers lie in all of these kernels
constexpr int kShared = 80 << 10;

Barrier* barrier(int i) { return reinterpret_cast<Barrier*>(dynamic_shared() + kBarriers) + i; }
int thread() { return static_cast<int>(threadIdx.x); }

void init(uint32_t arrivals) {
  if (thread() == 0) {
    barrier_init(barrier(0), arrivals);
    barrier_init_fence();
  }
  __syncthreads();
}

// Two blocks of 64. out[block] counts to 3 rounds: warp 1 of both blocks arrives at both, warp 0
// waits. A fresh barrier has ended its phase of parity 1.
void barriers_kernel(int fault, int* out) {
  uint32_t me = cluster_rank();
  if (thread() == 0) {
    barrier_init(barrier(0), 2);
    if (fault == 1) barrier_init(barrier(0), 2);
    if (fault == 2) barrier_init(barrier(0) + 1, 0);
    if (fault == 3) barrier_init(reinterpret_cast<Barrier*>(dynamic_shared() + kBarriers + 12), 1);
    if (fault != 4) barrier_init_fence();
  }
  cluster_sync();
  barrier_wait<true>(barrier(0), 1);
  cluster_sync();
  if (fault == 5 && thread() == 0) {  // one too many
    barrier_arrive_expect(barrier(0), 16);
    barrier_arrive(barrier(0));
    barrier_arrive(barrier(0));
  }
  if (fault == 6) barrier_wait<true>(barrier(3), 0);
  if (fault == 7) barrier_arrive_expect(barrier(0), 16);
  if (fault == 11 && me == 0) return;
  if (thread() < 32) {
    for (int round = 0; round < 3; ++round) {
      uint32_t parity = fault == 8 && round == 2 ? 1 : round % 2;
      if (fault == 9) {
        barrier_wait<false>(barrier(0), parity);
      } else if (fault == 10) {
        barrier_wait<true>(barrier(0), parity + 2);
      } else {
        barrier_wait<true>(barrier(0), parity);
      }
      if (thread() == 0) out[me] = round + 1;
      cluster_sync();
    }
  } else {
    for (int round = 0; round < 3; ++round) {
      if (thread() == 32) {
        barrier_arrive_at(barrier(0), 0);
        barrier_arrive_at(barrier(0), fault == 12 ? 2 : 1);
      }
      cluster_sync();
    }
  }
}

// One box of 64 lines of 128 bytes at (x, y) into `blocks` blocks; then out as it is in shared
// memory.
void load_kernel(const __grid_constant__ TensorMap map, int fault, int x, int y, uint32_t* out) {
  int me = static_cast<int>(cluster_rank()), blocks = cuda_on_cpu::cluster_blocks();
  uint8_t* box = dynamic_shared() + (fault == 1 ? 64 : fault == 2 ? kBarriers - 1024 : 0);
  if (thread() == 0) {
    barrier_init(barrier(0), 1);
    if (fault != 3) barrier_init_fence();
    prefetch_map(&map);
  }
  cluster_sync();
  if (fault == 4 && me == 1) return;
  if (thread() == 0) {
    barrier_arrive_expect(barrier(0), fault == 5   ? 64 * 128 - 16
                                      : fault == 6 ? 64 * 129
                                                   : 64 * 128);
    if (me == 0 && blocks > 1) {
      tma_load_multicast(box, &map, barrier(0), x, y, fault == 7 ? 7 : (1 << blocks) - 1);
    } else if (me == 0) {
      tma_load(box, &map, barrier(0), x, y);
    }
    if (fault == 8 && me == 0) tma_load(box + 1024, &map, barrier(0), x, y);
    if (fault == 9) store_shared(reinterpret_cast<float*>(box), 1.0f, 2.0f);
  }
  if (fault == 10) return;
  if (fault != 11) barrier_wait<true>(barrier(0), fault == 12 ? 1 : 0);
  for (int i = thread(); i < 64 * 32; i += static_cast<int>(blockDim.x)) {
    out[me * 64 * 32 + i] = reinterpret_cast<uint32_t*>(box)[i];
  }
  cluster_sync();
}

// 64 x 32 floats i -> the box at (x, y), twice from the same memory; with `add` the second is
// added. One warpgroup.
void store_kernel(const __grid_constant__ TensorMap map, int fault, int x, int y, bool add) {
  uint8_t* box = dynamic_shared() + (fault == 1 ? 64 : 0);
  auto fill = [&](float step) {
    for (int i = 2 * thread(); i < 64 * 32; i += 256) {
      int row = i / 32, word = i % 32 / 4;
      auto* to = reinterpret_cast<float*>(box + row * 128 + (word ^ row % 8) * 16 + i % 4 * 4);
      store_shared(to, step * i, step * (i + 1));
    }
  };
  for (int turn = 0; turn < 2; ++turn) {
    if (thread() == 0 && fault != 2) tma_store_wait_read<0>();
    named_barrier(1, 128);
    fill(turn == 0 ? 1.0f : 2.0f);
    if (fault != 3 && fault != 4) fence_async_proxy();
    if (fault != 5) named_barrier(1, 128);
    if (fault == 4) fence_async_proxy();
    if (thread() != 0) continue;
    if (add && turn == 1) {
      tma_store_wait<0>();  // the order of both matters here
      tma_add(&map, box, x, y);
    } else {
      if (turn == 1) tma_store_wait<0>();
      tma_store(&map, box, x, y);
    }
    if (fault == 7) continue;
    tma_store_commit();
  }
  if (thread() == 0 && fault != 6) tma_store_wait_read<0>();
}

// 16-bit element (row, col) is 64 * row + col, by stmatrix. One warpgroup.
void matrix_kernel(const __grid_constant__ TensorMap map, int fault) {
  int lane = thread() % 32, warp = thread() / 32, row = warp * 16 + lane % 16;
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t r[4];
    for (int m = 0; m < 4; ++m) {
      uint32_t first = static_cast<uint32_t>((warp * 16 + m % 2 * 8 + lane / 4) * 64 + pair * 16 +
                                             m / 2 * 8 + lane % 4 * 2);
      r[m] = first | (first + 1) << 16;
    }
    uint8_t* to = dynamic_shared() + row * 128 + ((2 * pair + lane / 16) ^ (row % 8)) * 16;
    stmatrix(to + (fault == 1 ? 8 : 0), r);
  }
  if (fault != 2) fence_async_proxy();
  named_barrier(1, 128);
  if (thread() == 0) {
    tma_store(&map, dynamic_shared(), 0, 0);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

// out [64, n] = 2 * a [64, k] @ b [k, n], k being 128 bytes: the product twice on the same
// accumulators. One warpgroup.
template <class A, class B, int n, Major a_major, Major b_major>
void product_kernel(const __grid_constant__ TensorMap a_map,
                    const __grid_constant__ TensorMap b_map, int fault, float* out) {
  constexpr int depth = 128 / sizeof(A), a_bytes = 64 * 128, chunk = depth * 128;
  constexpr int a_step = a_major == Major::k ? 32 : depth / 4 * 128;
  constexpr int b_step = b_major == Major::k ? 32 : depth / 4 * 128;
  uint8_t *a = dynamic_shared(), *b = a + a_bytes;
  init(1);
  auto load = [&] {
    barrier_arrive_expect(barrier(0), a_bytes + n * 128);
    tma_load(a, &a_map, barrier(0), 0, 0);
    for (int c = 0; c < n; c += b_major == Major::k ? n : 64) {
      tma_load(b + c * 128, &b_map, barrier(0), b_major == Major::k ? 0 : c, 0);
    }
  };
  if (thread() == 0) load();
  if (fault != 1) barrier_wait<false>(barrier(0), 0);
  float acc[n / 2];
  for (float& x : acc) x = 5.0f;
  if (fault != 2) wgmma_fence();
  for (int turn = 0; turn < 2; ++turn) {
    for (int step = 0; step < 4; ++step) {
      uint32_t a_at = shared_address(a) + step * a_step, b_at = shared_address(b) + step * b_step;
      if (fault == 3 && thread() == 77) b_at += 1024;
      if (fault == 4) a_at += 1024 * 1024 / 8;
      if (fault == 5) b_at += 256;
      uint64_t reserved = fault == 6 ? uint64_t{1} << 46 : 0;
      Wgmma<A, B, n, a_major, b_major>::run(
          acc, matrix_descriptor(a_at, chunk, 1024) | reserved,
          matrix_descriptor(b_at, chunk, fault == 7 ? 2048 : 1024), turn + step > 0);
      if (fault == 8 && turn == 1) acc[3] = 1.0f;
    }
    if (fault != 9) wgmma_commit();
    if (fault == 10 && turn == 0) {  // touched between two products
      wgmma_wait_for(acc);
      acc[0] += 0.0f;
    }
  }
  if (fault == 11) {
    wgmma_wait<1>();
  } else if (fault == 12) {
    if (thread() != 40) wgmma_wait_for(acc);
  } else if (fault != 13) {
    wgmma_wait_for(acc);
  }
  if (fault == 14) {
    store_shared(reinterpret_cast<float*>(b), 0.0f, 0.0f);
    fence_async_proxy();
    __syncthreads();
    wgmma_fence();
    Wgmma<A, B, n, a_major, b_major>::run(acc, matrix_descriptor(shared_address(a), chunk, 1024),
                                          matrix_descriptor(shared_address(b), chunk, 1024), false);
    store_shared(reinterpret_cast<float*>(b), 0.0f, 0.0f);
  }
  if (fault == 15 || fault == 16) {  // the next stage, too early
    wgmma_fence();
    Wgmma<A, B, n, a_major, b_major>::run(acc, matrix_descriptor(shared_address(a), chunk, 1024),
                                          matrix_descriptor(shared_address(b), chunk, 1024), true);
    wgmma_commit();
    if (fault == 16) __syncthreads();
    if (thread() == 0) load();
    wgmma_wait_for(acc);
    barrier_wait<false>(barrier(0), 1);
  }
  int row = thread() / 32 * 16 + thread() % 32 / 4, col = thread() % 4 * 2;
  for (int i = 0; i < n / 2; ++i) {
    out[(row + i / 2 % 2 * 8) * n + col + i / 4 * 8 + i % 2] = acc[i];
  }
}

// Three warpgroups. out[t] = 1 for each thread that comes through.
void warps_kernel(int fault, int* out) {
  int group = thread() / 128;
  if (group == 0) {
    if (fault == 8 && thread() < 32) {
      // its warps 1..3 give registers away alone
    } else if (fault == 1) {
      more_registers<40>();
    } else if (fault != 2) {
      fewer_registers<40>();
    }
  } else if (fault == 3) {
    more_registers<240>();
  } else if (fault != 8) {
    more_registers<232>();
  }
  if (fault == 4) named_barrier(16, 128);
  if (fault == 5) named_barrier(1, 100);
  if (fault == 6) named_barrier(1, thread() < 128 ? 128 : 256);
  if (fault == 7 && thread() == 200) return;
  named_barrier(1 + group, 128);
  out[thread()] = 1;
}

template <class... Params, class... Args>
int start(void (*kernel)(Params...), int blocks, int threads, const Args&... args) {
  return launch_cluster(kernel, blocks, threads, kShared, blocks, nullptr, args...);
}

template <class T>
constexpr Dtype kTypeOf = std::is_same_v<T, Bf16>   ? Dtype::bf16
                          : std::is_same_v<T, Fp16> ? Dtype::f16
                          : std::is_same_v<T, E4m3> ? Dtype::e4m3
                                                    : Dtype::e5m2;

template <class A, class B, int n, Major a_major, Major b_major>
int product(int fault, bool swizzle, const void* a, const void* b, float* out) {
  constexpr int depth = 128 / sizeof(A);
  auto map = [&](Dtype type, const void* data, Major major, int rows, TensorMap* to) {
    bool k_major = major == Major::k;
    int inner = k_major ? depth : rows, outer = k_major ? rows : depth;
    return encode_map({type, data, inner, outer, inner * int64_t{sizeof(A)}, k_major ? depth : 64,
                       outer, swizzle},
                      to);
  };
  TensorMap a_map, b_map;
  if (!map(kTypeOf<A>, a, a_major, 64, &a_map) || !map(kTypeOf<B>, b, b_major, n, &b_map))
    return -1;
  return start(product_kernel<A, B, n, a_major, b_major>, 1, 128, a_map, b_map, fault, out);
}

}  // namespace

extern "C" {

void seed(uint64_t value) { cuda_on_cpu::set_seed(value); }
const char* last_error() { return cuda_on_cpu::last_error(); }
void truncate_fp8_sums(int on) { cuda_on_cpu::sm90::truncate_fp8_sums(on != 0); }

// 0: the driver would take it.
int refuses(int dtype, uint64_t address, int64_t inner, int64_t outer, int64_t pitch, int box_inner,
            int box_outer, int swizzle) {
  TensorMap map;
  return !encode_map({static_cast<Dtype>(dtype), reinterpret_cast<void*>(address), inner, outer,
                      pitch, box_inner, box_outer, swizzle != 0},
                     &map);
}

int barriers(int fault, int* out) { return start(barriers_kernel, 2, 64, fault, out); }

int load(int fault, int blocks, int dtype, const void* data, int64_t inner, int64_t outer,
         int64_t pitch, int swizzle, int x, int y, uint32_t* out) {
  Dtype type = static_cast<Dtype>(dtype);
  int width = static_cast<int>(128 / element_size(type));
  TensorMap map;
  if (!encode_map({type, data, inner, outer, pitch, width, 64, swizzle != 0}, &map)) return -1;
  if (fault == 13) map.magic = 0;
  return start(load_kernel, blocks, 64, map, fault, x, y, out);
}

int store(int fault, float* data, int64_t inner, int64_t outer, int x, int y, int add) {
  TensorMap map;
  if (!encode_map({Dtype::f32, data, inner, outer, inner * 4, 32, 64, true}, &map)) return -1;
  return start(store_kernel, 1, 128, map, fault, x, y, add != 0);
}

int matrix(int fault, uint16_t* data) {
  TensorMap map;
  if (!encode_map({Dtype::f16, data, 64, 64, 128, 64, 64, true}, &map)) return -1;
  return start(matrix_kernel, 1, 128, map, fault);
}

int warps(int fault, int* out) { return start(warps_kernel, 1, 384, fault, out); }

// The four layouts of bf16, K of both first, then b N-major; fp16; the four pairs of FP8 formats.
int run_product(int kind, int fault, int swizzle, const void* a, const void* b, float* out) {
  constexpr Major k = Major::k, mn = Major::mn;
  constexpr int (*products[])(int, bool, const void*, const void*, float*) = {
      product<Bf16, Bf16, 128, k, k>,  product<Bf16, Bf16, 128, k, mn>,
      product<Bf16, Bf16, 128, mn, k>, product<Bf16, Bf16, 128, mn, mn>,
      product<Fp16, Fp16, 256, k, mn>, product<E4m3, E4m3, 64, k, k>,
      product<E4m3, E5m2, 64, k, k>,   product<E5m2, E4m3, 64, k, k>,
      product<E5m2, E5m2, 64, k, k>};
  return products[kind](fault, swizzle != 0, a, b, out);
}
}
