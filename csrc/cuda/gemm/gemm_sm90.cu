// gemm and gemm_accumulate_ on Hopper: plan, launch, and reduction of a split K.
#include <atomic>
#include <string>

#include "cuda/gemm/config/gemm_operand.h"
#include "cuda/gemm/config/gemm_plan.h"
#include "cuda/gemm/instances/gemm_instances.h"
#include "cuda/gemm/kernel/gemm_finish.cuh"
#include "cuda/gemm/kernel/map_cache_sm90.h"

namespace mixprec::cuda::sm90 {

namespace {

std::atomic<int64_t> forced_tile_config{-1}, forced_splits{0}, forced_group{0};

MeasuredTiles measured_tiles;

ConfigOverride forced() {
  return {static_cast<int>(forced_tile_config), static_cast<int>(forced_splits),
          static_cast<int>(forced_group)};
}

const DeviceProperties& properties_of(int device) {
  static const std::vector<DeviceProperties> all = [] {
    int count = 0;
    check_launch(cudaGetDeviceCount(&count), "gemm");
    std::vector<DeviceProperties> found(count);
    for (int d = 0; d < count; ++d) {
      auto get = [d](cudaDeviceAttr attribute) {
        int value = 0;
        check_launch(cudaDeviceGetAttribute(&value, attribute, d), "gemm");
        return value;
      };
      found[d] = {get(cudaDevAttrComputeCapabilityMajor), get(cudaDevAttrComputeCapabilityMinor),
                  get(cudaDevAttrMultiProcessorCount),
                  get(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
    }
    return found;
  }();
  return all[device];
}

// FP8 operands are K-major.
template <class A, class B>
constexpr auto fp8_instance = instance<A, B, Major::k, Major::k, Accumulate::direct,
                                       Accumulate::promoted, Accumulate::scaled>;

template <class T>
Instance wide_instance(int tile_config, Major a, Major b) {
  constexpr Major k = Major::k, mn = Major::mn;
  constexpr Accumulate direct = Accumulate::direct;
  if (a == k) {
    return b == k ? instance<T, T, k, k, direct>(tile_config)
                  : instance<T, T, k, mn, direct>(tile_config);
  }
  return b == k ? instance<T, T, mn, k, direct>(tile_config)
                : instance<T, T, mn, mn, direct>(tile_config);
}

Instance instance_of(int tile_config, const Operand& a, const Operand& b) {
  if (a.dtype == Dtype::bf16)
    return wide_instance<Bf16>(tile_config, a.layout.major, b.layout.major);
  if (a.dtype == Dtype::f16)
    return wide_instance<Fp16>(tile_config, a.layout.major, b.layout.major);
  if (a.dtype == Dtype::e4m3) {
    return b.dtype == Dtype::e4m3 ? fp8_instance<E4m3, E4m3>(tile_config)
                                  : fp8_instance<E4m3, E5m2>(tile_config);
  }
  return b.dtype == Dtype::e4m3 ? fp8_instance<E5m2, E4m3>(tile_config)
                                : fp8_instance<E5m2, E5m2>(tile_config);
}

TensorMap map_of(const MapArgs& args, const char* op) {
  TensorMap map;
  STD_TORCH_CHECK(map_cache().get(args, &map), op, ": the driver refuses a tensor map of ",
                  args.inner, " x ", args.outer, " elements, pitch ", args.pitch, " bytes");
  return map;
}

TensorMap map_of(const Operand& x, const int (&box)[2], const char* op) {
  bool along_k = x.layout.major == Major::k;
  return map_of(
      {x.dtype, x.tensor.const_data_ptr(), along_k ? x.k() : x.rows(), along_k ? x.rows() : x.k(),
       x.layout.pitch * element_size(x.dtype), box[0], box[1], true},
      op);
}

// Of C or C^T, whose rows are along dimension `rows`. A single row gets a pitch that TMA supports.
int64_t pitch_of(const Tensor& out, int rows) {
  return out.size(rows) > 1 ? out.stride(rows) : round_up(out.size(1 - rows), 8);
}

GemmConfig plan_or_refuse(const Operand& a, const Operand& b, const Epilogue& e, bool fast_accum,
                          const DeviceProperties& gpu, const char* op) {
  GemmProblem problem = {a.rows(), b.rows(), a.k(), a.dtype, b.dtype, e.out_dtype};
  problem.a_major = a.layout.major;
  problem.b_major = b.layout.major;
  problem.a_scale = a.granularity;
  problem.b_scale = b.granularity;
  problem.fast_accum = fast_accum;
  problem.accumulate = e.accumulate;
  // TMA adds to memory in words of 16 bytes: to what lies beyond the end of a row too, if one ends
  // within a word (seen on an H100).
  int64_t size = element_size(e.out_dtype);
  bool whole_words = !e.accumulate || b.rows() * size % 16 == 0;
  problem.out_aligned =
      whole_words && e.pitch * size % 16 == 0 && reinterpret_cast<uint64_t>(e.out) % 16 == 0;
  std::optional<GemmConfig> plan = plan_gemm(problem, gpu, forced(), measured_tiles.of(problem));
  if (plan) return *plan;
  STD_TORCH_CHECK(false, op, ": ", to_string(problem), reasons_against(problem, gpu, forced()));
}

TensorMap map_of(const Epilogue& e, int64_t m, int64_t n, const char* op) {
  int64_t size = element_size(e.out_dtype);
  return map_of({e.out_dtype, e.out, n, m, e.pitch * size, static_cast<int>(128 / size), 64, true},
                op);
}

// What to copy so that x's scales of 1 x 128 are outer-major; x then has the copy, which `room`
// keeps.
ScaleCopy copy_of_scales(Operand& x, int64_t rows_in_place, std::optional<Tensor>& room) {
  ScaleView from = x.scale;
  if (x.granularity != Granularity::block1x128 || x.rows() <= rows_in_place ||
      is_outer_major(from, x.rows())) {
    return {};
  }
  int64_t chunks = ceil_div(x.k(), 128), pitch = round_up(x.rows(), 4);
  room = empty_on(x.tensor, {chunks, pitch}, ScalarType::Float);
  auto* to = static_cast<float*>(room->mutable_data_ptr());
  x.scale = {to, 1, pitch, 0};
  return {from, to, static_cast<int>(x.rows()), static_cast<int>(chunks), pitch};
}

TensorMap map_of_scales(const Operand& b, int box, const char* op) {
  int64_t pitch = b.scale.chunk_stride * 4;
  return map_of({Dtype::f32, b.scale.data, b.rows(), ceil_div(b.k(), 128), pitch, box, 1, false},
                op);
}

// C (+)= a @ b, as `e` says but for the scales, which are those of a and b.
void multiply(Operand a, Operand b, Epilogue e, bool fast_accum, const char* op) {
  int64_t m = a.rows(), n = b.rows();
  OnDevice device(a.tensor);
  if (a.k() == 0) {
    STD_TORCH_CHECK(m <= INT32_MAX && n <= INT32_MAX, op, ": M and N must fit into 32 bits");
    check_launch(gemm_finish(nullptr, 0, static_cast<int>(m), static_cast<int>(n), e, device), op);
    return;
  }
  e.a_scale = a.scale_at_end();
  e.b_scale = b.scale_at_end();
  arrange(a);
  arrange(b);
  GemmConfig plan =
      plan_or_refuse(a, b, e, fast_accum, properties_of(a.tensor.get_device_index()), op);
  Instance kernel = instance_of(plan.tile_config, a, b);
  STD_TORCH_CHECK(kernel.run != nullptr, op, ": no kernel of tile config ", plan.tile_config);

  GemmArgs args = {};
  args.m = static_cast<int>(m);
  args.n = static_cast<int>(n);
  args.k = static_cast<int>(a.k());
  args.chunks_per_split = plan.chunks_per_split;
  args.stages = plan.stages;
  args.tiles = plan.tiles;
  args.epilogue = e;
  args.tma_store = plan.tma_store;
  std::optional<Tensor> a_scales, b_scales;
  ScaleCopy a_copy = copy_of_scales(a, kRowsReadInPlace, a_scales);
  check_launch(copy_scales(a_copy, copy_of_scales(b, 0, b_scales), device), op);
  args.a_chunk = a.scale_in_loop();
  args.b_chunk = b.scale_in_loop();
  args.b_scale_by_column = b.granularity == Granularity::block1x128;
  std::optional<Tensor> workspace;
  if (plan.workspace_bytes > 0) {
    workspace = empty_on(a.tensor, {plan.workspace_bytes / 4}, ScalarType::Float);
    args.partial = static_cast<float*>(workspace->mutable_data_ptr());
  }
  TensorMaps maps = {};
  maps.a = map_of(a, kernel.a_box, op);
  maps.b = map_of(b, kernel.b_box, op);
  if (args.tma_store) maps.out = map_of(e, m, n, op);
  if (args.b_scale_by_column) maps.b_scale = map_of_scales(b, kernel.b_scale_box, op);
  check_launch(kernel.run(maps, args, plan.grid, device.stream), op);
  if (!workspace.has_value()) return;
  check_launch(gemm_finish(args.partial, plan.tiles.splits, args.m, args.n, e, device), op);
}

void check_pair(const Operand& a, const Operand& b, const char* op) {
  STD_TORCH_CHECK(a.k() == b.k() && same_device(a.tensor, b.tensor), op,
                  ": a [M, K] and b [K, N] must agree in K and in their device");
}

void check_arch(const Tensor& t, const char* op) {
  const DeviceProperties& gpu = properties_of(t.get_device_index());
  STD_TORCH_CHECK(gpu.major == 9 && gpu.minor == 0, op,
                  ": this kernel is for GPUs of compute capability 9.0, got ", gpu.major, ".",
                  gpu.minor);
}

Tensor gemm_op(Tensor a, Tensor b, MaybeTensor a_scale_inv, MaybeTensor b_scale_inv,
               MaybeTensor bias, ScalarType out_type, bool fast_accum) {
  Operand x = operand_of(a, 0, a_scale_inv, "gemm", "a");
  Operand y = operand_of(b, 1, b_scale_inv, "gemm", "b");
  check_pair(x, y, "gemm");
  Dtype out_dtype = dtype_of(out_type, "gemm: out_dtype"), bias_dtype = Dtype::f32;
  STD_TORCH_CHECK(is_float(out_dtype), "gemm: out_dtype must be fp32, bf16 or fp16");
  if (bias.has_value()) {
    bias_dtype = dtype_of(*bias, "gemm: bias");
    STD_TORCH_CHECK(is_float(bias_dtype) && bias->dim() == 1 && bias->numel() == y.rows() &&
                        same_device(*bias, a),
                    "gemm: bias must be [N], fp32, bf16 or fp16, on a's device");
    bias = row_major(*bias);
  }
  check_arch(a, "gemm");
  Tensor out = empty_on(a, {x.rows(), y.rows()}, out_type);
  if (out.numel() == 0) return out;
  const void* bias_data = bias.has_value() ? bias->const_data_ptr() : nullptr;
  multiply(x, y,
           {out.mutable_data_ptr(), pitch_of(out, 0), out_dtype, false, bias_data, bias_dtype},
           fast_accum, "gemm");
  return out;
}

void gemm_accumulate_op(Tensor acc, Tensor a, Tensor b, MaybeTensor a_scale_inv,
                        MaybeTensor b_scale_inv) {
  const char* op = "gemm_accumulate_";
  Operand x = operand_of(a, 0, a_scale_inv, op, "a"), y = operand_of(b, 1, b_scale_inv, op, "b");
  check_pair(x, y, op);
  STD_TORCH_CHECK(acc.dim() == 2 && acc.size(0) == x.rows() && acc.size(1) == y.rows() &&
                      acc.scalar_type() == ScalarType::Float && same_device(acc, a) &&
                      is_writable(acc),
                  "gemm_accumulate_: acc must be [M, N], fp32, on a's device, writable");
  check_arch(a, op);
  if (acc.numel() == 0 || x.k() == 0) return;
  bool n_contiguous = acc.size(1) == 1 || acc.stride(1) == 1;
  bool m_contiguous = acc.size(0) == 1 || acc.stride(0) == 1;
  Tensor target = n_contiguous || m_contiguous ? acc : to_contiguous(acc);
  // C is contiguous along M: compute C^T = b^T a^T, which is contiguous along N.
  if (!n_contiguous && m_contiguous) std::swap(x, y);
  int outer = !n_contiguous && m_contiguous ? 1 : 0;
  multiply(x, y, {target.mutable_data_ptr(), pitch_of(target, outer), Dtype::f32, true}, false, op);
  write_back(acc, target);
}

// For tests and measurements: from now on every gemm of this process takes this tile config,
// this many splits and this band (gemm_plan.h), or fails where it cannot. -1, 0, 0: back to the
// planner's choice.
void force_op(int64_t tile_config, int64_t splits, int64_t group) {
  STD_TORCH_CHECK(tile_config >= -1 && tile_config < kTileConfigCount && splits >= 0 &&
                      splits < (1 << 16) && group >= 0 && group < (1 << 16),
                  "gemm_sm90_force: tile_config must be -1 to ", kTileConfigCount - 1,
                  ", splits and group must not be negative");
  forced_tile_config = tile_config;
  forced_splits = splits;
  forced_group = group;
}

// From now on gemm takes these tiles (measured_tiles.h). mixprec sets them when it is imported.
void measured_op(std::vector<int64_t> tile_configs) {
  STD_TORCH_CHECK(measured_tiles.set(tile_configs), "gemm_sm90_measured: tile_configs must be ",
                  MeasuredTiles::kCount, " numbers of tile configs, each of its family, or -1");
}

// The family (tile_configs.h), block_m, block_n and cluster of each tile config.
std::vector<int64_t> tile_configs_op() {
  std::vector<int64_t> all;
  for (const TileConfig& t : kTileConfigs) {
    all.insert(all.end(), {static_cast<int64_t>(family_of(t)), t.block_m, t.block_n, t.cluster});
  }
  return all;
}

}  // namespace

}  // namespace mixprec::cuda::sm90

STABLE_TORCH_LIBRARY_FRAGMENT(mixprec, m) {
  m.def("gemm_sm90_measured(int[] tile_configs) -> ()");
  m.def("gemm_sm90_tile_configs() -> int[]");
  m.def("gemm_sm90_force(int tile_config=-1, int splits=0, int group=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mixprec, CompositeExplicitAutograd, m) {
  m.impl("gemm_sm90_measured", TORCH_BOX(&mixprec::cuda::sm90::measured_op));
  m.impl("gemm_sm90_tile_configs", TORCH_BOX(&mixprec::cuda::sm90::tile_configs_op));
  m.impl("gemm_sm90_force", TORCH_BOX(&mixprec::cuda::sm90::force_op));
}

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("gemm", TORCH_BOX(&mixprec::cuda::sm90::gemm_op));
  m.impl("gemm_accumulate_", TORCH_BOX(&mixprec::cuda::sm90::gemm_accumulate_op));
}
