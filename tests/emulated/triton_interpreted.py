"""The Triton kernels in Triton's interpreter, bit for bit against the references.

test_triton.py runs this file in a process of its own, where TRITON_INTERPRET=1 is set before triton
is imported. The casts that run here are the integer ones; test_triton_compile.py looks at the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import independent as ind
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import (
    FP8,
    GRADS,
    LAYOUTS,
    SHAPES,
    WIDE,
    WRITABLE,
    Layout,
    contiguous,
    from_bits,
    name,
    normal,
    padded_rows,
    permuted,
    random_bits,
    transposed,
)

import mixprec
from mixprec.diagnostics import env
from mixprec.ops._dispatch import backends, library, rounding
from mixprec.triton_kernels import grad_stats, launch, philox

LOW = (*FP8, torch.float16, torch.bfloat16)
INF, NAN = math.inf, math.nan
# The interpreter takes 5 to 10 ms a launch: every shape once, and with every value only these.
FEW = ((), (0,), (33,), (13, 17), (4097,))
# A kernel that computes Inf or NaN is not in error; NumPy, underneath, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float32)


def tensors(values: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [t for value in values for t in tensors(value)]
    return []


def same_bits(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), label
    if got.is_floating_point():
        ind.assert_same_bits(got, want, label)
    else:
        assert torch.equal(got, want), label


def agree(op: str, make: Callable[[], list[Any]]) -> None:
    """Results and arguments after the call are those of the reference, in every bit."""
    ours, same = make(), make()
    got = tensors([library.triton_launcher(op)(*ours), ours])
    reference = library.op_handle(library.variant_name(op, "reference"))
    want = tensors([reference(*same), same])
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        same_bits(g, w, f"{op}: tensor {i}")


def test_the_interpreter_runs() -> None:
    assert launch.INTERPRETED, "TRITON_INTERPRET=1 must be set before triton is imported"
    assert launch.soft_cast(torch.device("cpu"), torch.float32)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The _triton ops take CPU tensors, which only the interpreter can make of use."""
    library = torch.library.Library("mixprec", "IMPL")
    for op in library.TRITON:
        triton_op = library.variant_name(op, "triton")
        library.impl(triton_op, library.triton_launcher(op), "CPU")
    monkeypatch.setattr(backends, "why_not", lambda *_: None)
    yield
    library._destroy()


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("op", library.TRITON)
def test_through_the_dispatcher(op: str) -> None:
    """As an op of torch, with the self-test that a GPU would run."""
    with mixprec.use_backend("triton"):
        assert backends.choose(op, "cpu") is library.op_handle(library.variant_name(op, "triton"))
        outcome = env.self_test(op, "cpu")
    assert outcome == {"ok": True, "worst": 0.0, "reason": None}


# amax


@pytest.mark.parametrize("dtype", WIDE, ids=name)
@pytest.mark.parametrize("shape", [*SHAPES, (4096,), (8191,), (8193,)], ids=name)
def test_amax(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    agree("amax", lambda: [normal(shape, dtype)])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_amax_of_layouts(layout: Layout) -> None:
    agree("amax", lambda: [layout(normal((13, 17), torch.bfloat16))])


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_amax_sees_the_last_element_and_what_is_not_finite(dtype: torch.dtype) -> None:
    for size, value in itertools.product((1, 4096, 4099), (-100.0, INF, -INF, NAN)):
        for at in (0, -1):
            x = normal((size,), dtype)
            x[at] = value
            agree("amax", lambda x=x: [x])
    both = normal((5000,), dtype)
    both[3], both[4999] = NAN, INF
    agree("amax", lambda: [both])


# quantize


@pytest.mark.parametrize("to", LOW, ids=name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_quantize_all_16_bit_codes(dtype: torch.dtype, to: torch.dtype) -> None:
    codes = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    for scale in (1.0, 3.7, 2.0**120, 2.0**-20):
        agree("quantize", lambda scale=scale: [codes, to, f32(scale), False, "tensor", True])


@pytest.mark.parametrize("to", LOW, ids=name)
def test_quantize_random_fp32_patterns(to: torch.dtype) -> None:
    """2^18 patterns: every exponent, subnormal, NaN and Inf; the C++ casts see all 2^32."""
    x = random_bits(1 << 18, torch.float32)
    for scale in (1.0, 0.3):
        agree("quantize", lambda scale=scale: [x, to, f32(scale), False, "tensor", True])


@pytest.mark.parametrize("spec", ind.SPECS, ids=name)
def test_quantize_ties_and_their_neighbours(spec: ind.Spec) -> None:
    ties = ind.midpoints(spec).astype(np.float32)
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    x = torch.from_numpy(np.concatenate([*near, *(-n for n in near), [0.0, -0.0]]))
    agree("quantize", lambda: [x.float(), spec.dtype, f32(1.0), False, "tensor", True])


@pytest.mark.parametrize("to", LOW, ids=name)
@pytest.mark.parametrize("scale", [0.0, -0.0, INF, NAN, 1e-45, 3e38])
def test_quantize_with_a_scale_that_no_one_should_give(scale: float, to: torch.dtype) -> None:
    x = f32(0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, INF, -INF, NAN)
    agree("quantize", lambda: [x, to, f32(scale), False, "tensor", True])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [*SHAPES, (8193,), (65, 129), (0, 3)], ids=name)
def test_quantize_shapes(shape: tuple[int, ...]) -> None:
    can_transpose = len(shape) > 1
    for args in (
        [normal(shape, torch.float32), torch.float8_e4m3fn, None, can_transpose, "tensor", True],
        [normal(shape, torch.bfloat16), torch.float8_e5m2, f32(0.7), can_transpose, "tensor", True],
        [normal(shape, torch.float16), torch.float8_e4m3fn, None, False, "tensor", False],
        [normal(shape, torch.float32), torch.bfloat16, None, False, "tensor", True],
        [normal(shape, torch.bfloat16), torch.float16, f32(3.0), can_transpose, "tensor", True],
    ):
        agree("quantize", lambda args=args: args)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_quantize_layouts(layout: Layout) -> None:
    for transpose in (False, True):
        args = [
            layout(normal((13, 17), torch.float32)),
            torch.float8_e5m2,
            None,
            transpose,
            "tensor",
            True,
        ]
        agree("quantize", lambda args=args: args)


@pytest.mark.parametrize("to", FP8, ids=name)
@pytest.mark.parametrize(
    "amax", [0.0, 1e-45, 1e-38, 2.0**-118, 1.0, 3.0, 448.0, 449.0, 3.4e38, INF, NAN]
)
def test_quantize_current_scaling(amax: float, to: torch.dtype) -> None:
    for power_of_two, transpose in itertools.product((False, True), repeat=2):
        x = normal((9, 70), torch.float32).clamp(-1, 1) * (amax if math.isfinite(amax) else 1)
        x[8, 69] = amax
        args = [x, to, None, transpose, "tensor", power_of_two]
        agree("quantize", lambda args=args: args)


BLOCKS = ("row", "block1x128", "block128x128")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("shape", [*SHAPES, (130, 257), (3, 4100), (5, 0)], ids=name)
def test_quantize_by_blocks(shape: tuple[int, ...], granularity: str) -> None:
    for to, dtype in ((torch.float8_e4m3fn, torch.bfloat16), (torch.float8_e5m2, torch.float32)):
        for transpose in (False, True) if len(shape) > 1 else (False,):
            args = [normal(shape, dtype), to, None, transpose, granularity, dtype.itemsize == 4]
            agree("quantize", lambda args=args: args)


@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_quantize_by_blocks_of_any_bits(dtype: torch.dtype, granularity: str) -> None:
    every = random_bits(130 * 272, dtype).view(130, 272)
    finite = torch.where(every.isfinite(), every, torch.zeros((), dtype=dtype))
    finite[:, 5] = finite[7] = finite[:128, :128] = 0
    for x, to in itertools.product((every, finite, permuted(finite)), FP8):
        args = [x, to, None, True, granularity, True]
        agree("quantize", lambda args=args: args)


@pytest.mark.parametrize("to", LOW, ids=name)
@pytest.mark.parametrize("transpose", [False, True])
def test_quantize_with_a_scale_that_is_not_initialised(to: torch.dtype, transpose: bool) -> None:
    for shape in ((9, 70), (0, 5)):
        args = [normal(shape, torch.float32), to, f32(0.0), transpose, "tensor", True]
        agree("quantize", lambda args=args: args)


# dequantize


@pytest.mark.parametrize("to", WIDE, ids=name)
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_dequantize_all_codes(dtype: torch.dtype, to: torch.dtype) -> None:
    width = np.uint8 if dtype in FP8 else np.uint16
    codes = from_bits(np.arange(np.iinfo(width).max + 1, dtype=width), dtype)
    for scale_inv in (1.0, 0.37, 2.0**-126, 2.0**100):
        agree("dequantize", lambda s=scale_inv: [codes, f32(s), to])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_dequantize_shapes(shape: tuple[int, ...]) -> None:
    agree("dequantize", lambda: [normal(shape, torch.float8_e5m2), f32(0.5), torch.bfloat16])
    agree("dequantize", lambda: [permuted(normal(shape, torch.half)), f32(3.0), torch.float32])


@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_dequantize_by_blocks(dtype: torch.dtype) -> None:
    for shape, scales in (((130, 257), ((130, 1), (130, 3), (2, 3))), ((2, 3, 40), ((6, 1),))):
        data = normal(shape, torch.float32).to(dtype)
        for scale_inv, to in itertools.product([normal(s, torch.float32) for s in scales], WIDE):
            for strides in (scale_inv, transposed(scale_inv)):
                args = [data, strides, to]
                agree("dequantize", lambda args=args: args)


# unscale_ and grad_stats_


def grads_of(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = FEW) -> list[torch.Tensor]:
    return [normal(shape, dtype) for shape in shapes]


def counts_of(grads: list[torch.Tensor]) -> torch.Tensor:
    """To be overwritten."""
    return torch.full((len(grads), 4), -7)


@pytest.mark.parametrize("inv_scale", [1.0, 2.0**-16, 0.3, 2.0**100, 0.0, INF, NAN])
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_unscale(dtype: torch.dtype, inv_scale: float) -> None:
    grads = [*grads_of(dtype), random_bits(10_000, dtype)]
    for counts in (None, counts_of(grads)):
        agree("unscale_", lambda c=counts: [
            [g.clone() for g in grads], f32(inv_scale), f32(0.0), None if c is None else c.clone()
        ])  # fmt: skip


@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_unscale_shapes(dtype: torch.dtype) -> None:
    """And found_inf is never cleared."""
    shapes = (*SHAPES, (4096,))
    counts = torch.zeros((len(shapes), 4), dtype=torch.int64)
    agree("unscale_", lambda: [grads_of(dtype, shapes), f32(2.0**-3), f32(2.0), counts])


@pytest.mark.parametrize("layout", WRITABLE, ids=name)
def test_unscale_layouts(layout: Layout) -> None:
    for dtype in (torch.float16, torch.float64):
        agree("unscale_", lambda dtype=dtype: [
            [layout(normal((13, 17), dtype))], f32(0.3), torch.zeros(1), torch.ones(1, 4).long()
        ])  # fmt: skip
    around = padded_rows(torch.ones(4, 5))
    wide = around.as_strided((4, 8), (8, 1), 0)
    library.triton_launcher("unscale_")([around], f32(0.5), f32(0.0), None)
    assert (around == 0.5).all()
    assert wide[:, [0, 6, 7]].isnan().all(), "written beside the gradient"


@pytest.mark.parametrize("op", ["unscale_", "grad_stats_"])
@pytest.mark.parametrize("value", [-INF, NAN, "overflow"])
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_found_inf_at_every_end(op: str, value: float | str, dtype: torch.dtype) -> None:
    """At the first and last element of the first and last tensor; and where the product alone
    overflows."""
    inv_scale = 4.0 if value == "overflow" else 0.5
    for which, at in itertools.product((0, -1), (0, -1)):
        grads = [normal((n,), dtype) for n in (33, 4099)]
        grads[which][at] = torch.finfo(dtype).max if value == "overflow" else value
        found = torch.zeros(1)
        rest = [found, None] if op == "unscale_" else [found, torch.zeros(2).double(), None]
        # the sum of squares sees the FP32 product, the write-back its rounding to 16 bits
        raised = op == "unscale_" or value != "overflow" or dtype != torch.float16
        library.triton_launcher(op)(grads, f32(inv_scale), *rest)
        assert found.item() == float(raised)


@pytest.mark.parametrize("inv_scale", [None, 0.3])
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_grad_stats(dtype: torch.dtype, inv_scale: float | None) -> None:
    """One sum per gradient, the same in two runs."""
    chunk = grad_stats.BLOCK * grad_stats.ROUNDS
    grads = [*grads_of(dtype), normal((3 * chunk + 1,), dtype), permuted(normal((5, 7), dtype))]
    scale = None if inv_scale is None else f32(inv_scale)
    sums = []
    for _ in range(2):
        found, sum_sq = f32(0.0), torch.full((len(grads),), NAN, dtype=torch.float64)
        library.triton_launcher("grad_stats_")(grads, scale, found, sum_sq, None)
        sums.append(sum_sq.tolist())
        assert found.item() == 0.0
    assert sums[0] == sums[1], "two runs, two results"
    for grad, total in zip(grads, sums[0], strict=True):
        want = ind.sum_of_squares([grad], inv_scale)
        assert abs(total - want) <= 1e-13 * want  # FP64 partial sums of 1e5 terms


def agree_on_counts(grads: list[torch.Tensor], inv_scale: float | None) -> list[list[int]]:
    """The counts, and found_inf, of the kernel and of the reference."""
    scale = None if inv_scale is None else f32(inv_scale)
    reference = library.op_handle("grad_stats_reference_")
    results = []
    for run in (library.triton_launcher("grad_stats_"), reference):
        found, sum_sq, counts = f32(0.0), torch.zeros(len(grads)).double(), counts_of(grads)
        run(grads, scale, found, sum_sq, counts)
        results.append((found.item(), counts.tolist()))
    assert results[0] == results[1]
    return results[0][1]


@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_grad_stats_counts(dtype: torch.dtype) -> None:
    patterns = [random_bits(3000, dtype), padded_rows(random_bits(15, dtype))]
    agree_on_counts([*grads_of(dtype), *patterns], 0.3)
    agree_on_counts(patterns, 1e30)
    # more than a chunk of one kind: no count runs over into the next
    size = grad_stats.BLOCK * grad_stats.ROUNDS + 5
    values = (-INF, NAN, -0.0, torch.finfo(dtype).smallest_normal / 2)
    counts = agree_on_counts([torch.full((size,), x, dtype=dtype) for x in values], None)
    assert counts == [[size * (i == k) for k in range(4)] for i in range(4)]


def test_grad_stats_of_nothing_and_of_much() -> None:
    run = library.triton_launcher("grad_stats_")
    found = f32(0.0)
    run([], None, found, torch.zeros(0).double(), torch.zeros((0, 4)).long())
    # the square of each of 70 overflows FP32
    grads = [torch.empty(0), torch.full((70,), 3e38)]
    sum_sq = torch.full((2,), 7.0, dtype=torch.float64)
    run(grads, f32(1.0), found, sum_sq, None)
    assert found.item() == 0.0
    assert sum_sq.tolist() == [0.0, pytest.approx(70 * 9e76, rel=1e-6)]
    run([torch.empty(0), f32(1.0, INF)], None, found, sum_sq, None)
    assert (sum_sq.tolist(), found.item()) == ([0.0, INF], 1.0)


# adamw_ and sgd_

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INT16 = torch.int16
Row = tuple[torch.dtype, torch.dtype, "torch.dtype | None"]  # of param, gradient, master
# Every param with every master; the gradients' dtypes, which meet no other, in turn.
BARE: list[Row] = [(F32, BF16, None), (BF16, F32, None), (F16, F16, None), (F64, F64, None)]
WITH_MASTERS: list[Row] = [
    (F32, F16, F32), (BF16, BF16, F32), (BF16, F32, INT16), (F16, F32, F32), (F64, F64, F64),
]  # fmt: skip
STATES = {"adamw_": 2, "sgd_": 1}
TAIL: dict[str, Any] = {
    "maximize": False, "max_value": INF, "stochastic_rounding": False, "seed": 0x123456789ABCDEF,
    "indices": [], "lr_tensor": None, "inv_scale": f32(0.5), "clip": f32(0.25),
    "found_inf": f32(0.0),
}  # fmt: skip
# The arguments after `steps`, in order.
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw_": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
               "decoupled_weight_decay": True, **TAIL},
    "sgd_": {"lr": 1e-3, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01,
             "nesterov": False, **TAIL},
}  # fmt: skip
# One program and less, and more; whole groups of eight elements, and not.
UPDATE_SHAPES = ((33,), (1025,), (13, 17), (16,), (), (0,))


def update_arguments(
    op: str,
    rows: Sequence[Row],
    narrow: Sequence[bool] | None,  # which states are bf16; None: without states
    shapes: Sequence[tuple[int, ...]] = UPDATE_SHAPES,
    steps: Sequence[float] = (0.0, 1.0, 7.0, 999.0, 1e6),
    layout: Layout = contiguous,
    **options: Any,
) -> list[Any]:
    """One param a row; shapes and steps are taken in turn."""
    lists: list[list[torch.Tensor]] = [[] for _ in range(3 + STATES[op])]
    params, grads, *states, masters = lists
    if narrow is None:
        states = []
    for i, (dtype, grad, master) in enumerate(rows):
        shape = shapes[i % len(shapes)]
        real = F64 if dtype == F64 else F32
        wide = normal(shape, real, 10 * i)
        param, low = wide.to(dtype), wide
        if master == INT16:
            param, low = rounding.split_master(wide)
        if master is not None:
            masters.append(layout(low))
        params.append(layout(param))
        grads.append(layout(normal(shape, grad, 10 * i + 1)))
        for k, state in enumerate(states):
            value = normal(shape, real, 10 * i + 2 + k)
            value = value.square() if k else value
            state.append(layout(value.to(BF16 if narrow[k] and real == F32 else real)))
    counts = torch.tensor([steps[i % len(steps)] for i in range(len(rows))])
    options = OPTIONS[op] | {"indices": list(range(5, 5 + len(rows)))} | options
    if narrow is None:
        lists = [params, grads, [], masters]
    return [*lists, counts, *options.values()]


RATES = (None, f32(0.3), torch.tensor([0.3], dtype=F64))


def tail(case: int) -> dict[str, Any]:
    """Options that do not meet the dtypes, in turn; test_tails has all combinations of them."""
    return {
        "maximize": case % 2 == 1,
        "max_value": (INF, 0.1)[case // 2 % 2],
        "lr_tensor": RATES[case % 3],
        "seed": (-1, 0, 1, 2**63 - 1, 16)[case % 5],
    }


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("rows", [BARE, WITH_MASTERS], ids=["bare", "masters"])
@pytest.mark.parametrize("narrow", [*itertools.product((False, True), repeat=2)], ids=str)
def test_adamw(narrow: tuple[bool, bool], rows: list[Row], stochastic: bool) -> None:
    """Every mix of dtypes and masters in one list, with every way to round."""
    case = 2 * narrow[0] + narrow[1] + 3 * stochastic
    options = {**tail(case), "decoupled_weight_decay": case % 4 < 2}
    agree("adamw_", lambda: update_arguments(
        "adamw_", rows, narrow, **options, stochastic_rounding=stochastic))  # fmt: skip


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("rows", [BARE, WITH_MASTERS], ids=["bare", "masters"])
@pytest.mark.parametrize("narrow", [None, [False], [True]], ids=str)
def test_sgd(narrow: list[bool] | None, rows: list[Row], stochastic: bool) -> None:
    """As test_adamw. Without buffers there is one formula."""
    for case, nesterov in enumerate((False, True) if narrow else (False,), start=stochastic):
        options = {**tail(case), "nesterov": nesterov, "dampening": 0.1 * case}
        agree("sgd_", lambda o=options: update_arguments(
            "sgd_", rows, narrow, **o, stochastic_rounding=stochastic))  # fmt: skip


@pytest.mark.parametrize("op", STATES)
@pytest.mark.parametrize("grad", WIDE, ids=name)
def test_gradients_of_updates(grad: torch.dtype, op: str) -> None:
    rows: list[Row] = [(dtype, grad, None) for dtype in WIDE]
    agree(op, lambda: update_arguments(op, rows, [False] * STATES[op]))


@pytest.mark.parametrize("op", STATES)
def test_tails(op: str) -> None:
    """What the gradient and the rate depend on, in both widths of the arithmetic."""
    rows: list[Row] = [(F16, F16, None), (F64, F64, None)]
    flag = {"adamw_": "decoupled_weight_decay", "sgd_": "nesterov"}[op]
    signs = itertools.product((False, True), (INF, 0.1), RATES, (False, True))
    scalars = itertools.product((None, f32(0.7)), (None, f32(0.3)), (None, f32(0.0)))
    cases = [
        *(dict(zip(("maximize", "max_value", "lr_tensor", flag), c, strict=True)) for c in signs),
        *(dict(zip(("inv_scale", "clip", "found_inf"), c, strict=True)) for c in scalars),
    ]
    for options in cases:
        agree(op, lambda o=options: update_arguments(
            op, rows, [False] * STATES[op], ((5,), (7,)), (0.0, 1.0), **o))  # fmt: skip


@pytest.mark.parametrize("op", STATES)
@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, INF, NAN])
def test_updates_skip(op: str, found_inf: float) -> None:
    """Nothing is written, the steps not either, whatever the gradients hold."""
    for rows, narrow in itertools.product((BARE, WITH_MASTERS), (False, True)):
        args = update_arguments(op, rows, [narrow] * STATES[op], found_inf=f32(found_inf),
                                stochastic_rounding=narrow)  # fmt: skip
        args[1] = [torch.full_like(g, NAN) for g in args[1]]
        before = [t.clone() for t in tensors(args)]
        library.triton_launcher(op)(*args)
        for after, was in zip(tensors(args), before, strict=True):
            same_bits(after, was, op)


@pytest.mark.parametrize("op", STATES)
@pytest.mark.parametrize("layout", WRITABLE, ids=name)
def test_updates_of_layouts(layout: Layout, op: str) -> None:
    """Random bits go to elements in row-major order, whatever the order in memory."""
    shapes = ((2, 3, 5), (13, 17))
    for masters, narrow in (((None, None), False), ((F32, INT16), False), ((INT16, F32), True)):
        rows = [(BF16, F32, master) for master in masters]
        make = lambda r=rows, n=narrow, order=layout: update_arguments(  # noqa: E731
            op, r, [n] * STATES[op], shapes, layout=order, stochastic_rounding=True)  # fmt: skip
        agree(op, make)

        def mixed(make: Callable[[], list[Any]] = make) -> list[Any]:
            args = make()  # the gradients in another order than the rest
            args[1] = [transposed(g) for g in args[1]]
            return args

        agree(op, mixed)


@pytest.mark.parametrize(
    ("op", "numbers"),
    [
        ("adamw_", {"lr": 0.0, "weight_decay": 0.0}),
        ("adamw_", {"beta1": 0.0, "beta2": 0.0}),
        ("adamw_", {"eps": 0.0}),
        ("adamw_", {"eps": 1e-30, "lr": 1e10, "weight_decay": 0.3}),
        ("adamw_", {"beta1": 0.95, "beta2": 0.99999, "lr": 3.3e-5}),
        ("sgd_", {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}),
        ("sgd_", {"lr": 3e4, "weight_decay": 0.3, "dampening": 1.0, "nesterov": True}),
    ],
    ids=name,
)
def test_numbers_of_updates(op: str, numbers: dict[str, float]) -> None:
    rows: list[Row] = [(F16, F16, F32), (F64, F64, F64)]
    agree(op, lambda: update_arguments(op, rows, [False] * STATES[op], **numbers))


@pytest.mark.parametrize("op", STATES)
def test_updates_of_any_pattern(op: str) -> None:
    """Subnormal, huge, infinite and NaN gradients and states; zero params beside any remainder."""

    def make(row: Row, narrow: bool) -> list[Any]:
        args = update_arguments(op, [row], [narrow] * STATES[op], ((1 << 12,),), inv_scale=None,
                                stochastic_rounding=True, clip=f32(0.7))  # fmt: skip
        for seed, tensor in enumerate(tensors(args[: 3 + STATES[op]])):
            tensor.copy_(random_bits(tensor.numel(), tensor.dtype, seed))
        args[0][0][:64] = 0.0
        args[0][0][32:64] = -0.0
        if row[1] == F32:  # NaN whose payload a carry would run through, into the sign
            args[1][0].view(torch.int32)[64:128] = 0x7FFFFFFF
        return args

    for row, narrow in itertools.product(
        ((F32, F32, None), (BF16, F32, None), (BF16, F32, INT16), (F16, BF16, F32)), (False, True)
    ):
        agree(op, lambda row=row, narrow=narrow: make(row, narrow))


def test_maximize_negates_zeros_too() -> None:
    """The first buffer is the gradient: -0 where that is 0, not 0 - 0."""

    def make() -> list[Any]:
        args = update_arguments("sgd_", [(F32, F32, None)], [False], steps=(0.0,), maximize=True,
                                weight_decay=0.0)  # fmt: skip
        args[1][0].zero_()
        args[0][0].abs_().neg_()
        return args

    agree("sgd_", make)
    args = make()
    library.triton_launcher("sgd_")(*args)
    assert args[2][0].signbit().all()


def test_remainders_hold_every_master() -> None:
    """A step of rate 0 leaves param and remainder as they are: ties between two params above all,
    which rounding to nearest even would lose."""
    high = np.random.default_rng(0).integers(0x0080, 0x7F00, 400, dtype=np.uint32) << 16
    bits = np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    master = torch.cat([from_bits(bits, F32), -from_bits(bits, F32)])

    def make() -> list[Any]:
        args = update_arguments("sgd_", [(BF16, F32, INT16)], None, (tuple(master.shape),),
                                lr=0.0, weight_decay=0.0)  # fmt: skip
        for tensor, value in zip((args[0][0], args[3][0]), rounding.split_master(master),
                                 strict=True):  # fmt: skip
            tensor.copy_(value)
        return args

    agree("sgd_", make)
    args = make()
    library.triton_launcher("sgd_")(*args)
    same_bits(rounding.join_master(args[0][0], args[3][0]), master, "master")


@pytest.mark.parametrize("op", STATES)
def test_updates_of_none_and_of_many_params(op: str) -> None:
    """More than one program's worth of constants."""
    count = 131
    steps = [float(i * i) for i in range(count)]
    shapes = [(0,)] * (count - 4) + [(3,)] * 4  # empty ones have constants too
    for rows in ([], [(F32, F32, None)] * count):
        narrow = [False] * STATES[op]
        agree(op, lambda r=rows, n=narrow: update_arguments(op, r, n, shapes, steps))


@triton.jit
def random16_kernel(out_ptr, start: tl.int64, seed: tl.int64, step, index, STREAM: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    key = (seed, step.to(tl.uint32), index)
    bits = philox.random16(start, key, STREAM, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), bits.to(tl.int32))


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 0x123456789ABCDEF])
def test_random_bits(seed: int) -> None:
    """Also where no tensor of a test reaches: counters of more than 32 bits, the last index."""
    block = 64
    starts = (0, 8 * (2**32 - 3), 2**45)
    for stream, start in itertools.product(range(3), starts):
        step, index = (1, 2**30 - 1) if stream == 1 else (2**24, 0)
        got = torch.zeros(block, dtype=torch.int32)
        random16_kernel[(1,)](got, start, seed, step, index, STREAM=stream, BLOCK=block)
        eighth = torch.arange(start // 8, start // 8 + block // 8)
        words = (eighth & 0xFFFFFFFF, eighth >> 32, torch.full_like(eighth, step),
                 torch.full_like(eighth, index + (stream << 30)))  # fmt: skip
        bits = rounding.philox(words, seed)
        want = torch.stack([bits & 0xFFFF, bits >> 16], dim=-1).reshape(-1)
        assert got.tolist() == want.tolist()


# scales


@pytest.mark.parametrize("margin", [-64, 0, 3, 64])
@pytest.mark.parametrize("to", LOW, ids=name)
def test_scale_from_amax(to: torch.dtype, margin: int) -> None:
    awkward = f32(0.0, -0.0, 1e-45, 1e-38, 1.0, 3.0, 448.0, 3.4e38, INF, NAN)
    amax = torch.cat([awkward, random_bits(3000, torch.float32).abs()])
    for power_of_two in (False, True):
        previous = torch.linspace(0.1, 9.0, amax.numel())
        args = (to, margin, power_of_two)
        agree("scale_from_amax_", lambda a=args, p=previous: [
            p.clone(), torch.zeros_like(amax), amax, *a])  # fmt: skip


@pytest.mark.parametrize("layout", WRITABLE, ids=name)
def test_scale_from_amax_layouts(layout: Layout) -> None:
    for shape in ((), (0,), (3, 5)):
        make = lambda s=shape: [layout(normal(s, torch.float32, seed).abs()) for seed in range(3)]  # noqa: E731
        agree("scale_from_amax_", lambda make=make: [*make(), torch.float8_e4m3fn, 1, True])


def test_inv_scale_and_clip_coef() -> None:
    for x in [*random_bits(300, torch.float32), f32(0.0), f32(INF), f32(NAN), f32(65536.0)]:
        agree("inv_scale", lambda x=x: [x.reshape(1)])
    sums = [*random_bits(40, torch.float64).abs(), *normal((10,), torch.float64).square() * 9]
    special = torch.tensor([0.0, INF, NAN, 1.0], dtype=torch.float64)
    for x, max_norm in itertools.product([*sums, *special], (1.0, 0.3, 1e300, INF)):
        agree("clip_coef", lambda x=x, n=max_norm: [x, n])


@pytest.mark.parametrize("count", [0, 1, 2, 1023, 1024, 1025, 5000])
def test_clip_coef_of_many_sums(count: int) -> None:
    """Small integers, whose sum is exact in any order; of others, one order and so one result."""
    exact = torch.arange(count, dtype=torch.float64) % 97
    agree("clip_coef", lambda: [exact, 3.0])
    sums, run = normal((count,), torch.float64).square(), library.triton_launcher("clip_coef")
    assert run(sums, 0.3).item() == run(sums, 0.3).item()
    assert run(sums, 0.3).item() == pytest.approx(
        min(1.0, 0.3 / (math.sqrt(math.fsum(sums.tolist())) + 1e-6)), rel=2**-23
    )


Rule = tuple[Any, ...]


def agree_on_update_scale(
    scale: float, growth: int, left: int, found: float, underflow: float | None, rule: Rule
) -> None:
    def make() -> list[Any]:
        trackers = [torch.tensor([t], dtype=torch.int32) for t in (growth, left)]
        counters = torch.tensor([2**40, 3, 4])
        share = None if underflow is None else f32(underflow)
        return [f32(scale).reshape(1), *trackers, counters, f32(found), share, *rule]

    agree("update_scale_", make)


@pytest.mark.parametrize("found", [0.0, 1.0, 2.0, NAN])
@pytest.mark.parametrize("scale", [65536.0, 1.0, 2.0**-24, 2.0**-26, 3e38, 1e-45, INF, NAN])
def test_update_scale(scale: float, found: float) -> None:
    rules = (
        (2.0, 0.5, 1, 2.0**-24, INF, 1, 1.0),
        (2.0, 0.5, 3, 0.0, 2.0**16, 2, 1.0),
        (1.1, 0.9, 3, 2.0**-24, 2.0**17, 2, 1.0),
    )
    for rule, growth, left in itertools.product(rules, (0, 2), (0, 1, 2)):
        agree_on_update_scale(scale, growth, left, found, None, rule)


@pytest.mark.parametrize("underflow", [0.0, 0.3, 0.31, 1.0, NAN])
def test_update_scale_on_underflow(underflow: float) -> None:
    """Early growth is from a twentieth of the interval on: at 2 of 40, not at 1; in 64 bits."""
    for interval, growth, threshold, found in itertools.product(
        (3, 40, 2**31 - 1), (0, 1, 2**30), (0.0, 0.3, 1.0), (0.0, 1.0)
    ):
        rule = (2.0, 0.5, interval, 0.0, INF, 1, threshold)
        agree_on_update_scale(1024.0, growth, 1, found, underflow, rule)
