// amax, quantize and dequantize.
#include <atomic>

#include "cpu/loops.h"
#include "cpu/parallel.h"
#include "math/scale.h"
#include "ops.h"

namespace mixprec::cpu {

namespace {

void raise_to(std::atomic<uint32_t>& largest, uint32_t value) {
  uint32_t seen = largest.load(std::memory_order_relaxed);
  while (value > seen && !largest.compare_exchange_weak(seen, value)) {
  }
}

uint32_t amax_bits(const Tensor& x, Dtype dtype) {
  std::atomic<uint32_t> largest{0};
  const void* data = x.const_data_ptr();
  for_pieces(x.numel(), [&](int64_t begin, int64_t end) {
    raise_to(largest, loops().amax(dtype, at(data, dtype, begin), end - begin));
  });
  return largest;
}

// x itself where its memory order does not matter or is row-major, else a row-major copy.
Tensor dense(const Tensor& x) { return is_dense(x) ? x : torch::stable::contiguous(x); }
Tensor row_major(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

Dtype check_input(const Tensor& x, const char* what) {
  Dtype dtype = dtype_of(x, what);
  STD_TORCH_CHECK(is_float(dtype) && on_cpu(x), what, " must be fp32, bf16 or fp16 on the CPU");
  return dtype;
}

}  // namespace

Tensor amax(Tensor x) {
  Dtype dtype = check_input(x, "amax: x");
  return empty_scalar(bits_float(amax_bits(dense(x), dtype)));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize(Tensor x, ScalarType type, MaybeTensor scale,
                                                    bool transpose, bool power_of_two_scale) {
  Dtype from = check_input(x, "quantize: x");
  Dtype to = dtype_of(type, "quantize: dtype");
  STD_TORCH_CHECK(to != Dtype::f32 && to != Dtype::f64,
                  "quantize: dtype must be fp8, fp16 or bf16");
  STD_TORCH_CHECK(!transpose || x.dim() >= 2,
                  "quantize: transpose needs x of 2 or more dimensions");
  float s = read_scalar(scale, 1.0f, "quantize", "scale");

  x = row_major(x);
  if (!scale.has_value() && is_fp8(to)) {
    s = scale_from_amax(bits_float(amax_bits(x, from)), format_max(to), 1.0f, power_of_two_scale,
                        1.0f);
  }
  Tensor data = empty(x.sizes(), type);
  const void* src = x.const_data_ptr();
  void* dst = data.mutable_data_ptr();
  std::atomic<uint32_t> largest{0};
  int64_t cols = transpose ? x.sizes()[x.dim() - 1] : 0;
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.sizes()[d];
  Tensor data_t = empty({cols, transpose ? rows : 0}, type);
  if (transpose) {
    void* dst_t = data_t.mutable_data_ptr();
    constexpr int64_t band = 64;  // rows at a time: a full cache line of each row of the transpose
    int64_t grain = cols == 0 ? 1 : std::max<int64_t>(1, kPiece / (band * cols));
    torch::stable::parallel_for(
        0, (rows + band - 1) / band, grain, [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            int64_t row = i * band, n = std::min(band, rows - row);
            raise_to(largest, loops().quantize_transpose(from, to, at(src, from, row * cols), s,
                                                         at(dst, to, row * cols),
                                                         at(dst_t, to, row), n, cols, rows));
          }
        });
  } else {
    for_pieces(x.numel(), [&](int64_t begin, int64_t end) {
      raise_to(largest, loops().quantize(from, to, at(src, from, begin), s, at(dst, to, begin),
                                         end - begin));
    });
  }
  return {data, data_t, empty_scalar(1.0f / s), empty_scalar(bits_float(largest))};
}

Tensor dequantize(Tensor data, Tensor scale_inv, ScalarType type) {
  Dtype from = dtype_of(data, "dequantize: data");
  Dtype to = dtype_of(type, "dequantize: dtype");
  STD_TORCH_CHECK(from != Dtype::f32 && from != Dtype::f64 && on_cpu(data),
                  "dequantize: data must be fp8, fp16 or bf16 on the CPU");
  STD_TORCH_CHECK(is_float(to), "dequantize: dtype must be fp32, bf16 or fp16");
  float s = read_scalar(scale_inv, 1.0f, "dequantize", "scale_inv");

  data = row_major(data);
  Tensor out = empty(data.sizes(), type);
  const void* src = data.const_data_ptr();
  void* dst = out.mutable_data_ptr();
  for_pieces(data.numel(), [&](int64_t begin, int64_t end) {
    loops().dequantize(from, to, at(src, from, begin), s, at(dst, to, begin), end - begin);
  });
  return out;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("amax", TORCH_BOX(&mixprec::cpu::amax));
  m.impl("quantize", TORCH_BOX(&mixprec::cpu::quantize));
  m.impl("dequantize", TORCH_BOX(&mixprec::cpu::dequantize));
}
