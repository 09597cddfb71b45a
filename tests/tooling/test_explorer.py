"""docs/explorer.html computes what mixprec does: its casts, blocks, tensor cores and histograms.

Its first script, which has the arithmetic, runs in V8 here; test_explorer_browser.py opens it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import independent as ind
import independent_mx
import numpy as np
import py_mini_racer
import pytest
import torch

import mixprec
from mixprec.formats import BLOCK, FORMATS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "explorer.html").read_text()
(CORE,) = re.findall(r'<script id="core">(.*?)</script>', PAGE, re.S)
# JSON has neither Inf nor NaN nor -0: numbers travel as the two halves of FP64.
TRAVEL = """
const numbers = (words) => Array.from(new Float64Array(Uint32Array.from(words).buffer));
const run = (rows, f) => JSON.stringify(
  rows.map((row) => Array.from(new Uint32Array(Float64Array.from(f(numbers(row))).buffer))));
"""
FLOATS = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
FLOATS = FLOATS.to(torch.int32).view(torch.float32)  # every pattern of bits


@pytest.fixture(scope="module")
def v8() -> Any:
    context = py_mini_racer.MiniRacer()
    context.eval(CORE + TRAVEL)
    return context


def call(v8: Any, function: str, *columns: torch.Tensor) -> torch.Tensor:
    """What a JavaScript function returns for each row of numbers, a row of FP64 numbers each."""
    rows = torch.stack([column.double() for column in columns], -1).numpy()
    words = json.dumps(rows.view(np.uint32).reshape(len(rows), -1).tolist())
    found = json.loads(v8.eval(f"run({words}, {function})"))
    return torch.from_numpy(np.array(found, np.uint32).view(np.float64))


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal, with the sign of 0; any NaN equals any other."""
    want = want.double()
    different = (got != want) | (got.signbit() != want.signbit())
    different &= ~(got.isnan() & want.isnan())
    assert not different.any(), (got[different][:5], want[different][:5])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_casts_and_bits_of_all_codes_and_random_numbers(v8: Any, fmt: mixprec.Format) -> None:
    spec = ind.BY_DTYPE[fmt.dtype]
    x = torch.cat([torch.from_numpy(ind.decode_table(spec)).float(), FLOATS])
    q = mixprec.quantize(x, fmt, scale=1.0).data
    found = call(
        v8, f"([x]) => [cast(x, FORMATS.{fmt}), code(cast(x, FORMATS.{fmt}), FORMATS.{fmt})]", x
    )
    same(found[:, 0], q.float())
    codes = q.view(torch.uint8 if fmt.bits == 8 else torch.int16).long() & ((1 << fmt.bits) - 1)
    same(found[:, 1][~q.isnan()], codes[~q.isnan()])


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_casts_to_fp32_and_tf32(v8: Any, name: str) -> None:
    bits = FLOATS.view(torch.int32).long()
    lost = 0 if name == "fp32" else 13
    half = ((1 << lost) >> 1) - 1 + ((bits >> lost) & 1) if lost else 0
    rounded = (bits + half) >> lost << lost
    want = torch.where(FLOATS.isfinite(), rounded.to(torch.int32).view(torch.float32), FLOATS)
    same(call(v8, f"([x]) => [cast(x, FORMATS.{name})]", FLOATS)[:, 0], want)


def block_of(x: torch.Tensor, largest: torch.Tensor, size: int) -> torch.Tensor:
    """A block for each number of x that begins with it and with `largest`."""
    return torch.cat([x[:, None], largest[:, None], x.new_zeros(len(x), size - 2)], 1)


@pytest.mark.parametrize("fmt", [*FORMATS[:2], *BLOCK], ids=str)
def test_elements_and_scales_of_mx(v8: Any, fmt: mixprec.Format) -> None:
    x = FLOATS.view(2, -1)
    m = torch.where(x[0].abs() > x[1].abs(), x[0].abs(), x[1].abs()).where(~x.isnan().any(0), x[1])
    q = mixprec.quantize(block_of(x[0], m, 32), fmt, granularity="mx")
    program = f"mx(x, m, FORMATS.{fmt})"
    found = call(
        v8, f"([x, m]) => {{ const r = {program}; return [r.scaleCode, r.value]; }}", x[0], m
    )
    same(found[:, 0], q.scale_inv.view(torch.uint8)[:, 0])
    same(found[:, 1], mixprec.dequantize(q, torch.float32)[:, 0])
    # All codes, in a block whose scale is 1.
    spec = {spec.name: spec for spec in (*ind.SPECS, *ind.SMALL_SPECS)}[fmt.name]
    values = torch.from_numpy(ind.decode_table(spec)).float()
    values = values[values.isfinite()]
    largest = torch.full_like(values, fmt.max)
    got = call(v8, f"([x, m]) => [{program}.element, code(x, FORMATS.{fmt})]", values, largest)
    same(got[:, 0], values)
    assert got[:, 1].tolist() == [
        code for code, value in enumerate(ind.decode_table(spec)) if np.isfinite(value)
    ]


@pytest.mark.parametrize("scale", [1.0, 2.0**-30, 2.0**100, 2.0**-140])
def test_elements_and_scales_of_nvfp4(v8: Any, scale: float) -> None:
    g = torch.Generator().manual_seed(1)
    m = torch.randn(20_000, generator=g).exp() * scale
    x = m * (2 * torch.rand(20_000, generator=g) - 1)
    q = mixprec.quantize(block_of(x, m, 16), "e2m1", granularity="nvfp4")
    amax = m.max().expand_as(m)
    program = "{ const r = nvfp4(x, m, amax); return [r.scaleCode, r.value]; }"
    found = call(v8, f"([x, m, amax]) => {program}", x, m, amax)
    same(found[:, 0], q.scale_inv.view(torch.uint8)[:, 0])
    same(found[:, 1], mixprec.dequantize(q, torch.float32)[:, 0])
    # A block whose scale rounds to 0: its codes are the largest, which count as 0.
    got = call(
        v8, "([x]) => Object.values(nvfp4(x, Math.abs(x), 1e7)).slice(1)", torch.tensor([2.0])
    )
    assert got[0, 0] == 0
    assert got[0, 2:].tolist() == [6.0, 0.0]


@pytest.mark.parametrize("spec", [ind.E2M1, ind.E4M3, ind.E5M2], ids=lambda spec: spec.name)
def test_stochastic_rounding(v8: Any, spec: ind.Spec) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(20_000, generator=g).float() * spec.max / 2
    draw = torch.randint(65536, (20_000,), generator=g)
    want = ind.decode_table(spec)[independent_mx.stochastic(x.numpy(), spec, draw.numpy())]
    found = call(v8, f"([x, d]) => [stochastic(x, FORMATS.{spec.name}, d)]", x, draw)
    same(found[:, 0], torch.from_numpy(want))


@pytest.mark.parametrize("arch", ["hopper", "blackwell"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_dot_products_of_tensor_cores(v8: Any, fmt: mixprec.Format, arch: str) -> None:
    g = torch.Generator().manual_seed(3)
    for length in (1, 31, 64, 300):
        spread = torch.randn(2, 100, length, generator=g).exp()
        a, b = (torch.randn(2, 100, length, generator=g) * spread).to(fmt.dtype)
        with mixprec.simulate(arch):
            want = torch.cat([
                mixprec.gemm(x[None], y[:, None], out_dtype=torch.float32)
                for x, y in zip(a, b, strict=True)
            ])  # fmt: skip
        program = (
            f"(xs) => [tensorCore('{arch}', xs.slice(0, {length}), xs.slice({length}), "
            f"'{fmt}').sum]"
        )
        same(call(v8, program, *a.float().T, *b.float().T), want)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_neighbours_and_what_rounds_to_a_number(v8: Any, fmt: mixprec.Format) -> None:
    values = torch.from_numpy(np.unique(ind.decode_table(ind.BY_DTYPE[fmt.dtype])))
    values = values[values.isfinite()]
    f = f"FORMATS.{fmt}"
    found = call(v8, f"([y]) => [next(y, {f}, true), next(y, {f}, false)]", values)
    same(found[:-1, 0] + 0.0, values[1:] + 0.0)  # 0 and -0 are one number
    same(found[1:, 1] + 0.0, values[:-1] + 0.0)
    program = (
        f"([y]) => {{ const r = interval(y, {f}), at = (v) => cast(v, {f}) === y; "
        "const inside = (v, to) => v + (to - v) * 2 ** -20; return [r.closed, "
        "at(r.low), at(r.high), at(inside(r.low, y)), at(inside(r.high, y))].map(Number); }"
    )
    closed, low, high, *inside = call(v8, program, values[1:-1]).bool().T
    assert (low == closed).all()
    assert (high == closed).all()
    assert torch.stack(inside).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_saved_histogram_and_the_fates_of_its_numbers(
    v8: Any, fmt: mixprec.Format, tmp_path: Path
) -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(4)).exp() ** 4
    x = x[torch.frexp(x).mantissa < 0.999]  # FP16 ends at 65504, within an eighth of a power
    tie = fmt.smallest_subnormal / 2 if fmt.name != "bf16" else 1.0  # else within the first bin
    x[-3:] = torch.tensor([fmt.max, fmt.smallest_normal, tie])
    x[:3] = torch.tensor([0.0, torch.inf, torch.nan])
    mixprec.stats.histogram(x[None]).save(tmp_path / "h.json")
    saved = json.loads((tmp_path / "h.json").read_text())
    assert [saved[name] for name in ("numel", "zeros", "inf", "nan")] == [len(x), 1, 1, 1]
    assert sum(saved["counts"].values()) == len(x) - 3
    for k in (-20, 0, 12):
        y = x[3:] * 2.0**k
        q = mixprec.quantize(y, fmt, scale=1.0).data.float()
        zero, over = (
            (q == 0).sum(),
            (q.isinf() if not fmt.saturates else y > fmt.max).sum(),
        )
        subnormal = ((y < fmt.smallest_normal) & (q != 0)).sum()
        found = json.loads(
            v8.eval(f"JSON.stringify(fates({json.dumps(saved['counts'])}, {k}, FORMATS.{fmt}))")
        )
        wanted = {"zero": zero, "subnormal": subnormal, "over": over}
        assert {name: found[name] for name in wanted} == {k: int(v) for k, v in wanted.items()}


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.1", 0.1), ("-3e-5", -3e-5), ("2^-14", 2.0**-14), ("-3*2^4", -48.0), ("inf", torch.inf)],
)
def test_numbers_as_they_are_typed(v8: Any, text: str, value: float) -> None:
    same(call(v8, f"([x]) => [parse('{text}')]", torch.zeros(1))[0], torch.tensor([value]))
    assert all(
        v8.eval(f"parse('{wrong}')") is None for wrong in ("", "1.2.3", "0x1", "e5", "2^", ".*2^3")
    )


def test_a_histogram_of_what_is_no_tensor_of_numbers_is_refused() -> None:
    assert mixprec.stats.histogram(torch.ones(2, 3)).counts == {127 << 4: 6}
    assert mixprec.stats.histogram(torch.ones(0)).counts == {}
    with torch.device("meta"):
        assert mixprec.stats.histogram(torch.full((2,), 1.1, device="cpu")).counts == {2033: 2}
    numbers = torch.ones(1 << 22).bfloat16().repeat(2)[:-1]
    assert mixprec.stats.histogram(numbers[::1].requires_grad_()).counts == {127 << 4: 2**23 - 1}
    for wrong, said in (
        (torch.ones(2, dtype=torch.long), "got Tensor torch.int64"),
        (torch.ones(2, device="meta"), "got Tensor torch.float32"),
        (torch.ones(2, 2).to_sparse(), "got Tensor"),
        (np.ones(2), "got ndarray"),
    ):
        with pytest.raises(TypeError, match=f"histogram: tensor must be a dense .*{said}$"):
            mixprec.stats.histogram(wrong)
