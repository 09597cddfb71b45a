"""The variants of block formats: equal to the formulas of their sources, kernel to reference."""

from __future__ import annotations

import math

import pytest
import torch
from cases import for_each

import mixprec
from mixprec.bench.studies import four_bits
from mixprec.ops._reference.block_formats import UE5M3, decode, encode, hadamard, join, parse
from mixprec.ops.quantize_mx import quantize_mx_op

EDGES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # of E2M1, ties to even codes
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """The codes, as Transformer Engine's reference compares."""
    size = x.abs().contiguous()
    low, high = torch.bucketize(size, EDGES), torch.bucketize(size, EDGES, right=True)
    code = torch.where(low % 2 == 0, low, high)  # at an edge the two differ
    return code + 8 * (x < 0)


def transformer_engine(
    x: torch.Tensor, rows: int, per_row: bool, error: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales of NVFP4QuantizerRef, commit 0a6e0d6a: reciprocals in FP32, to nearest.

    x [M, K] of whole blocks. rows: 1 or 16 of a block; per_row: an FP32 scale for each row of x;
    error: "", or that of 4/6, "mae" or "mse", with scales up to 256.
    """
    m, k = x.shape
    largest, top = torch.tensor(3.4028234663852886e38), torch.tensor(256.0 if error else 448.0)
    six = torch.tensor(6.0)
    amax = x.abs().amax(1).view(m, 1, 1) if per_row else x.abs().max()
    squares = x.view(m // rows, rows, k // 16, 16).abs().amax((1, 3))
    block = squares.repeat_interleave(rows, 0).unsqueeze(-1)
    encode_scale = torch.min(top * six / amax, largest)
    decode_scale = 1.0 / encode_scale

    def e4m3(scale: torch.Tensor) -> torch.Tensor:
        return scale.clamp(max=448.0).to(torch.float8_e4m3fn)

    def codes(scale: torch.Tensor) -> torch.Tensor:
        by = torch.min(1.0 / (scale.float() * decode_scale), largest)
        return _e2m1((x.view(m, -1, 16) * by).clamp(-6, 6))

    if not error:
        scale = e4m3(torch.min(block * (encode_scale * torch.reciprocal(six)), largest))
        return codes(scale), scale.squeeze(-1)
    exact, found = block / six * encode_scale, []
    for scale in (e4m3(exact * 1.5), e4m3(exact)):
        code, total = codes(scale), torch.zeros(m, k // 16)
        values = VALUES[code & 7] * (1 - 2 * (code >> 3))
        for i in range(16):
            whole = values[..., i] * scale.float().squeeze(-1)
            off = whole * (amax.squeeze(-1) if per_row else amax) / (six * top)
            off = off - x.view(m, -1, 16)[..., i]
            total = total + (off * off if error == "mse" else off.abs())
        found.append((code, scale.squeeze(-1), total))
    better = found[0][2] < found[1][2]
    code = torch.where(better.unsqueeze(-1), found[0][0], found[1][0])
    return code, torch.where(better, found[0][1].float(), found[1][1].float())


SOURCES = {
    "nvfp4/nearest": (1, False, ""),
    "nvfp4/16x16/nearest": (16, False, ""),
    "nvfp4/row/nearest": (1, True, ""),
    "nvfp4/mae/max256": (1, False, "mae"),
    "nvfp4/mse/max256": (1, False, "mse"),
    "nvfp4/row/mae/max256": (1, True, "mae"),
}


def wide(rows: int, seed: int) -> torch.Tensor:
    """Numbers of N(0, 1) in bf16, with blocks of other magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1024, generator=generator)
    powers = torch.randint(-6, 7, (rows // 16, 64), generator=generator)
    spread = torch.exp2(powers.float()).repeat_interleave(16, 0).repeat_interleave(16, 1)
    return (x * spread).bfloat16().float()


def differences(granularity: str, rows: int) -> tuple[int, int]:
    """Of codes and of scales. -0 is one code with 0: Transformer Engine has it for 0 alone."""
    codes = scales = 0
    for seed in range(max(1, rows // 1024)):
        x = wide(min(rows, 1024), seed)
        q = mixprec.quantize(x, "e2m1", granularity=granularity)
        code, scale = transformer_engine(x, *SOURCES[granularity])
        ours = torch.stack([q.data & 15, q.data >> 4], -1).view(code.shape)
        codes += int(((ours != code) & (ours | code != 8)).sum())
        scales += int((q.scale_inv.float() != scale.float()).sum())
    return codes, scales


@for_each("granularity", SOURCES)
def test_casts_equal_transformer_engines(granularity: str) -> None:
    assert differences(granularity, 256) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", SOURCES)
def test_ten_million_casts_equal_transformer_engines(granularity: str) -> None:
    assert differences(granularity, 10 * 1024) == (0, 0)


@for_each("granularity, is_random, claim", [row[:3] for row in four_bits.ERRORS])
def test_errors_are_those_of_the_papers(granularity: str, is_random: bool, claim: float) -> None:
    assert four_bits.error(granularity, is_random, 1024) == pytest.approx(claim, rel=0.02)


@for_each("granularity, claims, rotates", [row[:3] for row in four_bits.AVERAGES])
def test_bits_of_averages_are_those_of_the_papers(
    granularity: str, claims: tuple[float | None, ...], rotates: bool
) -> None:
    for claim, got in zip(claims, four_bits.averages(granularity, 3, rotates), strict=False):
        assert claim is None or abs(got - claim) < 0.1


@for_each("element, mode, claim", four_bits.SATURATED)
def test_blocks_that_saturate(element: str, mode: str, claim: float) -> None:
    assert four_bits.saturated(element, mode, 100_000) == pytest.approx(claim, abs=0.5)


@for_each("name", ["mxfp4", "nvfp4-1x16", "quartet2"])
def test_gradients_have_the_right_size(name: str) -> None:
    for slope, _, _ in four_bits.slopes(name, 24).values():
        assert abs(slope - 1) < 0.004


KERNELS = (
    *("nvfp4/nearest", "nvfp4/16x16/max256/nearest", "mxfp8_e4m3/32x32", "mxfp6_e3m2/32x32"),
    *("mxfp4/32x32", "nvfp4/mae", "nvfp4/mse/max256", "nvfp4/max256/nearest/x1.0625"),
)


def awkward(m: int, k: int) -> torch.Tensor:
    x = torch.randn(m, k) * torch.exp2(torch.randint(-10, 11, (m, 1)).float())
    x[0, k // 2], x[m // 2], x[-1, 0] = math.nan, 0.0, -math.inf
    return x


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.itemsize == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@for_each("fmt", KERNELS)
def test_kernels_agree_with_the_reference(fmt: str) -> None:
    reference, kernel = quantize_mx_op.handle("reference"), quantize_mx_op.handle("cpp")
    for m, k in ((80, 112), (33, 75), (1, 17), (130, 1100)):
        for x in (awkward(m, k), awkward(m, k).nan_to_num(1.0, 1.0, 1.0) * 1e-38):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for seed in (None, torch.tensor([5])):
                    if seed is not None and parse("test", fmt).rows > 1:
                        continue
                    args = (x.to(dtype), fmt, "rceil", True, seed, m > 33, True)
                    assert all(map(equal, kernel(*args), reference(*args))), (m, k, dtype)


COMPOSED = ("nvfp4/row", "nvfp4/1x128", "nvfp4/ue5m3", "nvfp4/eden", "nvfp4/16x16/mae")


@for_each("granularity", [*COMPOSED, "nvfp4/16x16", "nvfp4/mae"])
def test_special_values(granularity: str) -> None:
    """A block that holds Inf or NaN is NaN, zeros are 0, and other blocks are numbers."""
    for m, k in ((33, 75), (1, 1), (17, 200)):
        x = awkward(m, k) if m > 1 else torch.zeros(m, k)
        rows = 16 if "16x16" in granularity else 1
        bad = torch.zeros(-(-m // rows) * rows, -(-k // 16) * 16, dtype=torch.bool)
        bad[:m, :k] = ~x.isfinite()
        blocks = bad.view(-1, rows, bad.shape[1] // 16, 16).any(3).any(1)
        expected = blocks.repeat_interleave(rows, 0).repeat_interleave(16, 1)[:m, :k]
        for seed in (None, 3):
            y = mixprec.dequantize(mixprec.quantize(x, "e2m1", granularity=granularity, seed=seed))
            assert torch.equal(y.isnan(), expected)
            assert not y.isinf().any()
            assert (y[(x == 0) & ~expected] == 0).all()


@for_each("granularity", ["nvfp4/16x16", "mx/32x32", "nvfp4/16x16/mse"])
def test_squares_are_one_cast_for_both_products(granularity: str) -> None:
    for m, k in ((64, 96), (33, 75)):
        for seed in (None, 7):
            x, fmt = torch.randn(m, k), "e2m1"
            q = mixprec.quantize(x, fmt, granularity=granularity, transpose=True, seed=seed)
            assert torch.equal(mixprec.dequantize(q).t(), mixprec.dequantize(q.transposed()))


def test_eden_keeps_the_product_with_what_it_casts() -> None:
    x = hadamard(torch.randn(64, 512), 128)
    groups, total = x.view(64, 4, 128), torch.zeros(64, 4)
    for seed in range(64):
        q = mixprec.quantize(x, "e2m1", granularity="nvfp4/eden", seed=seed)
        total += (mixprec.dequantize(q).view(64, 4, 128) * groups).sum(-1) / 64
    exact = groups.square().sum(-1)
    assert (total / exact - 1).abs().max() < 0.04
    assert abs((total.sum() / exact.sum()).item() - 1) < 0.001


def test_gemm_applies_the_scales_of_rows_and_of_blocks() -> None:
    a, b = torch.randn(40, 300), torch.randn(24, 300)
    for granularity in ("nvfp4/row", "nvfp4/1x128", "nvfp4/ue5m3"):
        q = [mixprec.quantize(t, "e2m1", granularity=granularity) for t in (a, b)]
        exact = mixprec.dequantize(q[0]).double() @ mixprec.dequantize(q[1]).double().t()
        y = mixprec.gemm(q[0], q[1].t(), out_dtype=torch.float32)
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-4)


def test_a_backend_without_a_kernel_is_an_error() -> None:
    x = torch.randn(32, 32)
    mixprec.quantize(x, "e2m1", granularity="nvfp4/eden")
    with (
        mixprec.use_backend("cpp"),
        pytest.raises(RuntimeError, match=r"^quantize_mx: cpp cannot run this call: no kernel"),
    ):
        mixprec.quantize(x, "e2m1", granularity="nvfp4/eden")
    with pytest.raises(ValueError, match="granularity"):
        mixprec.quantize(x, "e2m1", granularity=3)  # type: ignore[arg-type]


def test_the_scales_of_ue5m3() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    values = decode(codes, UE5M3)
    assert values[[0, 1, 254]].tolist() == [0.0, 2.0**-17, 114688.0]
    assert torch.equal(encode(values, UE5M3, None), codes)
    assert (values[1:] > values[:-1]).all()


def test_hadamard_is_orthogonal() -> None:
    for size in (16, 32, 64, 128):
        q = hadamard(torch.eye(size), size).double()
        torch.testing.assert_close(q @ q.t(), torch.eye(size).double(), rtol=0, atol=1e-6)


@for_each("fmt", ["nvfp4/", "nvfp4/16x16/row", "nvfp4/row/1x128", "mxfp4/mae", "nvfp4/32x32",
                  "nvfp4/eden/mse", "nvfp4/mae/mae", "nvfp4/ue5m3/row", "nvfp5/row",
                  "nvfp4/mae/x1.0625", "nvfp4/ue5m3/mse", "nvfp4/ue5m3/max256"])  # fmt: skip
def test_texts_that_say_nothing(fmt: str) -> None:
    with pytest.raises(ValueError, match=r"quantize_mx: fmt must .*got"):
        quantize_mx_op(torch.ones(16, 16), fmt, "rceil", False, None, False, False)
    with pytest.raises(ValueError, match="transpose must be False"):
        quantize_mx_op(torch.ones(16, 16), "nvfp4/row", "rceil", True, None, False, False)
    assert join(torch.tensor([[1, 2]])).item() == 33
