// Loops of dequantize_mx. Included once per instruction set, after those of unpack.

template <int block, class E, class O>
void decode_block(const uint8_t* __restrict codes, float scale, O* __restrict out) {
#pragma GCC unroll 1  // 16 elements would be unrolled before they could be vectorised
  for (int i = 0; i < block; ++i) {
    out[i] = Convert<O>::encode(decode_element(E{codes[i]}) * scale);
  }
}

template <int block, class E, class O>
void dequantize_blocks(BlockFormat format, const uint8_t* q, const uint8_t* scale_inv,
                       const float* tensor_scale_inv, O* out, int64_t n) {
  constexpr int64_t bytes = Element<E>::bits == 4 ? block / 2 : block;
  for (int64_t i = 0; i < n; i += block, q += bytes) {
    uint8_t code = *scale_inv++;
    float scale = block == 16 ? decode(E4m3{code}) : e8m0_value(code);
    if (tensor_scale_inv != nullptr) scale *= *tensor_scale_inv;
    alignas(64) uint8_t codes[block] = {}, split[block];
    alignas(64) O last[block];
    int64_t left = n - i;
    const uint8_t* in = q;
    if (left < block) {
      __builtin_memcpy(codes, q, static_cast<uint64_t>(block_bytes(format, left)));
      in = codes;
    }
    if (Element<E>::bits == 4) {
      split_codes<4>(in, split, block / 2);
      in = split;
    }
    decode_block<block, E>(in, scale, left < block ? last : out + i);
    if (left < block) __builtin_memcpy(out + i, last, static_cast<uint64_t>(left) * sizeof(O));
  }
}

void dequantize_mx(BlockFormat format, Dtype out_dtype, const uint8_t* q, const uint8_t* scale_inv,
                   const float* tensor_scale_inv, void* out, int64_t n) {
  with_float(out_dtype, [&](auto t) {
    using O = typename decltype(t)::type;
    O* result = static_cast<O*>(out);
    if (format == BlockFormat::nvfp4) {
      return dequantize_blocks<16, E2m1>(format, q, scale_inv, tensor_scale_inv, result, n);
    }
    with_element(format, [&](auto e) {
      dequantize_blocks<32, decltype(e)>(format, q, scale_inv, nullptr, result, n);
    });
  });
}
