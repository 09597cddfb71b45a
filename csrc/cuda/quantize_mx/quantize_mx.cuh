// quantize_mx on the GPU. A block of threads has a tile of x in shared memory, which it reads along
// the rows and, for the transpose, along the columns: both alike, a run of 16 elements a thread, so
// that an NVFP4 block is of one thread and an MX block of two. The format is known at run time.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/source.cuh"
#include "cuda/quantize/tile.cuh"
#include "dispatch.h"
#include "math/mx.h"
#include "math/philox.h"

namespace mixprec::cuda {

constexpr int kMxRun = 16, kMxSide = 64;

// Lines of scales, or blocks of a line, with the padding of swizzled scales.
MIXPREC_HD int64_t padded(int64_t size, int64_t side = kSwizzleRows) {
  return swizzle_tiles(size, side) * side;
}

// Of the size of a block: 64-bit divisions by a number that is known at run time are slow.
__device__ __forceinline__ int log_block(BlockFormat f) { return f == BlockFormat::nvfp4 ? 4 : 5; }

// Tiles along rows or columns of x; those of swizzled scales cover their padding, of both
// directions.
MIXPREC_HD int64_t mx_tiles(int64_t size, bool swizzled) {
  return ((swizzled ? padded(size) : size) + kMxSide - 1) / kMxSide;
}

// x or x^T in blocks along its lines: where the results go.
struct MxLines {
  uint8_t *data, *scale_inv;
  int64_t lines, length;
  Stream stream;  // of random bits
};

struct QuantizeMx {
  BlockFormat format;
  ScaleRule rule;  // MX only: that of NVFP4 follows from amax
  MxLines rows, columns;
  bool transpose, swizzled;
  const int64_t* seed;      // null: to nearest
  float* amax;              // null: not wanted, MX only
  float* tensor_scale_inv;  // NVFP4 only
  uint32_t* scratch;        // [partials_for(gpu)]

  uint32_t* partials() const { return scratch; }
};

// The codes of y, one a byte. Where an instruction encodes FP4, the first of two bytes has both
// codes and the second one is 0.
template <class E>
__device__ __forceinline__ void encode_mx(const float (&y)[kMxRun], float factor,
                                          const int64_t* seed, const RandomStream& stream,
                                          int64_t eighth, uint8_t (&code)[kMxRun]) {
  if (seed == nullptr) {
    if constexpr (Element<E>::bits == 8) {
      E q[kMxRun];
      encode_run(y, q, [&](int) { return factor; });
#pragma unroll
      for (int j = 0; j < kMxRun; ++j) code[j] = q[j].bits;
    } else if constexpr (ptx::kConvertsFp4 && Element<E>::bits == 4) {
      float scaled[kMxRun];
#pragma unroll
      for (int j = 0; j < kMxRun; ++j) scaled[j] = y[j] * factor;
#pragma unroll
      for (int j = 0; j < kMxRun; j += 8) {
        uint32_t eight = ptx::e2m1x8(scaled + j);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          code[j + k] = k % 2 == 0 ? static_cast<uint8_t>(eight >> (4 * k)) : uint8_t{0};
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kMxRun; ++j) code[j] = encode_element<E>(y[j] * factor);
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < kMxRun / 8; ++half) {
    PhiloxWords random = random_words(stream, eighth + half);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      int at = 8 * half + j;
      code[at] = encode_element<E>(y[at] * factor, random16(random, j));
    }
  }
}

// Elements [start, start + kMxRun) of a line, zeros beyond its end; all of a warp must call it, the
// thread with the other half of an MX block in lane ^ 16. Returns the bits of the block's amax.
__device__ __forceinline__ uint32_t quantize_run(const QuantizeMx& a, const MxLines& to,
                                                 const ScaleRule& rule, float (&y)[kMxRun],
                                                 int64_t line, int64_t start) {
  uint32_t amax = largest_of(y, 0u);
  if (!rule.nvfp4) amax = Max::apply(amax, __shfl_xor_sync(kFullWarp, amax, kMxRun));
  int64_t left = line < to.lines ? to.length - start : 0;
  int log = log_block(a.format), size = 1 << log;
  int64_t across = (to.length + size - 1) >> log, block = start >> log;
  bool first = (start & (size - 1)) == 0;
  if (left <= 0) {
    bool padding = a.swizzled && line < padded(to.lines) && block < padded(across, kSwizzleBlocks);
    if (padding && first) to.scale_inv[swizzled_at(line, block, across)] = 0;
    return amax;
  }
  BlockScale scale = block_scale(amax, rule);
  if (first) {
    int64_t at = a.swizzled ? swizzled_at(line, block, across) : line * across + block;
    to.scale_inv[at] = scale.code;
  }

  bool bad = is_nonfinite_bits(amax);
#pragma unroll
  for (float& value : y) value = bad ? 0.0f : value;
  RandomStream stream = {a.seed != nullptr ? static_cast<uint64_t>(*a.seed) : 0u, 0u,
                         static_cast<uint32_t>(to.stream) << 30};
  uint8_t code[kMxRun];
  with_element(a.format, [&]<class E>(E) {
    encode_mx<E>(y, scale.factor, a.seed, stream, ((line * across << log) + start) >> 3, code);
  });
  int64_t bytes = block_bytes(a.format, to.length);
  if (is_fp4(a.format)) {
    constexpr int n = kMxRun / 2;
    uint8_t pairs[n];
#pragma unroll
    for (int j = 0; j < n; ++j) {
      pairs[j] = static_cast<uint8_t>(code[2 * j] | code[2 * j + 1] << 4);
    }
    store_run(to.data + line * bytes + start / 2, pairs, (left + 1) / 2,
              is_aligned(to.data) && bytes % n == 0);
  } else {
    store_run(to.data + line * bytes + start, code, left,
              is_aligned(to.data) && bytes % kMxRun == 0);
  }
  return amax;
}

// One tile of shared memory for all. Its rows have an odd pitch, so that 16 lines of two runs each,
// which a warp reads, are in 32 different banks in both directions; the second half of a row is
// half a load further on, so that the words that a warp stores are, too. The registers of four
// blocks an SM are enough for an array, those of the fused kernels would spill.
template <class Source>
__global__ void __launch_bounds__(kThreads, Source::kFused ? 1 : 4)
    quantize_mx_kernel(const Source source, const PerOutput<Source, QuantizeMx> casts) {
  constexpr int n = Source::kRun, half = kMxSide / 2, gap = n / 2, pitch = kMxSide + gap + 1;
  QuantizeMx a = casts.of[0];
  if constexpr (Source::kFused) {  // for which no code of other formats is compiled
    a.format = a.format == BlockFormat::mxfp8_e4m3 ? a.format : BlockFormat::mxfp8_e5m2;
    a.seed = nullptr;
    a.swizzled = false;
  }
  __shared__ float tiles_of[Source::kOutputs][kMxSide * pitch];
  ScaleRule rule = a.rule;
  if (a.format == BlockFormat::nvfp4) {
    rule = nvfp4_rule(*a.amax, a.seed != nullptr);
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.tensor_scale_inv = rule.tensor_inv;
  }
  int64_t rows = a.rows.lines, cols = a.rows.length, across = mx_tiles(cols, a.swizzled);
  int64_t tiles = mx_tiles(rows, a.swizzled) * across;
  bool vectors = source.aligned(n) && cols % n == 0;
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int line = warp % 4 * kMxRun + lane % kMxRun, first = (warp / 4 * 2 + lane / kMxRun) * kMxRun;
  uint32_t of_all[Source::kOutputs] = {};
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    TileAt at = {rows, cols, t / across * kMxSide, t % across * kMxSide};
    for (int i = threadIdx.x; i < kMxSide * kMxSide / n; i += kThreads) {
      int r = i / (kMxSide / n), c = i % (kMxSide / n) * n;
      typename Source::Element in[Source::kOutputs][n];
      at.load<n, false>(source, r, c, for_load(in), vectors);
      for_outputs(source, [&](int k) {
#pragma unroll
        for (int j = 0; j < n; ++j) {
          tiles_of[k][r * pitch + c + c / half * gap + j] = to_float(in[k][j]);
        }
      });
    }
    __syncthreads();
    int directions = 1 + a.transpose;
#pragma unroll 1
    for (int i = 0; i < directions * source.outputs(); ++i) {
      int output = Source::kOutputs == 1 ? 0 : i / directions, turned = i - output * directions;
      const MxLines to = turned ? casts.of[output].columns : casts.of[output].rows;
      int row = turned ? first : line, col = turned ? line : first;
      const float* from = tiles_of[output] + row * pitch + col + col / half * gap;
      float y[kMxRun];
#pragma unroll
      for (int j = 0; j < kMxRun; ++j) y[j] = from[turned ? j * pitch : j];
      uint32_t amax = quantize_run(a, to, rule, y, (turned ? at.col0 : at.row0) + line,
                                   (turned ? at.row0 : at.col0) + first);
#pragma unroll
      for (int k = 0; k < Source::kOutputs; ++k) {  // registers have no index
        of_all[k] = Max::apply(of_all[k], k == output ? amax : 0u);
      }
    }
    __syncthreads();
  }
  if (a.format == BlockFormat::nvfp4 || a.amax == nullptr) return;
  for_outputs(source, [&](int k) {
    uint32_t of_block = block_reduce<kThreads, Max>(of_all[k]);
    if (threadIdx.x == 0) casts.of[k].scratch[blockIdx.x] = of_block;
  });
}

// Two launches; one for NVFP4, whose amax is known, and where none is wanted. Also for empty x.
template <class Source>
cudaError_t quantize_mx_from(const Source& source, const PerOutput<Source, QuantizeMx>& casts,
                             const Gpu& gpu) {
  const QuantizeMx& a = casts.of[0];
  int64_t tiles = mx_tiles(a.rows.lines, a.swizzled) * mx_tiles(a.rows.length, a.swizzled);
  auto* kernel = quantize_mx_kernel<Source>;
  int64_t blocks = grid_for(kernel, tiles, gpu);
  cudaError_t error = launch(kernel, {blocks}, gpu.stream, source, casts);
  if (error != cudaSuccess || a.format == BlockFormat::nvfp4 || a.amax == nullptr) return error;
  return finish_partials(source, casts, blocks, gpu);
}

// x as it is; for NVFP4 one launch more, because its scales need the amax of x.
template <class X>
cudaError_t quantize_mx(const X* x, const QuantizeMx& a, const Gpu& gpu) {
  if (a.format == BlockFormat::nvfp4) {
    cudaError_t error = amax(x, a.rows.lines * a.rows.length, a.scratch, a.amax, gpu);
    if (error != cudaSuccess) return error;
  }
  return quantize_mx_from(Plain<X>{x}, {{a}}, gpu);
}

}  // namespace mixprec::cuda
