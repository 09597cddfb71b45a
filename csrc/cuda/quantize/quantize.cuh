// quantize on the GPU: which kernels run for which granularity. Scratch memory need not be cleared.
#pragma once

#include "cuda/quantize/quantize_rows.cuh"
#include "cuda/quantize/quantize_tensor.cuh"
#include "cuda/quantize/quantize_tiles.cuh"
#include "cuda/quantize_mx/quantize_mx.cuh"

namespace mixprec::cuda {

// mx: of the fused ops only.
enum class Granularity : int32_t { tensor, row, block1x128, block128x128, mx };

struct Quantize {
  Dtype q_dtype;
  Granularity granularity;
  void* q;    // [rows, cols], row-major
  void* q_t;  // [cols, rows], if `transpose`
  int64_t rows, cols;
  bool transpose, power_of_two_scale;
  const float* scale;              // null or pointing at 0: not given; "tensor" only
  float *scale_inv, *scale_inv_t;  // mx: codes, a byte each
  float* amax;                     // null: not wanted; it is by_lines()
  uint32_t* scratch;               // [scratch_words]
  float* record = nullptr;         // see TensorScale

  int64_t down() const { return (rows + kTile - 1) / kTile; }
  int64_t across() const { return (cols + kTile - 1) / kTile; }
  bool is_fp8() const { return q_dtype == Dtype::e4m3 || q_dtype == Dtype::e5m2; }
  bool by_lines() const { return granularity == Granularity::row && transpose; }
  float fmt_max() const { return is_fp8() ? format_max(q_dtype) : 0.0f; }  // 0: a scale of 1
  CastByParts by_parts() const { return {rows, cols, fmt_max(), power_of_two_scale}; }
  uint32_t* partials() const { return scratch; }
};

// The maxima of the blocks, and for rows with transpose the maxima of the rows and columns of the
// tiles and the resulting scales.
inline int64_t scratch_words(const Quantize& a, const Gpu& gpu) {
  int64_t words = partials_for(gpu);
  if (a.by_lines()) words += a.rows * (a.across() + 1) + a.cols * (a.down() + 1);
  return words;
}

// The casts of the outputs of a source, which differ in the pointers only.
template <class Source>
using Casts = PerOutput<Source, Quantize>;

// f(cast) for each output that is wanted
template <class Source, class F>
auto of_casts(const Source& source, const Casts<Source>& casts, const F& f) {
  PerOutput<Source, decltype(f(casts.of[0]))> result = {};
  for (int k = 0; k < source.outputs(); ++k) result.of[k] = f(casts.of[k]);
  return result;
}

// As many arrays as a launch works on, with one scale each: a launch that finds the maxima, if a
// scale is to come from them, the cast, and a tiny launch where the cast finds an amax that is
// wanted.
template <class Q, class Source, int arrays>
cudaError_t quantize_tensors(const Source (&sources)[arrays], const Casts<Source> (&casts)[arrays],
                             const Gpu& gpu) {
  static_assert(arrays <= kArrays<Source>);
  bool is_fp8 = casts[0].of[0].is_fp8(), transpose = false;
  for (const Casts<Source>& cast : casts) transpose |= cast.of[0].transpose;
  int searched[arrays] = {};
  if constexpr (Source::kSearched) {
    searched[0] = static_cast<int>(sources[0].searched_blocks);
  } else {
    Arrays<Source, AmaxOf<Source>> to_search = {};
    int wanted = 0;
    for (int i = 0; i < arrays; ++i) {
      bool given = true;
      for (int k = 0; k < sources[i].outputs(); ++k) given &= casts[i].of[k].scale != nullptr;
      if (!is_fp8 || given) continue;
      int64_t count = casts[i].of[0].rows * casts[i].of[0].cols;
      auto partials = [](const Quantize& a) { return a.partials(); };
      searched[i] = static_cast<int>(amax_grid<Source>(count, gpu));
      to_search.blocks[wanted] = searched[i];
      to_search.of[wanted++] = {sources[i], count, of_casts(sources[i], casts[i], partials)};
    }
    if (wanted > 0) {
      cudaError_t error =
          launch(amax_kernel<Source>, {to_search.all_blocks()}, gpu.stream, to_search);
      if (error != cudaSuccess) return error;
    }
  }
  auto* kernel = quantize_kernel<Source, Q>;
  if constexpr (sizeof(Q) < 4) {
    if (transpose) kernel = quantize_transpose_kernel<Source, Q>;
  }
  Arrays<Source, TensorCast<Source, Q>> all = {};
  for (int i = 0; i < arrays; ++i) {
    const Quantize& a = casts[i].of[0];
    auto out = [&](const Quantize& a) {
      return TensorOut<Q>{static_cast<Q*>(a.q),
                          static_cast<Q*>(a.transpose ? a.q_t : nullptr),
                          {a.scale, a.fmt_max(), a.power_of_two_scale, a.partials(), searched[i],
                           a.scale_inv, a.amax, a.record}};
    };
    bool is_done = Source::kSearched && !is_fp8 && !transpose;  // by the launch before
    int64_t rows = is_done ? 0 : a.rows, pieces = rows * a.cols / kVector<Q> / kThreads;
    if constexpr (sizeof(Q) < 4) {
      constexpr int64_t side = QuantizeTile<Q>::kSide;
      if (transpose) pieces = ((rows + side - 1) / side) * ((a.cols + side - 1) / side);
    }
    all.of[i] = {sources[i], rows, a.cols, of_casts(sources[i], casts[i], out)};
    all.blocks[i] = static_cast<int>(grid_for(kernel, pieces, gpu));
  }
  cudaError_t error = launch(kernel, {all.all_blocks()}, gpu.stream, all);
  for (int i = 0; i < arrays && error == cudaSuccess; ++i) {
    if (searched[i] == 0) error = finish_partials(sources[i], casts[i], all.blocks[i], gpu);
  }
  return error;
}

template <class Q, class Source>
cudaError_t quantize_tensor(const Source& source, const Casts<Source>& casts, const Gpu& gpu) {
  return quantize_tensors<Q, Source, 1>({source}, {casts}, gpu);
}

// Rows or blocks of 1 x 128. Two launches: the cast, and the reduction of the maxima of its blocks.
template <class Q, class Source>
cudaError_t quantize_rows(const Source& source, const Casts<Source>& casts, const Gpu& gpu) {
  const Quantize& a = casts.of[0];
  auto out = of_casts(source, casts, [](const Quantize& a) {
    return RowsOut<Q>{static_cast<Q*>(a.q), a.scale_inv, a.partials()};
  });
  auto run = [&](auto* kernel, int64_t pieces) {
    int64_t blocks = grid_for(kernel, pieces, gpu);
    cudaError_t error = launch(kernel, {blocks}, gpu.stream, source, a.by_parts(), out);
    return error != cudaSuccess ? error : finish_partials(source, casts, blocks, gpu);
  };
  if (a.granularity == Granularity::block1x128) {
    using Lanes = BlockLanes<Source>;
    return run(quantize_blocks_kernel<Source, Q>,
               a.rows * a.across() / (Lanes::kTogether * Lanes::kLoads));
  }
  if constexpr (!Source::kSearched) {  // which has cast the rows
    if (a.cols >= 4 * kThreads) return run(quantize_rows_kernel<Source, Q, kThreads>, a.rows);
    // One block per short row would leave most of its threads idle.
    constexpr int64_t at_once = kThreads / kWarp;
    return run(quantize_rows_kernel<Source, Q, kWarp>, (a.rows + at_once - 1) / at_once);
  }
  return cudaErrorInvalidValue;
}

// Blocks: two launches, as above. Rows and columns: three, the maxima, the scales, the cast.
template <class Q, class Source>
cudaError_t quantize_tiles(const Source& source, const Casts<Source>& casts, const Gpu& gpu) {
  const Quantize& a = casts.of[0];
  int outputs = source.outputs();
  int64_t tiles = a.down() * a.across();
  auto out = of_casts(source, casts, [&](const Quantize& a) {
    TilesOut to = {};
    to.q = a.q, to.q_t = a.transpose ? a.q_t : nullptr;
    to.scale_inv = a.scale_inv, to.scale_inv_t = a.scale_inv_t, to.partials = a.partials();
    return to;
  });
  if (!a.by_lines()) {
    auto* kernel = a.granularity == Granularity::block1x128
                       ? quantize_tiles_kernel<Source, Q, TileScales::lines>
                       : quantize_tiles_kernel<Source, Q, TileScales::squares>;
    int64_t blocks = grid_for(kernel, tiles, gpu);
    cudaError_t error = launch(kernel, {blocks * outputs}, gpu.stream, source, a.by_parts(), out);
    return error != cudaSuccess ? error : finish_partials(source, casts, blocks, gpu);
  }
  PerOutput<Source, TileMaxima> maxima = {};
  LineScales lines = {{}, {}, maxima_of(source, casts)};
  for (int k = 0; k < outputs; ++k) {
    const Quantize& cast = casts.of[k];
    uint32_t* partials = cast.partials();
    uint32_t* row_max = partials + partials_for(gpu);
    uint32_t* col_max = row_max + a.rows * a.across();
    float* row_scale = reinterpret_cast<float*>(col_max + a.cols * a.down());
    float* col_scale = row_scale + a.rows;
    maxima.of[k] = {row_max, col_max, partials};
    lines.rows[k] = {row_max, a.across(), a.rows, row_scale, cast.scale_inv};
    lines.cols[k] = {col_max, a.down(), a.cols, col_scale, cast.scale_inv_t};
    out.of[k].row_scale = row_scale;
    out.of[k].col_scale = col_scale;
    out.of[k].amax = cast.amax;
  }
  int64_t blocks = grid_for(tile_maxima_kernel<Source>, tiles, gpu);
  cudaError_t error = launch(tile_maxima_kernel<Source>, {blocks * outputs}, gpu.stream, source,
                             a.rows, a.cols, maxima);
  if (error != cudaSuccess) return error;
  int64_t threads = std::max<int64_t>(1, a.rows + a.cols);
  error = launch(line_scales_kernel, {(threads + kThreads - 1) / kThreads * outputs}, gpu.stream,
                 lines, outputs, a.by_parts(), blocks);
  if (error != cudaSuccess) return error;
  auto* kernel = quantize_tiles_kernel<Source, Q, TileScales::known>;
  return launch(kernel, {grid_for(kernel, tiles, gpu) * outputs}, gpu.stream, source, a.by_parts(),
                out);
}

// MX, of what a fused op computes.
inline QuantizeMx mx_cast(const Quantize& a) {
  BlockFormat format = a.q_dtype == Dtype::e4m3 ? BlockFormat::mxfp8_e4m3 : BlockFormat::mxfp8_e5m2;
  auto lines = [](void* q, float* scale_inv, int64_t lines, int64_t length, Stream stream) {
    return MxLines{static_cast<uint8_t*>(q), reinterpret_cast<uint8_t*>(scale_inv), lines, length,
                   stream};
  };
  return {format,
          scale_rule(format, ScaleMode::rceil, 0.0f, false),
          lines(a.q, a.scale_inv, a.rows, a.cols, kParamStream),
          lines(a.q_t, a.scale_inv_t, a.cols, a.rows, kFirstStateStream),
          a.transpose,
          false,
          nullptr,
          a.amax,
          nullptr,
          a.scratch};
}

// Also for empty x: amax 0, scales 1. Granularities other than tensor: fp8 only.
template <class Source>
cudaError_t quantize_from(const Source& source, const Casts<Source>& casts, const Gpu& gpu) {
  const Quantize& a = casts.of[0];
  if constexpr (Source::kFused) {
    if (a.granularity == Granularity::mx) {
      return quantize_mx_from(source, of_casts(source, casts, mx_cast), gpu);
    }
    if (a.q_dtype == Dtype::f32) return quantize_tensor<float>(source, casts, gpu);
  }
  return with_low(a.q_dtype, [&]<class Q>(Type<Q>) {
    if (a.granularity == Granularity::tensor) return quantize_tensor<Q>(source, casts, gpu);
    if constexpr (sizeof(Q) == 1) {
      bool by_rows = a.granularity != Granularity::block128x128 && !a.transpose;
      return by_rows ? quantize_rows<Q>(source, casts, gpu) : quantize_tiles<Q>(source, casts, gpu);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace mixprec::cuda
