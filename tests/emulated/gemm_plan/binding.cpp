// The planner of the Hopper GEMM for the tests beside this file: its structs as tuples of numbers,
// which plan.py names. It needs no GPU and no CUDA.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/gemm/config/gemm_layout.h"
#include "cuda/gemm/config/gemm_plan.h"

namespace py = pybind11;
using namespace mixprec;
using namespace mixprec::cuda;
using namespace mixprec::cuda::sm90;

namespace {

// As their structs list the fields.
using Problem = std::array<int64_t, 15>;
using Gpu = std::tuple<int, int, int, int64_t>;
using Override = std::tuple<int, int, int>;
using Tiles = std::tuple<int, int, int, int>;
using Matrix = std::tuple<uint64_t, std::array<int64_t, 2>, std::array<int64_t, 2>, int>;

GemmProblem problem(const Problem& p) {
  auto dtype = [&](int i) { return static_cast<Dtype>(p[i]); };
  auto major = [&](int i) { return static_cast<Major>(p[i]); };
  auto scale = [&](int i) { return static_cast<Granularity>(p[i]); };
  return {p[0],     p[1],     p[2],       dtype(3),   dtype(4),   dtype(5),   major(6),  major(7),
          scale(8), scale(9), p[10] != 0, p[11] != 0, p[12] != 0, p[13] != 0, p[14] != 0};
}

template <class Struct, class Fields>
Struct made(const Fields& fields) {
  return std::make_from_tuple<Struct>(fields);
}

Strided strided(const Matrix& x) {
  const auto& [address, size, stride, row] = x;
  return {address, {size[0], size[1]}, {stride[0], stride[1]}, row};
}

auto fields(const TileConfig& t) {
  return std::tuple(t.fp8, static_cast<int>(t.accumulate), t.block_m, t.block_n, t.consumers,
                    t.cluster, chunk_elements(t));
}

auto fields(const GemmConfig& c) {
  const GemmTiles& t = c.tiles;
  return std::tuple(c.tile_config, c.stages, std::tuple(t.m_tiles, t.n_tiles, t.splits, t.group),
                    c.chunks_per_split, c.grid, c.shared_bytes, c.workspace_bytes, c.tma_store);
}

}  // namespace

PYBIND11_MODULE(gemm_plan, m) {
  m.attr("MAX_WORKSPACE_BYTES") = kMaxWorkspaceBytes;
  m.def("tile_configs", [] {
    std::vector<decltype(fields(kTileConfigs[0]))> all;
    for (const TileConfig& t : kTileConfigs) all.push_back(fields(t));
    return all;
  });
  m.def("size_class", [](const Problem& p) { return static_cast<int>(size_class(problem(p))); });
  m.def("family_of", [](int i) { return static_cast<int>(family_of(kTileConfigs[i])); });
  // Of these measured tiles, that for the problem; None for tiles that are refused.
  m.def("measured", [](const std::vector<int64_t>& tile_configs, const Problem& p) {
    MeasuredTiles tiles;
    bool set = tiles.set(tile_configs);
    return set ? std::optional(tiles.of(problem(p))) : std::nullopt;
  });
  // None: reasons_against() gives the reasons.
  m.def("plan_gemm", [](const Problem& p, const Gpu& gpu, const Override& forced, int measured) {
    auto found =
        plan_gemm(problem(p), made<DeviceProperties>(gpu), made<ConfigOverride>(forced), measured);
    return found ? std::optional(fields(*found)) : std::nullopt;
  });
  m.def("reasons_against", [](const Problem& p, const Gpu& gpu, const Override& forced) {
    return reasons_against(problem(p), made<DeviceProperties>(gpu), made<ConfigOverride>(forced));
  });
  // (m, n, split) of the tiles that one block of a persistent grid computes.
  auto tiles_in_order = [](const Tiles& of, int64_t first, int64_t stride) {
    std::vector<std::tuple<int, int, int>> found;
    GemmTiles tiles = made<GemmTiles>(of);
    for (int64_t i = first; i < tile_count(tiles); i += stride) {
      GemmTile t = tile_at(tiles, i);
      found.emplace_back(t.m, t.n, t.split);
    }
    return found;
  };
  m.def("tiles_in_order", tiles_in_order, py::arg(), py::arg() = 0, py::arg() = 1);
  // Contiguous dimension, pitch, copied.
  m.def("arrangement_of", [](const Matrix& x, int64_t element_bytes) {
    Arrangement found = arrangement_of(strided(x), element_bytes);
    return std::tuple(static_cast<int>(found.major), found.pitch, found.copy);
  });
  m.def("is_outer_major", [](const Matrix& scale_inv, const Matrix& operand) {
    auto* data = reinterpret_cast<const float*>(std::get<0>(scale_inv));
    auto found = scales_of(data, strided(scale_inv), strided(operand));
    return found && is_outer_major(found->view, std::get<1>(operand)[std::get<3>(operand)]);
  });
  // Row stride, chunk stride, row shift, granularity; None for a shape that does not fit.
  m.def("scales_of", [](const Matrix& scale_inv, const Matrix& operand) {
    auto found = scales_of(nullptr, strided(scale_inv), strided(operand));
    auto of = [](const Scales& s) {
      const ScaleView& v = s.view;
      return std::tuple(v.row_stride, v.chunk_stride, v.row_shift, static_cast<int>(s.granularity));
    };
    return found ? std::optional(of(*found)) : std::nullopt;
  });
}
