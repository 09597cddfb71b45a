// gemm, gemm_accumulate_, whose operands are packed into panels of fp32 words or bf16 pairs, and
// gemm_simulated, with the products and sums of a GPU's tensor cores.
#include "cpu/gemm.h"

#include <array>

#include "cpu/gemm_multiply.h"
#include "math/tensor_core.h"

namespace mixprec::cpu {

namespace {

constexpr int64_t kTorchsSize = int64_t{1} << 22;  // M * N * K

void check_operands(const Tensor& a, const Tensor& b, const char* op) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), op,
                  ": a must be [M, K] and b [K, N]");
  check_devices_and_dtypes(a, b, op);
}

// a [M, K] and b [K, N], which is given with its columns as rows.
std::pair<Side, Side> sides(const Tensor& a, const Tensor& b, const MaybeTensor& a_scale_inv,
                            const MaybeTensor& b_scale_inv, const char* op) {
  int64_t k = a.size(1);
  Scales of_b = scales_of(b_scale_inv, b.size(1), k, 1, op, "b_scale_inv");
  return {{matrix_of(a, 0, 1), scales_of(a_scale_inv, a.size(0), k, 0, op, "a_scale_inv")},
          {matrix_of(b, 1, 0), of_b}};
}

// a @ b^T + bias, of this shape [..., N] and type, by any kernel.
template <class Kernel>
Tensor product_by(const Kernel& kernel, const Side& a, const Side& b, int64_t k, Sizes shape,
                  ScalarType out_type, const MaybeTensor& bias, const char* op,
                  bool promoted = false) {
  Dtype out_dtype = dtype_of(out_type, op);
  STD_TORCH_CHECK(is_float(out_dtype), op, ": out_dtype must be fp32, bf16 or fp16");
  int64_t m = a.matrix.rows, n = b.matrix.rows;
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->numel() == n && on_cpu(*bias) &&
                            is_float(dtype_of(*bias, op))),
                  op, ": bias must be [N], fp32, bf16 or fp16, on the CPU");
  std::vector<float> wide_bias = vector_in_fp32(bias, n, 0.0f);
  Tensor out = empty(shape, out_type);
  if (m == 0 || n == 0) return out;
  BothScales scales = {a.scales, b.scales, n, k};
  scales.promoted = promoted;
  Result result = {out_dtype, static_cast<char*>(out.mutable_data_ptr()),   n, 1,
                   false,     bias.has_value() ? wide_bias.data() : nullptr};
  multiply(kernel, {a.matrix, b.matrix, k, std::move(scales), result});
  return out;
}

}  // namespace

Tensor product(const Side& a, const Side& b, int64_t k, Sizes shape, ScalarType out_type,
               const MaybeTensor& bias, const char* op) {
  return product_by(kernel_for(a.matrix.dtype), a, b, k, shape, out_type, bias, op);
}

void add_product(const Tensor& acc, const Side& a, const Side& b, int64_t k) {
  if (acc.numel() == 0 || k == 0) return;
  BothScales scales = {a.scales, b.scales, b.matrix.rows, k};
  Result result = {Dtype::f32,    static_cast<char*>(acc.mutable_data_ptr()),
                   acc.stride(0), acc.stride(1),
                   true,          nullptr};
  multiply(kernel_for(a.matrix.dtype), {a.matrix, b.matrix, k, std::move(scales), result});
}

MaybeTensor torchs_product(const Tensor& a, const Tensor& b, const MaybeTensor& bias,
                           ScalarType out_type) {
  if (!products_are_torchs() || out_type != ScalarType::BFloat16) return {};
  int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  bool fits =
      a.scalar_type() == out_type && b.scalar_type() == out_type &&
      (!bias || (bias->scalar_type() == out_type && bias->dim() == 1 && bias->numel() == n));
  // Below, the time is that of a call, and of tiles of 16 x 32 elements that are not full.
  if (!fits || std::min({m, n, k}) < 32 || m * n * k < kTorchsSize) return {};
  int64_t shape[] = {m, n};
  Tensor out = empty({shape, 2}, out_type);
  // The variant with out=, which torch.autocast leaves alone.
  std::array<StableIValue, 4> stack = {
      torch::stable::detail::from(a),
      torch::stable::detail::from(torch::stable::transpose(b, 0, 1)),
      torch::stable::detail::from(bias), torch::stable::detail::from(out)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// a [M, K], b [K, N], bias [N] -> [M, N]; scales of a: one element, [M, 1], [M, ceil(K/128)] or
// [ceil(M/128), ceil(K/128)]; scales of b: the transposes of these
Tensor gemm(Tensor a, Tensor b, MaybeTensor a_scale_inv, MaybeTensor b_scale_inv, MaybeTensor bias,
            ScalarType out_type, bool /*fast_accum: a CPU has no shorter accumulator*/) {
  check_operands(a, b, "gemm");
  if (!a_scale_inv && !b_scale_inv) {
    if (MaybeTensor y = torchs_product(a, b, bias, out_type)) return *y;
  }
  auto [of_a, of_b] = sides(a, b, a_scale_inv, b_scale_inv, "gemm");
  int64_t shape[] = {a.size(0), b.size(1)};
  return product(of_a, of_b, a.size(1), {shape, 2}, out_type, bias, "gemm");
}

// acc [M, N] fp32 += a [M, K] @ b [K, N]
void gemm_accumulate_(Tensor acc, Tensor a, Tensor b, MaybeTensor a_scale_inv,
                      MaybeTensor b_scale_inv) {
  const char* op = "gemm_accumulate_";
  check_operands(a, b, op);
  check_accumulator(acc, {a.size(0), b.size(1)}, a, b, a_scale_inv, b_scale_inv, op);
  auto [of_a, of_b] = sides(a, b, a_scale_inv, b_scale_inv, op);
  add_product(acc, of_a, of_b, a.size(1));
}

// The pairs of simd/tensor_core_loops.h, K filled up to a multiple of 64 with 0. exponents: int32
// [rows, K / size], or none; size 16: of numbers * 2^-exponent.
Matrix pairs_of(const Matrix& x, int64_t k, const int32_t* exponents, int64_t size,
                Scratch& scratch) {
  int64_t padded = ceil_div(k, 64) * 64;
  float* pairs = static_cast<float*>(scratch.get(x.rows * padded * 8 + 64));
  with_low(x.dtype, [&]<class T>(Type<T>) {
    for_each(x.rows, padded, [&](int64_t row) {
      const T* from = static_cast<const T*>(x.data) + row * x.stride_i;
      for (int64_t i = row * padded, end = i + padded; i < end; ++i, from += x.stride_k) {
        int32_t exponent = exponents == nullptr ? min_exponent(x.dtype) : exponents[i / size];
        float value = end - i > padded - k ? decode(*from) : 0.0f;
        pairs[2 * i] = size == 16 ? std::ldexp(value, -exponent) : value;
        pairs[2 * i + 1] = bits_float(static_cast<uint32_t>(exponent));
      }
    });
  });
  return {Dtype::f32, pairs, x.rows, 2 * padded, 2};
}

// as gemm, with the products and sums of the tensor cores of `arch`, a GPU of math/tensor_core.h;
// exponents: None, or int32 of the blocks of Blackwell's block formats, decoded to bf16
Tensor gemm_simulated(Tensor a, Tensor b, MaybeTensor a_scale_inv, MaybeTensor b_scale_inv,
                      MaybeTensor bias, ScalarType out_type, bool fast_accum, Text arch,
                      MaybeTensor a_exponents, MaybeTensor b_exponents) {
  const char* op = "gemm_simulated";
  check_operands(a, b, op);
  Dtype a_dtype = dtype_of(a, op);
  Gpu gpu = enum_of<Gpu>({"v100", "a100", "ada", "hopper", "blackwell", "mi300"}, arch, op,
                         ": arch must be v100, a100, ada, hopper, blackwell or mi300");
  TensorCore core = tensor_core(gpu, a_dtype);
  STD_TORCH_CHECK(core.terms > 0, op, ": ", arch, " has no tensor core instruction for a's dtype");
  auto [of_a, of_b] = sides(a, b, a_scale_inv, b_scale_inv, op);
  int64_t k = a.size(1), padded = ceil_div(k, 64) * 64, size = 32;
  const int32_t* exponents[2] = {nullptr, nullptr};
  if (a_exponents || b_exponents) {
    for (int i = 0; i < 2; ++i) {
      MaybeTensor& e = i == 0 ? a_exponents : b_exponents;
      STD_TORCH_CHECK(e && on_cpu(*e) && e->scalar_type() == ScalarType::Int && e->dim() == 2 &&
                          gpu == Gpu::blackwell && a_dtype == Dtype::bf16,
                      op, ": exponents are wrong");
      if (i == 0 && e->size(1) * 32 != padded) size = 16;
      STD_TORCH_CHECK(e->size(0) == (i == 0 ? a.size(0) : b.size(1)) && e->size(1) * size == padded,
                      op, ": exponents must be [rows, K / 16] or [rows, K / 32]");
      e = row_major(*e);
      exponents[i] = e->const_data_ptr<int32_t>();
    }
    core = size == 16 ? kFp4 : kMx;
  }
  Scratch pairs[2];
  SimulatedKernel kernel = loops().simulated;
  kernel.core = &core;
  of_a.matrix = pairs_of(of_a.matrix, k, exponents[0], size, pairs[0]);
  of_b.matrix = pairs_of(of_b.matrix, k, exponents[1], size, pairs[1]);
  int64_t shape[] = {a.size(0), b.size(1)};
  return product_by(kernel, of_a, of_b, padded, {shape, 2}, out_type, bias, op,
                    core.promoted && !fast_accum);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("gemm", TORCH_BOX(&mixprec::cpu::gemm));
  m.impl("gemm_accumulate_", TORCH_BOX(&mixprec::cpu::gemm_accumulate_));
  m.impl("gemm_simulated", TORCH_BOX(&mixprec::cpu::gemm_simulated));
}
