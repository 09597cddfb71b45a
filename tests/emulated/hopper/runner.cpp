// The instances of csrc/cuda/gemm/kernel/gemm_sm90.cuh as C functions over host memory, for ctypes.
// Compiled once for each pair of operand types and way to accumulate: -DTYPE_A= -DTYPE_B= -DSUMS=.
#include "cuda/gemm/config/gemm_plan.h"
#include "cuda/gemm/kernel/gemm_finish.cuh"
#include "cuda/gemm/kernel/gemm_sm90.cuh"
#include "cuda/gemm/kernel/tensor_map_sm90.h"
#include "scheduler.h"

using namespace mixprec;
using namespace mixprec::cuda;
using namespace mixprec::cuda::sm90;

// As the caller lays it out (runner.py: Call).
struct Operand {
  const void* data;
  int64_t pitch;  // bytes from one contiguous line to the next
  int major;      // 0: K
};

struct Call {
  int row, m, n, k;
  Operand a, b;
  Dtype a_dtype, b_dtype;
  Epilogue epilogue;
  ScaleView a_chunk, b_chunk;
  // Room for outer-major scales, [K / 128, rows rounded up to 4]; null: a's are read in place, and
  // b's are not one per column.
  float *a_scales, *b_scales;
  int stages;  // 0: as planned
  int splits, sms;
  bool tma_store;
  float* partial;  // [splits, m, n] if splits > 1
};

namespace {

constexpr int kNoSuchInstance = -2, kMapRefused = -3, kNoPlan = -4;

template <Major a, Major b>
Instance instance_for(int row) {
  return instance<TYPE_A, TYPE_B, a, b, Accumulate::SUMS>(row);
}

Instance find(const Call& call) {
  if constexpr (sizeof(TYPE_A) == 1) {
    return instance_for<Major::k, Major::k>(call.row);
  } else if (call.a.major == 0) {
    return call.b.major == 0 ? instance_for<Major::k, Major::k>(call.row)
                             : instance_for<Major::k, Major::mn>(call.row);
  } else {
    return call.b.major == 0 ? instance_for<Major::mn, Major::k>(call.row)
                             : instance_for<Major::mn, Major::mn>(call.row);
  }
}

// rows: of a, or columns of b
bool encode(const Operand& o, Dtype dtype, int rows, int k, const int (&box)[2], TensorMap* map) {
  bool k_major = o.major == 0;
  return encode_map(
      {dtype, o.data, k_major ? k : rows, k_major ? rows : k, o.pitch, box[0], box[1], true}, map);
}

// The scales that go to `to`; from there on `view` finds them.
ScaleCopy copy_of(ScaleView& view, float* to, int rows, int k) {
  if (to == nullptr) return {};
  int chunks = (k + 127) / 128;
  int64_t pitch = (rows + 3) / 4 * 4;
  ScaleCopy copy = {view, to, rows, chunks, pitch};
  view = {to, 1, pitch, 0};
  return copy;
}

GemmProblem problem(const Call& c) {
  GemmProblem p = {c.m, c.n, c.k, c.a_dtype, c.b_dtype, c.epilogue.out_dtype};
  p.a_major = c.a.major == 0 ? Major::k : Major::mn;
  p.b_major = c.b.major == 0 ? Major::k : Major::mn;
  p.accumulate = c.epilogue.accumulate;
  return p;
}

}  // namespace

extern "C" {

void seed(uint64_t value) { cuda_on_cpu::set_seed(value); }
const char* last_error() { return cuda_on_cpu::last_error(); }
void truncate_fp8_sums(int on) { cuda_on_cpu::sm90::truncate_fp8_sums(on != 0); }

int gemm(const Call* c) {
  Instance found = find(*c);
  if (found.run == nullptr) return kNoSuchInstance;
  DeviceProperties gpu = {9, 0, c->sms, int64_t{cuda_on_cpu::kMaxShared}};
  std::optional<GemmConfig> plan = config_of(c->row, problem(*c), gpu, c->splits, 0);
  if (!plan) return kNoPlan;
  ScaleView a_chunk = c->a_chunk, b_chunk = c->b_chunk;
  ScaleCopy a_copy = copy_of(a_chunk, c->a_scales, c->m, c->k);
  ScaleCopy b_copy = copy_of(b_chunk, c->b_scales, c->n, c->k);
  cudaError_t error = copy_scales(a_copy, b_copy, {c->sms, nullptr});
  if (error != cudaSuccess) return error;
  TensorMaps maps = {};
  Dtype out_dtype = c->epilogue.out_dtype;
  int box = static_cast<int>(128 / element_size(out_dtype));
  bool whole = plan->tiles.splits == 1;
  if (!encode(c->a, c->a_dtype, c->m, c->k, found.a_box, &maps.a) ||
      !encode(c->b, c->b_dtype, c->n, c->k, found.b_box, &maps.b) ||
      (c->b_scales != nullptr && !encode_map({Dtype::f32, c->b_scales, c->n, b_copy.chunks,
                                              b_copy.pitch * 4, found.b_scale_box, 1, false},
                                             &maps.b_scale)) ||
      (c->tma_store && whole &&
       !encode_map({out_dtype, c->epilogue.out, c->n, c->m,
                    c->epilogue.pitch * element_size(out_dtype), box, 64, true},
                   &maps.out))) {
    return kMapRefused;
  }
  GemmArgs args(c->m, c->n, c->k, plan->chunks_per_split, c->stages > 0 ? c->stages : plan->stages,
                plan->tiles, c->epilogue, c->tma_store && whole, a_chunk, b_chunk,
                c->b_scales != nullptr, whole ? nullptr : c->partial);
  error = found.run(maps, args, plan->grid, nullptr);
  if (error != cudaSuccess || whole) return error;
  return gemm_finish(c->partial, plan->tiles.splits, c->m, c->n, c->epilogue, {c->sms, nullptr});
}
}
