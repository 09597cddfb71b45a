// fp32 to bf16 by AVX512-BF16. Included by loops_avx512.cpp.

// low and high, rounded as Convert<Bf16> does. The processor's conversion reads subnormal numbers
// as zero and keeps the bits of NaN: vectors with such values are rounded by integer arithmetic.
inline Words32 in_bf16(Vec low, Vec high) {
  constexpr int quiet_nan = 0x01, subnormal = 0x20, signaling_nan = 0x80;
  constexpr int others = quiet_nan | subnormal | signaling_nan;
  if ((_mm512_fpclass_ps_mask(low, others) | _mm512_fpclass_ps_mask(high, others)) == 0) {
    return (Words32)_mm512_cvtne2ps_pbh(high, low);
  }
  float numbers[32];
  store(numbers, low);
  store(numbers + 16, high);
  Words32 rounded;
  for (int i = 0; i < 32; ++i) rounded[i] = Convert<Bf16>::encode(numbers[i]).bits;
  return rounded;
}
