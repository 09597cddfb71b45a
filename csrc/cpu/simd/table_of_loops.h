// The table of the loops above. Included once per instruction set, after them.

constexpr GemmKernel gemm_f32{MR, NR, 1, pack<1, MR>, pack<1, NR>, micro_f32<MR, NV>};

// gemm: the kernel for bf16 and fp8 operands. attention: that for bf16 operands.
constexpr Loops make_table(const char* isa, GemmKernel gemm, AttentionKernel attention) {
  return {
      .isa = isa,
      .amax = amax,
      .quantize = quantize,
      .quantize_transpose = quantize_transpose,
      .amax_columns = amax_columns,
      .quantize_columns = quantize_columns,
      .dequantize = dequantize,
      .act = act,
      .act_backward = act_backward,
      .wide_row = wide_row,
      .add_residual = add_residual,
      .row_statistics = row_statistics,
      .normalize = normalize,
      .norm_backward_row = norm_backward_row,
      .pack = pack,
      .unpack = unpack,
      .quantize_mx = quantize_mx,
      .quantize_mx_columns = quantize_mx_columns,
      .dequantize_mx = dequantize_mx,
      .unscale = unscale,
      .grad_stats = grad_stats,
      .adamw = step_loop<AdamW>,
      .sgd = step_loop<Sgd>,
      .lion = step_loop<Lion>,
      .muon_direction = step_loop<MuonDirection>,
      .store_row = store_row,
      .accumulate_row = accumulate_row,
      .gemm_f32 = gemm_f32,
      .gemm_bf16 = gemm,
      .attention_f32 = attention_f32::attention_kernel,
      .attention_bf16 = attention,
      .rotary = rotary,
      .simulated = simulated,
      .simulated_short = simulated_short,
  };
}
