// The signatures of all C++ ops. Their schemas, references and documentation are in mixprec/ops/,
// one file per op, under the same names.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"

namespace mixprec::cpu {

using TensorList = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

// x: any shape, fp32/bf16/fp16 -> fp32 []
Tensor amax(Tensor x);

// x [..., K] -> data (x's shape), data_t [K, M] (or [0, 0]), scale_inv, scale_inv_t (shapes by the
// granularity), amax []
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize(Tensor x, ScalarType dtype,
                                                            MaybeTensor scale, bool transpose,
                                                            std::string granularity,
                                                            bool power_of_two_scale);

// x [..., K]; residual of x's shape and dtype; weight, bias [K] -> the results of a cast: those of
// quantize, or of quantize_mx without tensor_scale_inv; total (x's shape, or [0] without residual),
// mean [M] (or [0]) and rstd [M], fp32
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> norm_quantize(
    Tensor x, MaybeTensor residual, MaybeTensor weight, MaybeTensor bias, double eps,
    bool subtract_mean, ScalarType dtype, MaybeTensor scale, bool transpose,
    std::string granularity, bool power_of_two_scale);

// g, x, g_total [..., K]; weight [K]; mean [M] (or [0]), rstd [M] fp32 -> dx of x's shape and
// dtype, dweight and dbias fp32 [K] (or [0])
std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor g, Tensor x, MaybeTensor weight,
                                                 Tensor mean, Tensor rstd, MaybeTensor g_total,
                                                 bool with_bias);

// x, up: any shape, of one dtype -> the results of a cast
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> act_quantize(Tensor x, MaybeTensor up,
                                                                std::string kind, ScalarType dtype,
                                                                MaybeTensor scale, bool transpose,
                                                                std::string granularity,
                                                                bool power_of_two_scale);

// g, x, up: any shape -> the results of a cast of dx, then of dup (empty without up)
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
act_backward(Tensor g, Tensor x, MaybeTensor up, std::string kind, ScalarType dtype,
             MaybeTensor scale, bool transpose, std::string granularity, bool power_of_two_scale);

// data: any shape; scale_inv: fp32, of any granularity -> data's shape
Tensor dequantize(Tensor data, Tensor scale_inv, ScalarType dtype);

// x [..., K], seed: int64 [1] -> data [..., bytes of K], data_t [K, bytes of M] (or [0, 0]),
// scale_inv [M, blocks of K], scale_inv_t [K, blocks of M] (or [0]), tensor_scale_inv [] (or [0]),
// amax []
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_mx(Tensor x, std::string fmt,
                                                                       std::string scale_mode,
                                                                       bool transpose,
                                                                       MaybeTensor seed);

// as above -> [..., columns]
Tensor dequantize_mx(Tensor data, Tensor scale_inv, MaybeTensor tensor_scale_inv, std::string fmt,
                     int64_t columns, ScalarType dtype);

// x: any shape, fp32/bf16/fp16 -> codes uint8 [ceil(n * bits / 8)], ranges bf16 [ceil(n / 128), 2]
std::tuple<Tensor, Tensor> pack(Tensor x, int64_t bits, int64_t seed, int64_t counter);

// as above -> `shape`
Tensor unpack(Tensor codes, Tensor ranges, int64_t bits, std::vector<int64_t> shape,
              ScalarType dtype);

// q [B, H, T, D], k and v [B, H_kv, S, D] -> out (q's shape), logsumexp fp32 [B, H, T]
std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, bool causal, double scale);

// g and out of q's shape; the rest as above -> the gradients of q, k and v
std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor g, Tensor q, Tensor k, Tensor v,
                                                      Tensor out, Tensor logsumexp, bool causal,
                                                      double scale);

// x [B, H, T, D], cos and sin fp32 [T, D/2] -> x's shape
Tensor rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved);

// a [M, K], b [K, N], bias [N] -> [M, N]; scales of a: one element, [M, 1], [M, ceil(K/128)] or
// [ceil(M/128), ceil(K/128)]; scales of b: the transposes of these
Tensor gemm(Tensor a, Tensor b, MaybeTensor a_scale_inv, MaybeTensor b_scale_inv, MaybeTensor bias,
            ScalarType out_dtype, bool fast_accum);

// as gemm, with the products and sums of the tensor cores of `arch`, a GPU of math/tensor_core.h
Tensor gemm_simulated(Tensor a, Tensor b, MaybeTensor a_scale_inv, MaybeTensor b_scale_inv,
                      MaybeTensor bias, ScalarType out_dtype, bool fast_accum, std::string arch);

// acc [M, N] fp32 += a [M, K] @ b [K, N]
void gemm_accumulate_(Tensor acc, Tensor a, Tensor b, MaybeTensor a_scale_inv,
                      MaybeTensor b_scale_inv);

// grads: n tensors of any shapes; inv_scale, found_inf: fp32, one element; counts: int64 [n, 4]
void unscale_(TensorList grads, Tensor inv_scale, Tensor found_inf, MaybeTensor counts);

// as above; sum_sq: fp64 [n]
void grad_stats_(TensorList grads, MaybeTensor inv_scale, Tensor found_inf, Tensor sum_sq,
                 MaybeTensor counts);

// scale, scale_inv, amax: fp32, all of the same shape
void scale_from_amax_(Tensor scale, Tensor scale_inv, Tensor amax, ScalarType dtype, int64_t margin,
                      bool power_of_two);

// scale: fp32, one element -> the same shape
Tensor inv_scale(Tensor scale);

// sum_sq: fp64, any shape -> fp32 []
Tensor clip_coef(Tensor sum_sq, double max_norm);

// one element each: scale, found_inf and underflow fp32, the trackers int32; counters: int64 [3]
void update_scale_(Tensor scale, Tensor growth_tracker, Tensor hysteresis_tracker, Tensor counters,
                   Tensor found_inf, MaybeTensor underflow, double growth_factor,
                   double backoff_factor, int64_t growth_interval, double min_scale,
                   double max_scale, int64_t hysteresis, double grow_on_underflow);

// lists of n: amax_histories [L], scales and amaxes one element, all fp32; fmt_max: n numbers
void update_delayed_scales_(TensorList amax_histories, TensorList scales, TensorList amaxes,
                            std::vector<double> fmt_max, int64_t margin, bool power_of_two,
                            bool most_recent);

}  // namespace mixprec::cpu
