// The planner of the Hopper GEMM for the tests beside this file. It needs no GPU and no CUDA.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/gemm/config/gemm_layout.h"
#include "cuda/gemm/config/gemm_plan_text.h"

namespace mixprec {

namespace py = pybind11;
using namespace cuda;
using namespace cuda::sm90;

namespace {

// Every readable field by its name.
void bind_problem(py::module_& m) {
  py::enum_<Dtype>(m, "Dtype")
      .value("f32", Dtype::f32)
      .value("bf16", Dtype::bf16)
      .value("f16", Dtype::f16)
      .value("e4m3", Dtype::e4m3)
      .value("e5m2", Dtype::e5m2)
      .value("f64", Dtype::f64);
  py::enum_<Major>(m, "Major").value("k", Major::k).value("mn", Major::mn);
  py::enum_<Granularity>(m, "Granularity")
      .value("tensor", Granularity::tensor)
      .value("row", Granularity::row)
      .value("block1x128", Granularity::block1x128)
      .value("block128x128", Granularity::block128x128);
  py::class_<GemmProblem>(m, "GemmProblem")
      .def(py::init([](int64_t rows, int64_t n, int64_t k, Dtype a, Dtype b, Dtype out,
                       Major a_major, Major b_major, Granularity a_scale, Granularity b_scale,
                       bool fast_accum, bool accumulate, bool a_aligned, bool b_aligned,
                       bool out_aligned) {
             return GemmProblem{rows,       n,          k,         a,         b,
                                out,        a_major,    b_major,   a_scale,   b_scale,
                                fast_accum, accumulate, a_aligned, b_aligned, out_aligned};
           }),
           py::arg("m"), py::arg("n"), py::arg("k"), py::arg("a"), py::arg("b"), py::arg("out"),
           py::kw_only(), py::arg("a_major") = Major::k, py::arg("b_major") = Major::k,
           py::arg("a_scale") = Granularity::tensor, py::arg("b_scale") = Granularity::tensor,
           py::arg("fast_accum") = false, py::arg("accumulate") = false,
           py::arg("a_aligned") = true, py::arg("b_aligned") = true, py::arg("out_aligned") = true)
      .def("__repr__", [](const GemmProblem& p) { return to_string(p); });
  py::class_<DeviceProperties>(m, "DeviceProperties")
      .def(py::init([](int major, int minor, int sms, int64_t shared) {
             return DeviceProperties{major, minor, sms, shared};
           }),
           py::arg("major"), py::arg("minor"), py::arg("sms"), py::arg("shared_bytes"))
      .def("__repr__", [](const DeviceProperties& g) { return to_string(g); });
}

void bind_choices(py::module_& m) {
  py::enum_<Accumulate>(m, "Accumulate")
      .value("direct", Accumulate::direct)
      .value("promoted", Accumulate::promoted)
      .value("scaled", Accumulate::scaled);
  py::class_<TileConfig>(m, "TileConfig")
      .def_readonly("fp8", &TileConfig::fp8)
      .def_readonly("accumulate", &TileConfig::accumulate)
      .def_readonly("block_m", &TileConfig::block_m)
      .def_readonly("block_n", &TileConfig::block_n)
      .def_readonly("consumers", &TileConfig::consumers)
      .def_readonly("cluster", &TileConfig::cluster)
      .def_readonly("base", &TileConfig::base)
      .def("chunk_elements", [](const TileConfig& t) { return chunk_elements(t); })
      .def("__repr__", [](const TileConfig& t) { return to_string(t); });
  py::class_<ConfigOverride>(m, "ConfigOverride")
      .def(py::init([](int tile_config, int splits, int group) {
             return ConfigOverride{tile_config, splits, group};
           }),
           py::kw_only(), py::arg("tile_config") = -1, py::arg("splits") = 0, py::arg("group") = 0);
}

void bind_config(py::module_& m) {
  py::class_<GemmTiles>(m, "GemmTiles")
      .def(py::init([](int m_tiles, int n_tiles, int splits, int group) {
             return GemmTiles{m_tiles, n_tiles, splits, group};
           }),
           py::arg("m_tiles"), py::arg("n_tiles"), py::arg("splits"), py::arg("group"))
      .def_readonly("m_tiles", &GemmTiles::m_tiles)
      .def_readonly("n_tiles", &GemmTiles::n_tiles)
      .def_readonly("splits", &GemmTiles::splits)
      .def_readonly("group", &GemmTiles::group);
  py::class_<GemmConfig>(m, "GemmConfig")
      .def_readonly("tile_config", &GemmConfig::tile_config)
      .def_readonly("stages", &GemmConfig::stages)
      .def_readonly("tiles", &GemmConfig::tiles)
      .def_readonly("chunks_per_split", &GemmConfig::chunks_per_split)
      .def_readonly("grid", &GemmConfig::grid)
      .def_readonly("shared_bytes", &GemmConfig::shared_bytes)
      .def_readonly("workspace_bytes", &GemmConfig::workspace_bytes)
      .def_readonly("tma_store", &GemmConfig::tma_store)
      .def_readonly("clocks", &GemmConfig::clocks)
      .def("__repr__", [](const GemmConfig& c) { return to_string(c); });
}

Strided strided(uint64_t address, std::pair<int64_t, int64_t> size,
                std::pair<int64_t, int64_t> stride, int row) {
  return {address, {size.first, size.second}, {stride.first, stride.second}, row};
}

void bind_layout(py::module_& m) {
  py::class_<Strided>(m, "Strided")
      .def(py::init(&strided), py::arg("address"), py::arg("size"), py::arg("stride"),
           py::arg("row"));
  m.def(
      "arrangement_of",
      [](const Strided& x, int64_t element_bytes) {
        Arrangement found = arrangement_of(x, element_bytes);
        return std::tuple(found.major, found.pitch, found.copy);
      },
      py::arg("operand"), py::arg("element_bytes"), "(contiguous dimension, pitch, copied)");
  m.def(
      "scales_of",
      [](const Strided& s, const Strided& x) {
        using Found = std::tuple<int64_t, int64_t, int, Granularity>;
        std::optional<Scales> found = scales_of(nullptr, s, x);
        if (!found) return std::optional<Found>();
        const ScaleView& v = found->view;
        return std::optional(Found(v.row_stride, v.chunk_stride, v.row_shift, found->granularity));
      },
      py::arg("scale_inv"), py::arg("operand"),
      "(row stride, chunk stride, row shift, granularity), or None for a shape that does not fit");
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_problem(m);
  bind_choices(m);
  bind_config(m);
  bind_layout(m);
  m.attr("TILE_CONFIGS") =
      py::cast(std::vector<TileConfig>(kTileConfigs.begin(), kTileConfigs.end()));
  m.attr("MAX_WORKSPACE_BYTES") = kMaxWorkspaceBytes;
  m.def(
      "plan_gemm",
      [](const GemmProblem& p, const DeviceProperties& gpu, const ConfigOverride& forced) {
        return plan_gemm(p, gpu, forced);
      },
      py::arg("problem"), py::arg("gpu"), py::arg("forced") = ConfigOverride{},
      "The GemmConfig, or None: explain() gives the reasons.");
  m.def(
      "explain",
      [](const GemmProblem& p, const DeviceProperties& gpu, const ConfigOverride& forced) {
        return explain(p, gpu, forced);
      },
      py::arg("problem"), py::arg("gpu"), py::arg("forced") = ConfigOverride{},
      "One line per entry of TILE_CONFIGS: the plan, or the reason against it.");
  m.def(
      "tiles_in_order",
      [](const GemmTiles& tiles, int64_t first, int64_t stride) {
        std::vector<std::tuple<int, int, int>> found;
        for (int64_t i = first; i < tile_count(tiles); i += stride) {
          GemmTile t = tile_at(tiles, i);
          found.emplace_back(t.m, t.n, t.split);
        }
        return found;
      },
      py::arg("tiles"), py::arg("first") = 0, py::arg("stride") = 1,
      "(m, n, split) of the tiles that one block of a persistent grid computes.");
}

}  // namespace mixprec

PYBIND11_MODULE(gemm_plan, m) {
  m.doc() = "Which instance of the Hopper GEMM runs a problem, and how (csrc/cuda/gemm/config).";
  mixprec::bind_plan(m);
}
