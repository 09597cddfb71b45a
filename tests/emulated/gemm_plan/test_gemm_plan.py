"""Which instance of the Hopper GEMM runs a problem, and how: gemm_plan.h, no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated.gemm_plan import plan
from emulated.gemm_plan.plan import H200, Accumulate, Gpu, Granularity, Major, Override, plan_gemm
from emulated.shim import runner
from hypothesis import given
from hypothesis import strategies as st

from mixprec.ops._dispatch import gemm_table

F32, BF16, F16, E4M3, E5M2 = runner.DTYPES[:5]
ROWS = plan.tile_configs()
LOW = {"bf16": (BF16, BF16), "fp16": (F16, F16), "fp8": (E4M3, E5M2)}
BLOCKS = (Granularity.block1x128, Granularity.block128x128)


def problem(m: int, n: int, k: int, kind: str = "bf16", out: Any = BF16, **how: Any) -> Any:
    return plan.Problem(m, n, k, *LOW[kind], out, **how)


def row_of(block: tuple[int, int], cluster: int = 1) -> int:
    """The number of the one row for 16-bit operands with these parameters."""
    (found,) = [
        i for i, r in enumerate(ROWS)
        if not r.fp8 and (r.block_m, r.block_n, r.cluster) == (*block, cluster)
    ]  # fmt: skip
    return found


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def check(config: Any, m: int, n: int, k: int, gpu_sms: int, gpu_shared: int) -> None:
    """What must hold of every plan."""
    row, tiles = ROWS[config.tile_config], config.tiles
    height = row.block_m * row.cluster
    assert (tiles.m_tiles, tiles.n_tiles) == (ceil_div(m, height), ceil_div(n, row.block_n))
    count = tiles.m_tiles * tiles.n_tiles * tiles.splits
    assert config.grid % row.cluster == 0
    assert config.grid == min(count, gpu_sms // row.cluster) * row.cluster
    assert tiles.group >= 1

    chunks = ceil_div(k, row.chunk_elements)
    bounds = [
        (s * config.chunks_per_split, min((s + 1) * config.chunks_per_split, chunks))
        for s in range(tiles.splits)
    ]
    assert all(first < last for first, last in bounds), "a split has nothing to add up"
    assert bounds[0][0] == 0
    assert bounds[-1][1] == chunks
    assert config.workspace_bytes == (tiles.splits * m * n * 4 if tiles.splits > 1 else 0)
    assert config.workspace_bytes <= plan.compiled().MAX_WORKSPACE_BYTES

    scales = row.block_n * 4 if row.accumulate == Accumulate.scaled else 0
    stage = (row.block_m + row.block_n) * 128 + scales
    assert 2 <= config.stages <= 8
    used = config.stages * stage + row.consumers * 16384
    barriers = config.shared_bytes - used
    assert 2 * 8 * config.stages <= barriers <= 1024
    assert config.shared_bytes <= gpu_shared
    assert config.stages == 8 or config.shared_bytes + stage + 16 > gpu_shared


problems = st.fixed_dictionaries(
    {
        "m": st.one_of(st.integers(1, 700), st.integers(1, 40000)),
        "n": st.one_of(st.integers(1, 700), st.integers(1, 140000)),
        "k": st.one_of(st.integers(1, 700), st.integers(1, 40000)),
        "kind": st.sampled_from(tuple(LOW)),
        "out": st.sampled_from((F32, BF16, F16)),
        "fast_accum": st.booleans(),
        "out_aligned": st.booleans(),
    }
)
gpus = st.tuples(st.sampled_from((1, 2, 7, 78, 114, 132)), st.sampled_from((101376, 232448)))


@given(problems, gpus, st.sampled_from((None, *BLOCKS)))
def test_every_plan_holds_what_the_kernel_needs(
    how: dict[str, Any], gpu: tuple[int, int], blocks: Any
) -> None:
    if blocks is not None and how["kind"] == "fp8":
        how = how | {"b_scale": blocks}
    m, n, k = how["m"], how["n"], how["k"]
    config = plan_gemm(problem(**how), Gpu(9, 0, *gpu))
    assert config is not None
    check(config, m, n, k, *gpu)
    row = ROWS[config.tile_config]
    assert row.fp8 == (how["kind"] == "fp8")
    scaled = row.accumulate == Accumulate.scaled
    assert scaled == ("b_scale" in how)
    assert scaled or (row.accumulate == Accumulate.promoted) == (row.fp8 and not how["fast_accum"])
    assert config.tma_store == (how["out_aligned"] and config.tiles.splits == 1)
    assert plan_gemm(problem(**how), Gpu(9, 0, *gpu)) == config


@given(*[st.integers(1, n) for n in (40, 40, 6, 20, 17)])
def test_the_tile_order_is_a_permutation(
    m_tiles: int, n_tiles: int, splits: int, group: int, blocks: int
) -> None:
    tiles = plan.Tiles(m_tiles, n_tiles, splits, group)
    every = {(i, j, s) for i in range(m_tiles) for j in range(n_tiles) for s in range(splits)}
    order = plan.compiled().tiles_in_order(tiles)
    assert len(order) == len(every)
    assert set(order) == every
    shares = [plan.compiled().tiles_in_order(tiles, first, blocks) for first in range(blocks)]
    assert sorted(t for share in shares for t in share) == sorted(every)
    # Bands: a tile row comes `group` rows at a time, column by column.
    bands = [t[0] // group for t in order]
    assert bands == sorted(bands)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_every_element_is_computed_once(row: int) -> None:
    """Of ragged shapes that are small enough to count."""
    r = ROWS[row]
    for m, n, k in ((1, 1, 1), (64, 128, 64), (65, 129, 130), (300, 257, 1000), (513, 100, 300)):
        how = {"fast_accum": r.accumulate == Accumulate.direct}
        if r.accumulate == Accumulate.scaled:
            how["a_scale"] = Granularity.block1x128
        for splits in (1, 2, 3):
            wish = Override(tile_config=row, splits=splits, group=2)
            asked = problem(m, n, k, "fp8" if r.fp8 else "fp16", **how)
            config = plan_gemm(asked, Gpu(9, 0, 6, 232448), wish)
            assert config is not None, asked
            check(config, m, n, k, 6, 232448)
            assert (config.tile_config, config.tiles.group) == (row, 2)
            assert config.tiles.splits <= splits
            clusters, chunks = config.grid // r.cluster, ceil_div(k, r.chunk_elements)
            seen = np.zeros((m, n, chunks), dtype=np.int8)
            for block in range(config.grid):
                cluster, rank = divmod(block, r.cluster)
                for i, j, s in plan.compiled().tiles_in_order(config.tiles, cluster, clusters):
                    top, left = (i * r.cluster + rank) * r.block_m, j * r.block_n
                    first = s * config.chunks_per_split
                    last = first + config.chunks_per_split
                    seen[top : top + r.block_m, left : left + r.block_n, first:last] += 1
            assert (seen == 1).all(), config


# (M, N, K), operands -> tile, splits, band: the shapes of training, and odd ones. From the cost
# model alone.
NAMED = (
    ((1, 6144, 4096), "bf16", (64, 128), 1, 1),
    ((512, 6144, 4096), "bf16", (128, 192), 1, 2),
    ((2048, 4096, 14336), "bf16", (128, 256), 1, 8),
    ((16384, 28672, 4096), "fp8", (128, 192), 1, 8),
    ((128, 576, 7168), "fp8", (64, 128), 12, 2),
    ((4096, 32768, 512), "fp8", (128, 192), 1, 8),
    ((4096, 7168, 16384), "fp8", (256, 128), 1, 4),
    ((512, 512, 512), "bf16", (64, 128), 1, 8),
    ((1024, 1024, 1024), "bf16", (64, 128), 1, 16),
    ((4096, 4096, 4096), "fp16", (128, 256), 1, 8),
    ((4095, 511, 10000), "bf16", (128, 256), 2, 8),
    ((127, 4097, 12288), "bf16", (128, 128), 4, 1),
)


def test_named_shapes() -> None:
    for shape, kind, *want in NAMED:
        config = plan_gemm(problem(*shape, kind), H200)
        row = ROWS[config.tile_config]
        found = [(row.block_m, row.block_n), config.tiles.splits, config.tiles.group]
        assert found == want, (shape, kind, config)
        check(config, *shape, 132, 232448)
        if shape[0] <= 64:
            lines = plan.reasons_against(problem(*shape, kind))
            assert "at least half of each tile would lie outside of C" in lines


def test_partial_sums_stay_within_their_memory() -> None:
    m, n = 4096, 2048
    asked, tile = problem(m, n, 4096), row_of((128, 256))
    two, three = (Override(tile_config=tile, splits=splits) for splits in (2, 3))
    assert plan_gemm(asked, H200, two).workspace_bytes == 2 * m * n * 4
    assert plan_gemm(asked, H200, three) is None
    (line,) = [x for x in plan.reasons_against(asked, H200, three) if "partial" in x]
    assert line == "the partial sums of 3 splits exceed 67108864 bytes"


REFUSED = (
    ({"kind": "fp8", "a_major": Major.mn}, "a is FP8 and not contiguous along K"),
    ({"kind": "fp8", "b_major": Major.mn}, "b is FP8 and not contiguous along K"),
    ({"a_scale": Granularity.block1x128}, "scales of blocks along K are for FP8 operands"),
    ({"b_scale": Granularity.block128x128}, "scales of blocks along K are for FP8 operands"),
    ({"a_aligned": False}, "a's base or pitch is no multiple of 16 bytes"),
    ({"b_aligned": False}, "b's base or pitch is no multiple of 16 bytes"),
    ({"accumulate": True}, "only fp32 is accumulated into"),
    ({"m": 0}, "m, n or k is 0"),
    ({"k": 1 << 31}, "m, n or k does not fit into 32 bits"),
)


def test_what_no_row_can_do_is_refused_with_the_reason() -> None:
    asked = [(problem(**({"m": 256, "n": 256, "k": 256} | how)), H200, why) for how, why in REFUSED]
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        gpu = Gpu(*capability, 132, 232448)
        asked.append((problem(256, 256, 256), gpu, "the GPU is not of compute capability 9.0"))
    for types in ((BF16, F16), (BF16, E4M3), (E5M2, F16), (F32, F32)):
        why = "a and b are not both fp16, both bf16 or both FP8"
        asked.append((plan.Problem(64, 64, 64, *types, F32), H200, why))
    for it, gpu, why in asked:
        assert plan_gemm(it, gpu) is None, it
        lines = plan.reasons_against(it, gpu)
        assert lines
        assert all(line.startswith(why) for line in lines), lines


def of_row(i: int, m: int, n: int, k: int) -> Any:
    """A product of the family of a row."""
    row, how = ROWS[i], {}
    if row.accumulate == Accumulate.scaled:
        how["a_scale"] = Granularity.block1x128
    how["fast_accum"] = row.accumulate == Accumulate.direct
    return problem(m, n, k, "fp8" if row.fp8 else "bf16", **how)


SIDES = (16, 64, 128, 384, 512, 1024, 2048, 4096, 8192, 28672)


@pytest.mark.parametrize("i", range(len(ROWS)), ids=lambda i: str(ROWS[i]))
def test_every_row_is_reached_by_a_plan_and_a_measurement(i: int) -> None:
    """Each is compiled for every pair of operands and layout of its family: none in vain."""
    products = [of_row(i, m, n, 4096) for m in SIDES for n in SIDES]
    assert any(plan_gemm(asked).tile_config == i for asked in products)
    assert plan_gemm(products[-1], measured=i).tile_config == i


def test_a_measured_tile_is_taken_where_it_suits() -> None:
    bold = row_of((128, 256), cluster=2)
    large, thin = problem(8192, 8192, 8192), problem(64, 8192, 8192)
    assert plan_gemm(large, measured=bold).tile_config == bold
    assert plan_gemm(thin, measured=bold) == plan_gemm(thin), "most of it would be outside of C"
    assert plan_gemm(large, Gpu(9, 0, 1, 232448), measured=bold).tile_config != bold
    one = row_of((64, 128))
    forced = plan_gemm(large, H200, Override(tile_config=one), measured=bold)
    assert forced.tile_config == one


@given(*[st.integers(1, 9000)] * 3, st.sampled_from(tuple(LOW)))
def test_size_classes_are_those_of_the_table(m: int, n: int, k: int, kind: str) -> None:
    itemsize = LOW[kind][0].itemsize
    for shape in ((m, n, k), (m, n // 16 * 16 + 16, k // 16 * 16 + 16), (8 * m, 8 * n, 8 * k)):
        found = plan.compiled().size_class(plan.numbers(problem(*shape, kind)))
        assert gemm_table.SIZES[found] == gemm_table.size_class(*shape, itemsize), shape


def test_the_table_of_measured_tiles() -> None:
    families, sizes = gemm_table.CUDA_FAMILIES, gemm_table.SIZES
    shapes = ((64, 512, 512), (512, 515, 512), (512, 512, 512), (4096, 2048, 4096), (8192,) * 3)
    for i in range(len(ROWS)):
        family = plan.compiled().family_of(i)
        for j in range(len(shapes)):
            table = [-1] * (len(families) * len(sizes))
            table[family * len(sizes) + j] = i
            for other, asked in enumerate(shapes):
                found = plan.compiled().measured(table, plan.numbers(of_row(i, *asked)))
                assert found == (i if other == j else -1)
    asked = plan.numbers(problem(64, 64, 64))
    wrong_family = [len(ROWS) - 1] + [-1] * 19
    for refused in ([], [-1] * 19, [-2] + [-1] * 19, [len(ROWS)] + [-1] * 19, wrong_family):
        assert plan.compiled().measured(refused, asked) is None
