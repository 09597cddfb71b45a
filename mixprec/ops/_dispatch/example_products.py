"""Small inputs of matrix products, also of groups, and of attention: see example_inputs.

Operands of a GEMM are small integers, whose sums are exact in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .example_inputs import FLOATS, LOW, Arguments, integers, random, tensor

SIZES = ((48, 64, 96), (19, 23, 70))  # M, N, K
PAIRS = [(d, d) for d in LOW] + [LOW[:2]]
# Whether the stride of 1 is along M and along N.
LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]
TMA = (24, 40, 72)  # rows of 16-bit operands are multiples of 16 bytes, their sizes are not of 16


def _operands(
    device: str, shape: tuple[int, int, int], a_dtype: torch.dtype, b_dtype: torch.dtype,
    a_along_m: bool = False, b_along_n: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """a [M, K] and b [K, N], each with a stride of 1 along K, or along M or N."""
    m, n, k = shape
    a, b = integers(device, (m, k), a_dtype), integers(device, (n, k), b_dtype).t()
    return [a.t().contiguous().t() if a_along_m else a, b.contiguous() if b_along_n else b]


def _scales(device: str) -> list[torch.Tensor]:
    return [tensor(device, 0.5), tensor(device, 0.25)]


def _plain(device: str, turned: list[tuple[bool, bool]]) -> Iterator[Arguments]:
    """Operands and scales, which torch's GEMM takes if the sizes are multiples of 16; turned: the
    layouts of 16-bit operands."""
    for shape in SIZES:
        for a, b in PAIRS:
            if a.itemsize == 1:
                yield [*_operands(device, shape, a, b), *_scales(device)]
            else:
                for layout in turned:
                    yield [*_operands(device, shape, a, b, *layout), None, None]


def _blocks(device: str) -> Iterator[Arguments]:
    """Scales per block, then per row. Triton compiles a kernel for each."""
    powers = tensor(device, [1.0, 2.0, 4.0, 8.0])
    for m, n, k in ((16, 32, 144), (12, 23, 150)):
        a, b = _operands(device, (m, n, k), LOW[0], LOW[0])
        yield [a, b, powers[:2].repeat(m, 1), powers[2:, None]]
        yield [a, b, powers.repeat(m)[:m, None], powers.repeat(n)[None, :n]]


def gemm(device: str) -> Iterator[Arguments]:
    for shape in SIZES:
        bias = torch.arange(shape[1], dtype=torch.float32, device=device)
        for a, b in PAIRS:
            scaled = [*_operands(device, shape, a, b), *_scales(device)]
            yield [*scaled, bias, torch.float32, False]
    for operands in _plain(device, LAYOUTS):
        dtype = operands[0].dtype
        yield [*operands, None, torch.bfloat16 if dtype.itemsize == 1 else dtype, False]
    for dtype in LOW[2:]:
        yield [*_operands(device, TMA, dtype, dtype), None, None, None, dtype, False]
    for operands in _blocks(device):
        yield [*operands, None, torch.bfloat16, False]


def gemm_simulated(device: str) -> Iterator[Arguments]:
    for a, b in PAIRS:
        for arch in ("hopper", "blackwell", "mi300"):
            scaled = [*_operands(device, SIZES[1], a, b), *_scales(device)]
            yield [*scaled, None, torch.float32, False, arch]


def gemm_accumulate(device: str) -> Iterator[Arguments]:
    """Two layouts of 16-bit operands: the second is that of a weight's gradient."""
    by_blocks = list(_blocks(device))[::2]
    for operands in [*_plain(device, LAYOUTS[::3]), *by_blocks]:
        shape = operands[0].shape[0], operands[1].shape[1]
        yield [integers(device, shape, torch.float32), *operands]


def attention(device: str) -> Iterator[Arguments]:
    """Each query has a score of 0 for one key and -256 for others, whose weights are then 0."""
    generator = torch.Generator("cpu").manual_seed(0)
    features = torch.eye(17, 24, dtype=torch.float32, device="cpu") * 16
    for dtype in FLOATS:
        q = (16 - features).expand(2, 4, 17, 24).to(device, dtype)
        v = torch.randint(-1, 2, (2, 2, 17, 24), generator=generator, device="cpu")
        for causal in (False, True):
            k = features if causal else features.roll(5, 0)
            yield [q, k.expand(2, 2, 17, 24).to(device, dtype), v.to(device, dtype), causal, -1.0]


def attention_backward(device: str) -> Iterator[Arguments]:
    generator = torch.Generator("cpu").manual_seed(1)
    for q, k, v, causal, scale in attention(device):
        drawn = torch.randint(-1, 2, (2, *q.shape), generator=generator, device="cpu")
        logsumexp = torch.zeros(q.shape[:3], dtype=torch.float32, device=device)
        g, out = drawn.to(device, q.dtype)
        remainder = g.bfloat16() * 0.5 if q.dtype != torch.float32 else g.new_empty(0).bfloat16()
        yield [g.float() if causal else g, q, k, v, out, logsumexp, remainder, causal, scale]


CLASSES = ((32, 1040), (27, 1031))


def cross_entropy(device: str) -> Iterator[Arguments]:
    """Exponentials are 1 or 0, whose sums are exact, as are those of the logits; and any of a tile
    of one class, where nothing is summed."""
    for n, t in CLASSES:
        drawn = integers(device, (n, t), torch.float32)
        logits = (drawn > 0).float() * 258.0 - 256.0
        logits[3] = -math.inf
        rows = tensor(device, [-math.inf, 0.0, math.nan, 0.0]).repeat(n, 1)
        rows[1::2] = tensor(device, [2.0, 3.0, 2.0, -6.0])
        target = (torch.arange(n, device=device) * 37) % (2 * t) - 1
        yield [logits, target, rows, 0, 0.0]
        yield [logits, target, rows, t, 0.0]
    for n, softcap in ((256, 0.0), (255, 0.0), (256, 30.0), (255, 30.0)):
        logits, rows = random(device, 1, (n, 1)) * 16, random(device, 2, (n, 4)) * 16
        yield [logits, torch.zeros(n, dtype=torch.int64, device=device), rows, 0, softcap]


def cross_entropy_backward(device: str) -> Iterator[Arguments]:
    for n, t in CLASSES:
        logits = random(device, 1, (n, t)) * 8
        logits[7, 3], logits[-1, -1], logits[2, 2] = math.nan, -math.inf, 300.0
        logsumexp, weight = random(device, 2, (n,)) + 16, random(device, 3, (n,))
        weight[5] = 0.0
        target = (torch.arange(n, device=device) * 37) % (2 * t) - 1
        for i, dtype in enumerate(FLOATS):
            settings = (0.1, 1e-3, 30.0) if i else (0.0, 0.0, 0.0)
            yield [logits, target, logsumexp, weight, t * (i % 2), 3 * t, *settings, dtype]


POSITIONS = ((2, 3, 18, 32), (2, 3, 18, 10))  # B, T, heads of q, k and v, D


def rotary(device: str) -> Iterator[Arguments]:
    for b, t, heads, d in POSITIONS:
        packed = random(device, 1, (b, t, heads, d)).transpose(1, 2)
        by_pair, by_feature = (
            [random(device, seed, shape) for seed in (2, 3)] for shape in ((t, d // 2), (b, t, d))
        )
        for dtype in FLOATS:
            x, qkv = packed.to(dtype), packed.to(dtype).split(heads // 3, 1)
            for interleaved in (False, True):
                for tables in (by_pair, by_feature):
                    yield [x, None, None, *tables, interleaved, False]
                    yield [x, None, None, *tables, interleaved, True]
                    yield [*qkv, *tables, interleaved, True]


def rotary_in_place(device: str) -> Iterator[Arguments]:
    """Heads of a tensor that has others, too."""
    for x, k, v, *rest in rotary(device):
        if k is not None and v is not None:
            own = torch.cat((x, k, v), 1).transpose(1, 2).contiguous().transpose(1, 2)
            yield [own[:, : 2 * x.shape[1] - 1], *rest]


GROUPED_ROWS = ((48, 144, 32), (45, 143, 31))  # S, K, N
GROUPED_K = ((16, 304, 32), (15, 301, 31))  # M, S, N
POWERS = (1.0, 2.0, 0.5, 4.0)


def _powers(device: str, *shape: int) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return tensor(device, POWERS).repeat(-(-n // len(POWERS)))[:n].view(shape)


def _rows(device: str) -> Iterator[Arguments]:
    """a, b, their scales and offs, with an empty group and rows beyond the last."""
    offs = tensor(device, [3, 3, 38, 44], torch.int32)
    for s, k, n in GROUPED_ROWS:
        for a_dtype, b_dtype in PAIRS:
            a = integers(device, (s, k), a_dtype)
            b = integers(device, (4 * n, k), b_dtype).view(4, n, k).transpose(1, 2)
            yield [a, b, None, None, offs]
            yield [a, b, _powers(device, s, 1), _powers(device, 4, 1, n), offs]
        yield [a, b, _powers(device, s, 2), _powers(device, 4, 2, 1), offs]


def _k(device: str) -> Iterator[Arguments]:
    for m, s, n in GROUPED_K:
        offs = tensor(device, [128, 128, s - 4], torch.int32)
        for a_dtype, b_dtype in PAIRS:
            a, b = integers(device, (s, m), a_dtype).t(), integers(device, (s, n), b_dtype)
            yield [a, b, None, None, offs]
            yield [a, b, _powers(device, 3, m, 1), _powers(device, 3, 1, n), offs]
        yield [a, b, _powers(device, m, 3), _powers(device, 3, n), offs]


def gemm_grouped(device: str) -> Iterator[Arguments]:
    for operands in (*_rows(device), *_k(device)):
        dtype = operands[0].dtype
        yield [*operands, torch.bfloat16 if dtype.itemsize == 1 else dtype, False]


def gemm_grouped_accumulate(device: str) -> Iterator[Arguments]:
    for operands in _k(device):
        a, b, *_, offs = operands
        shape = (len(offs), a.shape[0], b.shape[1])
        yield [integers(device, shape, torch.float32), *operands]
