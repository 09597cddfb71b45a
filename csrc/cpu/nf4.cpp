// quantize_nf4 and dequantize_nf4.
#include "math/nf4.h"

#include "arguments/check.h"
#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

// The scales of a piece share one of their own.
static_assert(kPiece == kNf4Block * kNf4Nested);
constexpr DynamicMap kMap = dynamic_map();

void check_vector(const Tensor& t, ScalarType type, int64_t n, const Tensor& beside,
                  const char* name) {
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == n && t.scalar_type() == type && together(t, beside),
                  "dequantize_nf4: ", name,
                  " must be one-dimensional, of the right dtype and of the size that belongs to "
                  "shape, on the device of codes");
}

}  // namespace

// w: any shape, fp32/bf16/fp16 -> codes uint8 [ceil(n / 2)], absmax fp32 [ceil(n / 64)]
std::tuple<Tensor, Tensor> quantize_nf4(Tensor w) {
  Dtype dtype = float_dtype(w, "quantize_nf4: w");
  w = row_major(w);
  int64_t n = w.numel();
  Tensor codes = empty({nf4_bytes(n)}, ScalarType::Byte);
  Tensor absmax = empty({nf4_blocks(n)}, ScalarType::Float);
  const void* from = w.const_data_ptr();
  auto* to = static_cast<uint8_t*>(codes.mutable_data_ptr());
  float* scales = fp32_of(absmax);
  for_pieces(n, [&](int64_t begin, int64_t end) {
    loops().quantize_nf4(dtype, at(from, dtype, begin), end - begin, to + begin / 2,
                         scales + begin / kNf4Block);
  });
  return {codes, absmax};
}

// as above; or absmax uint8 [ceil(n / 64)], nested_absmax fp32 [ceil(n / 64 / 256)], offset fp32
// [] -> `shape`
Tensor dequantize_nf4(Tensor codes, Tensor absmax, MaybeTensor nested_absmax, MaybeTensor offset,
                      std::vector<int64_t> shape, ScalarType type) {
  Dtype dtype = float_dtype(type, "dequantize_nf4: dtype");
  int64_t n = 1;
  for (int64_t size : shape) {
    STD_TORCH_CHECK(size >= 0, "dequantize_nf4: shape must have no negative size");
    n *= size;
  }
  bool nested = nested_absmax.has_value();
  STD_TORCH_CHECK(nested == offset.has_value(),
                  "dequantize_nf4: nested_absmax and offset must be given both or not at all");
  check_vector(codes, ScalarType::Byte, nf4_bytes(n), codes, "codes");
  check_vector(absmax, nested ? ScalarType::Byte : ScalarType::Float, nf4_blocks(n), codes,
               "absmax");
  const float* outer = nullptr;
  float mean = 0.0f;
  if (nested) {
    check_vector(*nested_absmax, ScalarType::Float, nf4_nested(n), codes, "nested_absmax");
    mean = read_scalar(offset, 0.0f, "dequantize_nf4", "offset");
    nested_absmax = row_major(*nested_absmax);
    outer = read_fp32(*nested_absmax);
  }
  codes = row_major(codes);
  absmax = row_major(absmax);
  Tensor out = empty(shape, type);
  const auto* q = static_cast<const uint8_t*>(codes.const_data_ptr());
  const void* scales = absmax.const_data_ptr();
  void* result = out.mutable_data_ptr();
  for_pieces(n, [&](int64_t begin, int64_t end) {
    float decoded[kNf4Nested];
    const float* own = static_cast<const float*>(scales) + begin / kNf4Block;
    if (nested) {
      const uint8_t* of_piece = static_cast<const uint8_t*>(scales) + begin / kNf4Block;
      float factor = outer[begin / kPiece];
      for (int64_t i = 0; i < nf4_blocks(end - begin); ++i) {
        decoded[i] = kMap.of[of_piece[i]] * factor + mean;
      }
      own = decoded;
    }
    loops().dequantize_nf4(dtype, q + begin / 2, own, at(result, dtype, begin), end - begin);
  });
  return out;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("quantize_nf4", TORCH_BOX(&mixprec::cpu::quantize_nf4));
  m.impl("dequantize_nf4", TORCH_BOX(&mixprec::cpu::dequantize_nf4));
}
