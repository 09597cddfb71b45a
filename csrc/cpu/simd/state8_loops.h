// Optimizer states in 8 bits to and from fp32. Included once per instruction set, before
// step_loops.h. A range starts with a block of 256 elements, which share a scale.

template <bool is_signed>
__attribute__((noinline)) void state8_values(const uint8_t* __restrict codes,
                                             uint16_t* __restrict values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = state8_value<is_signed>(codes[i]);
}

__attribute__((noinline)) void scale_bf16(const uint16_t* __restrict x, float scale,
                                          float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = bits_float(static_cast<uint32_t>(x[i]) << 16) * scale;
}

// In two loops: the first works on 16 elements at a time. `codes` starts with a block.
template <bool is_signed>
void widen_state8(const uint8_t* codes, const float* scale, float* out, int64_t n) {
  alignas(64) uint16_t values[kState8Block];
  for (int64_t i = 0; i < n; i += kState8Block) {
    int64_t count = n - i < kState8Block ? n - i : kState8Block;
    state8_values<is_signed>(codes + i, values, count);
    scale_bf16(values, *scale++, out + i, count);
  }
}

__attribute__((noinline)) uint32_t largest_magnitude(const float* __restrict x, int64_t n) {
  int32_t largest = 0;  // as an integer: NaN is larger than Inf
  for (int64_t i = 0; i < n; ++i) {
    int32_t magnitude = static_cast<int32_t>(float_bits(x[i]) & 0x7FFFFFFFu);
    largest = largest > magnitude ? largest : magnitude;
  }
  return static_cast<uint32_t>(largest);
}

template <bool is_signed>
__attribute__((noinline)) void encode_block(const float* __restrict x,
                                            const uint16_t* __restrict bits, uint16_t offset,
                                            float inverse, uint8_t* __restrict codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = encode_state8<is_signed>(x[i], inverse, block_random(bits[i], offset));
  }
}

// offset: of the first block; those of the others are 2 apart.
template <bool is_signed>
void narrow_state8(const float* x, const uint16_t* bits, const uint16_t* offset, uint8_t* codes,
                   float* scale, int64_t n) {
  for (int64_t i = 0; i < n; i += kState8Block, ++scale, offset += 2) {
    int64_t count = n - i < kState8Block ? n - i : kState8Block;
    *scale = state8_scale(largest_magnitude(x + i, count));
    encode_block<is_signed>(x + i, bits, *offset, state8_inverse(*scale), codes + i, count);
  }
}
