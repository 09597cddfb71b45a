// The casts of a layer of experts: x and g [S, C], in groups of rows, and weight [E, N, K], with
// the scales that each group and each expert would have alone. See functional/_group_casts.py.
#pragma once

#include <cstring>

#include "cpu/gemm_grouped.h"
#include "cpu/quantize.h"
#include "layer.h"

namespace mixprec::cpu {

inline Blocks blocks_of(const RoleCast& how) {
  constexpr Blocks blocks[] = {{0, 0}, {0, 0}, {1, 0}, {1, kBlock}, {kBlock, kBlock}};
  return blocks[static_cast<int>(how.grain)];
}

// Whether the groups in the transpose of x or g begin at multiples of 128, because blocks along S
// have scales.
inline bool lies_apart(const RoleCast& how) {
  return how.grain == Grain::block1x128 || how.grain == Grain::mx;
}

inline std::vector<Group> apart(std::vector<Group> groups) {
  int64_t begin = 0;
  for (Group& group : groups) {
    group.begin = begin;
    begin += ceil_div(group.size, kBlock) * kBlock;
  }
  return groups;
}

struct GroupCast {
  RoleCast how;
  bool own_t;
  bool is_shared;  // one scale for all, `given`; 0: that of their amax
  float given;
  const int64_t* seeds;  // of the matrix and of the transpose; null: not stochastic
};

// t: of these groups of rows, of which a weight [E, N, K] has E * N. amax: that of all, in FP8.
inline CastOperand cast_groups(const Tensor& t, const std::vector<Group>& groups,
                               const GroupCast& cast, float& amax) {
  const RoleCast& how = cast.how;
  auto [rows, cols] = as_matrix(t);
  auto count = static_cast<int64_t>(groups.size());
  bool is_weight = t.dim() == 3, is_apart = !is_weight && lies_apart(how);
  Dtype from = float_dtype(t, "linear: an operand");
  const void* x = t.const_data_ptr();
  // A transpose: that of x, with all groups side by side in its rows, or those of each expert.
  std::vector<Group> places = is_apart ? apart(groups) : groups;
  int64_t rows_t = is_weight ? count * cols : cols, length = is_weight ? t.size(1) : rows;
  if (is_apart) length = (rows + (kBlock - 1) * count) / kBlock * kBlock;
  auto row_t = [&](const Group& place) { return is_weight ? place.index * cols : 0; };
  auto col_t = [&](const Group& place) { return is_weight ? 0 : place.begin; };
  auto transposes = [&](int64_t last, ScalarType type) {
    Tensor out = is_weight ? empty({count, cols, last}, type) : empty({cols, last}, type);
    if (!is_weight) std::memset(bytes_of(out), 0, out.numel() * out.element_size());  // gaps
    return out;
  };

  if (how.grain == Grain::mx) {
    BlockFormat f = how.format;
    STD_TORCH_CHECK(f != BlockFormat::nvfp4, "linear: nvfp4 has a scale of all of a tensor");
    bool random = cast.seeds != nullptr;
    auto seed = [&](int i) { return random ? static_cast<uint64_t>(cast.seeds[i]) : 0; };
    BlockCastRule rule = {f, scale_rule(f, how.mode, 0.0f, random), random, seed(0), 0};
    Tensor data = empty(with_last(t, block_bytes(f, cols)), element_type(f));
    Tensor scale_inv = empty({rows, blocks_of(f, cols)}, block_scale_type(f));
    mx_by_rows(from, rule, x, rows, cols, data, scale_inv);
    if (!cast.own_t) return {{data, scale_inv, {}}, {}};
    rule.seed = seed(1);
    int64_t ld_q = block_bytes(f, length), ld_scale = blocks_of(f, length);
    Tensor data_t = transposes(ld_q, element_type(f));
    Tensor scale_inv_t = empty({rows_t, ld_scale}, block_scale_type(f));
    std::memset(bytes_of(scale_inv_t), 0, scale_inv_t.numel());
    for (int64_t e = 0; e < count; ++e) {
      mx_by_columns(from, rule, at(x, from, groups[e].begin * cols), groups[e].size, cols,
                    bytes_of(data_t) + row_t(places[e]) * ld_q,
                    bytes_of(scale_inv_t) + row_t(places[e]) * ld_scale, length, col_t(places[e]));
    }
    return {{data, scale_inv, {}}, Stored{data_t, scale_inv_t, {}}};
  }

  Dtype to = dtype_of(how.type, "linear");
  Blocks blocks = blocks_of(how);
  bool per_group = blocks.rows != 1;  // else scales are those of rows
  int64_t down = blocks.rows == kBlock ? ceil_div(length, kBlock) : 1;
  int64_t across = blocks.cols ? ceil_div(cols, kBlock) : 1, ld_scale = ceil_div(length, kBlock);
  STD_TORCH_CHECK(is_weight || blocks.rows != kBlock, "linear: squares may lie in two groups");
  Tensor data = empty(t.sizes(), how.type);
  Tensor scale_inv = cast.is_shared ? empty({}, ScalarType::Float)
                     : per_group    ? empty({count, down, across}, ScalarType::Float)
                                    : empty(with_last(t, across), ScalarType::Float);
  MaybeTensor data_t, scale_inv_t;
  if (cast.own_t) {
    data_t = transposes(length, how.type);
    scale_inv_t = blocks.cols == 0 ? empty({count, cols, 1}, ScalarType::Float)
                                   : transposes(ld_scale, ScalarType::Float);
  }
  int64_t end = groups.empty() ? 0 : groups.back().begin + groups.back().size;
  std::memset(bytes_of(data) + end * cols, 0, (rows - end) * cols);
  auto cast_group = [&](const Group& group, const Group& place) {
    BlockCast c = {from,
                   to,
                   at(x, from, group.begin * cols),
                   group.size,
                   cols,
                   cast.own_t,
                   how.power_of_two,
                   cast.given,
                   length};
    float* scale = fp32_of(scale_inv) + (per_group ? group.index * down : group.begin) * across;
    uint8_t* q_t = nullptr;
    float* scale_t = nullptr;
    if (cast.own_t) {
      q_t = bytes_of(*data_t) + row_t(place) * length + col_t(place);
      scale_t = fp32_of(*scale_inv_t);
      scale_t +=
          blocks.cols == 0 ? group.index * cols : row_t(place) * ld_scale + col_t(place) / kBlock;
    }
    return quantize_by_blocks(c, blocks, bytes_of(data) + group.begin * cols, scale, q_t, scale_t);
  };
  if (cast.is_shared) {
    amax = bits_float(cast_group({0, 0, end}, {0, 0, end}));
  } else {
    for (int64_t e = 0; e < count; ++e) cast_group(groups[e], places[e]);
  }
  CastOperand out = {{data, scale_inv, {}}, {}};
  if (cast.own_t) out.own_t = Stored{data_t, scale_inv_t, {}};
  return out;
}

}  // namespace mixprec::cpu
