// pack and unpack on CUDA tensors.
#include <tuple>

#include "arguments/casts.h"
#include "cuda/common/on_device.h"
#include "cuda/pack/pack.cuh"

namespace mixprec::cuda {

namespace {

std::tuple<Tensor, Tensor> pack_op(Tensor x, int64_t bits, int64_t seed, int64_t counter,
                                   MaybeTensor offset) {
  Dtype dtype = float_dtype(x, "pack: x");
  check_bits(bits, "pack");
  PackRandom random = {static_cast<uint64_t>(seed), static_cast<uint64_t>(counter),
                       check_offset(offset, x)};
  OnDevice device(x);
  x = row_major(x);
  int64_t n = x.numel();
  Tensor codes = empty_on(x, {packed_bytes(n, bits)}, ScalarType::Byte);
  Tensor ranges = empty_on(x, {packed_groups(n), 2}, ScalarType::BFloat16);
  check_launch(
      pack(dtype, bits, x.const_data_ptr(), static_cast<uint8_t*>(codes.mutable_data_ptr()),
           static_cast<Bf16*>(ranges.mutable_data_ptr()), n, random, device),
      "pack");
  return {codes, ranges};
}

Tensor unpack_op(Tensor codes, Tensor ranges, int64_t bits, std::vector<int64_t> shape,
                 ScalarType type) {
  Dtype dtype = float_dtype(type, "unpack: dtype");
  int64_t n = check_packed(codes, ranges, bits, shape);
  OnDevice device(codes);
  codes = row_major(codes);
  ranges = row_major(ranges);
  Tensor y = empty_on(codes, shape, type);
  check_launch(
      unpack(dtype, bits, static_cast<const uint8_t*>(codes.const_data_ptr()),
             static_cast<const Bf16*>(ranges.const_data_ptr()), y.mutable_data_ptr(), n, device),
      "unpack");
  return y;
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("pack", TORCH_BOX(&mixprec::cuda::pack_op));
  m.impl("unpack", TORCH_BOX(&mixprec::cuda::unpack_op));
}
