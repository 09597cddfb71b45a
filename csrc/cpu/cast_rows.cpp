// Casts of rows that a function computes.
#include "cpu/quantize.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

constexpr Blocks kMxBlock = {1, 32};
constexpr int64_t kLine = 64;       // rows: full cache lines of each row of an fp8 transpose
constexpr int64_t kMxColumns = 32;  // of quantize_mx_columns at once
constexpr int64_t kBand = 4096;     // elements: 16 KB of values stay in the L1 cache
// Elements of a tensor whose values are kept while its amax is searched for. Those of a larger one,
// which no cache holds, are computed once more.
constexpr int64_t kKept = 4 << 20;

struct Output {
  Tensor data, data_t, scale_inv, scale_inv_t;
  Tensor values;  // those that are a result, or are cast as a whole
  float* kept = nullptr;
  float scale = 1.0f;
  std::atomic<uint32_t> largest{0};
};

struct Job {
  Dtype to;
  Blocks blocks;
  const Cast& cast;
  int64_t rows, cols;
  std::vector<Output> outputs;

  bool is_mx() const { return blocks.cols == kMxBlock.cols; }
};

void keep(Output& out, const Tensor& values) {
  out.values = values;
  out.kept = fp32_of(values);
}

// f(output, its values, first row, rows) for bands of rows, on all threads.
template <class F>
void for_produced(Job& job, const Produce& produce, bool again, const F& f) {
  size_t count = job.outputs.size();
  int64_t rows_of_band = kBand / std::max<int64_t>(1, job.cols);
  int64_t height = job.cast.transpose ? kLine : std::max<int64_t>(1, rows_of_band);
  bool kept = job.outputs[0].kept != nullptr;
  for_ranges(job.rows, height, [&](int64_t first, int64_t rows) {
    static thread_local Scratch scratch;  // in whole cache lines, as vectors are stored
    float* values[2] = {};
    for (size_t i = 0; i < count; ++i) {
      int64_t n = height * job.cols;
      values[i] = kept ? job.outputs[i].kept + first * job.cols
                       : static_cast<float*>(scratch.get(count * n * 4)) + i * n;
    }
    if (!again || !kept) produce(first, rows, values, again);
    for (size_t i = 0; i < count; ++i) f(job.outputs[i], values[i], first, rows);
  });
}

// A band in blocks of MX; returns the amax. A band of a transpose starts at the start of a block.
uint32_t cast_mx(const Job& job, Output& out, const float* values, int64_t first, int64_t rows) {
  BlockFormat format = job.to == Dtype::e4m3 ? BlockFormat::mxfp8_e4m3 : BlockFormat::mxfp8_e5m2;
  BlockCastRule rule = {format, scale_rule(format, ScaleMode::rceil, 0.0f, false), false, 0, 0};
  int64_t cols = job.cols, across = blocks_of(format, cols);
  uint32_t largest = 0;
  for (int64_t row = 0; row < rows; ++row) {
    uint32_t seen = loops().quantize_mx(Dtype::f32, rule, values + row * cols, cols, 0,
                                        bytes_of(out.data) + (first + row) * cols,
                                        bytes_of(out.scale_inv) + (first + row) * across);
    largest = std::max(largest, seen);
  }
  if (!job.cast.transpose) return largest;
  int64_t down = blocks_of(format, job.rows);
  for (int64_t col = 0; col < cols; col += kMxColumns) {
    loops().quantize_mx_columns(
        Dtype::f32, rule, values + col, cols, rows, std::min(kMxColumns, cols - col), 0, 0,
        bytes_of(out.data_t) + col * job.rows + first, job.rows,
        bytes_of(out.scale_inv_t) + col * down + first / kMxBlock.cols, down);
  }
  return largest;
}

// One band of one output; returns the amax.
uint32_t cast_band(const Job& job, Output& out, const float* values, int64_t first, int64_t rows) {
  int64_t n = rows * job.cols;
  if (job.to == Dtype::f32) return loops().amax(Dtype::f32, values, n);
  if (job.is_mx()) return cast_mx(job, out, values, first, rows);
  void* data = at(out.data.mutable_data_ptr(), job.to, first * job.cols);
  if (job.blocks.rows != 0) {
    int64_t across = job.blocks.cols ? ceil_div(job.cols, kBlock) : 1;
    float* scale_inv = fp32_of(out.scale_inv) + first * across;
    BlockCast cast = {
        Dtype::f32, job.to, values, rows, job.cols, false, job.cast.power_of_two_scale};
    return quantize_by_blocks(cast, job.blocks, data, scale_inv, nullptr, nullptr);
  }
  if (!job.cast.transpose) {
    return loops().quantize(Dtype::f32, job.to, values, out.scale, data, n);
  }
  void* data_t = at(out.data_t.mutable_data_ptr(), job.to, first);
  return loops().quantize_transpose(Dtype::f32, job.to, values, out.scale, data, data_t, rows,
                                    job.cols, job.cols, job.rows);
}

// Layouts whose scales need more than a band of rows: the values first, then quantize.
std::vector<Quantized> cast_whole(const Tensor& x, Job& job, const Produce& produce) {
  for (Output& out : job.outputs) keep(out, empty(x.sizes(), ScalarType::Float));
  for_produced(job, produce, false, [](Output&, float*, int64_t, int64_t) {});
  std::vector<Quantized> casts;
  for (Output& out : job.outputs) {
    casts.push_back(quantize(out.values, job.cast.type, std::nullopt, job.cast.transpose,
                             job.cast.granularity, job.cast.power_of_two_scale, std::nullopt));
  }
  return casts;
}

}  // namespace

std::vector<Quantized> cast_rows(const char* op, const Tensor& x, const Cast& cast, int64_t count,
                                 const Produce& produce) {
  Dtype to = check_cast(cast, x, op);
  auto [rows, cols] = as_matrix(x);
  bool is_mx = cast.granularity == "mx";
  Job job = {to,   is_mx ? kMxBlock : blocks_of(cast.granularity),
             cast, rows,
             cols, std::vector<Output>(count)};
  bool search = false;  // for the amax that is to be the scale
  for (int64_t i = 0; i < count; ++i) {
    float given = i == 0 ? read_scalar(cast.scale, 0.0f, op, "scale") : 0.0f;
    job.outputs[i].scale = given == 0.0f ? 0.0f : checked_scale(given);
    search |= is_fp8(to) && job.blocks.rows == 0 && given == 0.0f;
  }
  if (job.blocks.rows == kBlock || (job.blocks.rows != 0 && !is_mx && cast.transpose)) {
    return cast_whole(x, job, produce);
  }

  ScalarType scale_type = is_mx ? ScalarType::Byte : ScalarType::Float;
  for (Output& out : job.outputs) {
    out.data = empty(x.sizes(), cast.type);
    out.data_t = empty({cast.transpose ? cols : 0, cast.transpose ? rows : 0}, cast.type);
    if (job.blocks.rows != 0) out.scale_inv = scales_of(job.blocks, rows, cols, scale_type);
    out.scale_inv_t = is_mx && cast.transpose ? scales_of(job.blocks, cols, rows, scale_type)
                                              : empty({0}, scale_type);
    if (to == Dtype::f32) keep(out, out.data);
    if (search && x.numel() <= kKept) {
      static thread_local Scratch scratch[2];
      out.kept = static_cast<float*>(scratch[&out - &job.outputs[0]].get(x.numel() * 4));
    }
  }
  if (search) {
    for_produced(job, produce, false, [&](Output& out, float* values, int64_t, int64_t height) {
      if (out.scale == 0.0f) raise_to(out.largest, loops().amax(Dtype::f32, values, height * cols));
    });
  }
  for (Output& out : job.outputs) {
    if (out.scale != 0.0f) continue;
    out.scale = search ? scale_from_amax(bits_float(out.largest), format_max(to), 1.0f,
                                         cast.power_of_two_scale, 1.0f)
                       : 1.0f;
  }
  for_produced(job, produce, search, [&](Output& out, float* values, int64_t first, int64_t n) {
    raise_to(out.largest, cast_band(job, out, values, first, n));
  });

  std::vector<Quantized> casts;
  for (Output& out : job.outputs) {
    if (job.blocks.rows == 0) out.scale_inv = empty_scalar(1.0f / out.scale);
    const MaybeTensor& record = casts.empty() ? cast.record : std::nullopt;
    casts.emplace_back(out.data, out.data_t, out.scale_inv, out.scale_inv_t,
                       recorded(record, bits_float(out.largest)));
  }
  return casts;
}

}  // namespace mixprec::cpu
