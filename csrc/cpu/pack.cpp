// pack and unpack.
#include "arguments/casts.h"
#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

static_assert(kPiece % kPackGroup == 0);
constexpr int64_t kStreamed = 1 << 20;  // bytes; smaller results should stay in the caches

PackArrays arrays_of(Dtype dtype, int64_t bits, const Tensor& codes, const Tensor& ranges) {
  PackArrays arrays = {};
  arrays.dtype = dtype, arrays.bits = bits;
  arrays.codes = bytes_of(codes);
  arrays.ranges = reinterpret_cast<Bf16*>(bytes_of(ranges));
  return arrays;
}

}  // namespace

// x: any shape, fp32/bf16/fp16; offset: int64 [1] -> codes uint8 [ceil(n * bits / 8)],
// ranges bf16 [ceil(n / 128), 2]
std::tuple<Tensor, Tensor> pack(Tensor x, int64_t bits, int64_t seed, int64_t counter,
                                MaybeTensor offset) {
  Dtype dtype = float_dtype(x, "pack: x");
  check_bits(bits, "pack");
  const int64_t* added = check_offset(offset, x);
  uint64_t count = static_cast<uint64_t>(counter);
  if (added != nullptr) count += static_cast<uint64_t>(*added);
  x = row_major(x);
  int64_t n = x.numel();
  Tensor codes = empty({packed_bytes(n, bits)}, ScalarType::Byte);
  Tensor ranges = empty({packed_groups(n), 2}, ScalarType::BFloat16);
  PackArrays arrays = arrays_of(dtype, bits, codes, ranges);
  arrays.seed = static_cast<uint64_t>(seed), arrays.counter = count;
  arrays.x = x.const_data_ptr();
  for_ranges(n, kPiece, [&](int64_t i, int64_t count) { loops().pack(arrays, i, i + count); });
  return {codes, ranges};
}

// as above -> `shape`
Tensor unpack(Tensor codes, Tensor ranges, int64_t bits, std::vector<int64_t> shape,
              ScalarType type) {
  Dtype dtype = float_dtype(type, "unpack: dtype");
  int64_t n = check_packed(codes, ranges, bits, shape);
  codes = row_major(codes);
  ranges = row_major(ranges);
  Tensor y = empty(shape, type);
  PackArrays arrays = arrays_of(dtype, bits, codes, ranges);
  arrays.y = y.mutable_data_ptr();
  arrays.streams = n * element_size(dtype) >= kStreamed;
  for_ranges(n, kPiece, [&](int64_t i, int64_t count) { loops().unpack(arrays, i, i + count); });
  return y;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("pack", TORCH_BOX(&mixprec::cpu::pack));
  m.impl("unpack", TORCH_BOX(&mixprec::cpu::unpack));
}
