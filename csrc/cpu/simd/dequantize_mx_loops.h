// Loops of dequantize_mx. Included once per instruction set, after those of unpack.

// exact: Bf16 holds all products, or they overflow or are NaN, which needs no rounding either.
template <bool exact, int block, class E, class O>
void decode_block(const uint8_t* __restrict codes, float scale, O* __restrict out) {
#pragma GCC unroll 1  // 16 elements would be unrolled before they could be vectorised
  for (int i = 0; i < block; ++i) {
    float value = decode_element(E{codes[i]}) * scale;
    if constexpr (exact) {
      out[i].bits = static_cast<uint16_t>(float_bits(value) >> 16);
    } else {
      out[i] = Convert<O>::encode(value);
    }
  }
}

template <int block, class E, class O>
void decode_rounded(const uint8_t* codes, float scale, bool, O* out) {
  decode_block<false, block, E>(codes, scale, out);
}
template <int block, class E>
void decode_rounded(const uint8_t* codes, float scale, bool exact, Bf16* out) {
  if (exact) {
    decode_block<true, block, E>(codes, scale, out);
  } else {
    decode_block<false, block, E>(codes, scale, out);
  }
}

template <int block, class E, class O>
void dequantize_blocks(BlockFormat format, const uint8_t* q, const uint8_t* scale_inv,
                       const float* tensor_scale_inv, O* out, int64_t n) {
  constexpr int64_t bytes = Element<E>::bits == 4 ? block / 2 : block;
  for (int64_t i = 0; i < n; i += block, q += bytes) {
    uint8_t code = *scale_inv++;
    float scale = block == 16 ? decode(E4m3{code}) : e8m0_value(code);
    // Powers of two for which the smallest elements, of 2^-16, stay normal; scales of at most 4
    // bits.
    bool exact = block == 16 ? tensor_scale_inv == nullptr : !(scale < 0x1p-110f);
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
    decode_rounded<block, E>(in, scale, exact, left < block ? last : out + i);
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
