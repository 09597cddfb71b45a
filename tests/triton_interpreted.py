"""The Triton kernels in Triton's interpreter, bit for bit against the references.

test_triton.py runs this file in a process of its own, where TRITON_INTERPRET=1 is set before triton
is imported. The casts that run here are the integer ones; test_triton_compile.py looks at the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import independent as ind
import numpy as np
import pytest
import torch
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
from mixprec import _self_test
from mixprec.ops import _backends, _library
from mixprec.triton_kernels import grad_stats, launch

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


def agree(op: str, make: Callable[[], list[Any]]) -> None:
    """Results and arguments after the call are those of the reference, in every bit."""
    ours, same = make(), make()
    got = tensors([_library.triton_launcher(op)(*ours), ours])
    reference = _library.op_handle(_library.variant_name(op, "reference"))
    want = tensors([reference(*same), same])
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape
        ind.assert_same_bits(g, w, f"{op}: tensor {i}")


def test_the_interpreter_runs() -> None:
    assert launch.INTERPRETED, "TRITON_INTERPRET=1 must be set before triton is imported"
    assert launch.soft_cast(torch.device("cpu"), torch.float32)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The _triton ops take CPU tensors, which only the interpreter can make of use."""
    library = torch.library.Library("mixprec", "IMPL")
    for op in _library.TRITON:
        triton_op = _library.variant_name(op, "triton")
        library.impl(triton_op, _library.triton_launcher(op), "CPU")
    monkeypatch.setattr(_backends, "why_not", lambda *_: None)
    yield
    library._destroy()


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("op", _library.TRITON)
def test_through_the_dispatcher(op: str) -> None:
    """As an op of torch, with the self-test that a GPU would run."""
    with mixprec.use_backend("triton"):
        assert _backends.choose(op, "cpu") is _library.op_handle(
            _library.variant_name(op, "triton")
        )
        outcome = _self_test.self_test(op, "cpu")
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
        agree("quantize", lambda scale=scale: [codes, to, f32(scale), False, True])


@pytest.mark.parametrize("to", LOW, ids=name)
def test_quantize_random_fp32_patterns(to: torch.dtype) -> None:
    """2^18 patterns: every exponent, subnormal, NaN and Inf; the C++ casts see all 2^32."""
    x = random_bits(1 << 18, torch.float32)
    for scale in (1.0, 0.3):
        agree("quantize", lambda scale=scale: [x, to, f32(scale), False, True])


@pytest.mark.parametrize("spec", ind.SPECS, ids=name)
def test_quantize_ties_and_their_neighbours(spec: ind.Spec) -> None:
    ties = ind.midpoints(spec).astype(np.float32)
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    x = torch.from_numpy(np.concatenate([*near, *(-n for n in near), [0.0, -0.0]]))
    agree("quantize", lambda: [x.float(), spec.dtype, f32(1.0), False, True])


@pytest.mark.parametrize("to", LOW, ids=name)
@pytest.mark.parametrize("scale", [0.0, -0.0, INF, NAN, 1e-45, 3e38])
def test_quantize_with_a_scale_that_no_one_should_give(scale: float, to: torch.dtype) -> None:
    x = f32(0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, INF, -INF, NAN)
    agree("quantize", lambda: [x, to, f32(scale), False, True])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [*SHAPES, (8193,), (65, 129), (0, 3)], ids=name)
def test_quantize_shapes(shape: tuple[int, ...]) -> None:
    can_transpose = len(shape) > 1
    for args in (
        [normal(shape, torch.float32), torch.float8_e4m3fn, None, can_transpose, True],
        [normal(shape, torch.bfloat16), torch.float8_e5m2, f32(0.7), can_transpose, True],
        [normal(shape, torch.float16), torch.float8_e4m3fn, None, False, False],
        [normal(shape, torch.float32), torch.bfloat16, None, False, True],
        [normal(shape, torch.bfloat16), torch.float16, f32(3.0), can_transpose, True],
    ):
        agree("quantize", lambda args=args: args)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_quantize_layouts(layout: Layout) -> None:
    for transpose in (False, True):
        args = [layout(normal((13, 17), torch.float32)), torch.float8_e5m2, None, transpose, True]
        agree("quantize", lambda args=args: args)


@pytest.mark.parametrize("to", FP8, ids=name)
@pytest.mark.parametrize(
    "amax", [0.0, 1e-45, 1e-38, 2.0**-118, 1.0, 3.0, 448.0, 449.0, 3.4e38, INF, NAN]
)
def test_quantize_current_scaling(amax: float, to: torch.dtype) -> None:
    for power_of_two, transpose in itertools.product((False, True), repeat=2):
        x = normal((9, 70), torch.float32).clamp(-1, 1) * (amax if math.isfinite(amax) else 1)
        x[8, 69] = amax
        args = [x, to, None, transpose, power_of_two]
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


# unscale_ and grad_stats_


def grads_of(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = FEW) -> list[torch.Tensor]:
    return [normal(shape, dtype) for shape in shapes]


@pytest.mark.parametrize("inv_scale", [1.0, 2.0**-16, 0.3, 2.0**100, 0.0, INF, NAN])
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_unscale(dtype: torch.dtype, inv_scale: float) -> None:
    agree("unscale_", lambda: [grads_of(dtype), f32(inv_scale), f32(0.0)])
    patterns = random_bits(10_000, dtype)
    agree("unscale_", lambda: [[patterns.clone()], f32(inv_scale), torch.zeros(1)])


@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_unscale_shapes(dtype: torch.dtype) -> None:
    """And found_inf is never cleared."""
    shapes = (*SHAPES, (4096,))
    agree("unscale_", lambda: [grads_of(dtype, shapes), f32(2.0**-3), f32(2.0)])


@pytest.mark.parametrize("layout", WRITABLE, ids=name)
def test_unscale_layouts(layout: Layout) -> None:
    for dtype in (torch.float16, torch.float64):
        make = lambda dtype=dtype: [[layout(normal((13, 17), dtype))], f32(0.3), f32(0.0)]  # noqa: E731
        agree("unscale_", make)
    around = padded_rows(torch.ones(4, 5))
    wide = around.as_strided((4, 8), (8, 1), 0)
    _library.triton_launcher("unscale_")([around], f32(0.5), f32(0.0))
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
        rest = [found] if op == "unscale_" else [found, torch.zeros((), dtype=torch.float64)]
        # the sum of squares sees the FP32 product, the write-back its rounding to 16 bits
        raised = op == "unscale_" or value != "overflow" or dtype != torch.float16
        _library.triton_launcher(op)(grads, f32(inv_scale), *rest)
        assert found.item() == float(raised)


@pytest.mark.parametrize("inv_scale", [None, 0.3])
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_grad_stats(dtype: torch.dtype, inv_scale: float | None) -> None:
    chunk = grad_stats.BLOCK * grad_stats.ROUNDS
    grads = [*grads_of(dtype), normal((3 * chunk + 1,), dtype), permuted(normal((5, 7), dtype))]
    scale = None if inv_scale is None else f32(inv_scale)
    sums = []
    for _ in range(2):
        found, total = f32(0.0), torch.full((1,), NAN, dtype=torch.float64)
        _library.triton_launcher("grad_stats_")(grads, scale, found, total)
        sums.append(total.item())
        assert found.item() == 0.0
    assert sums[0] == sums[1], "two runs, two results"
    want = ind.sum_of_squares(grads, inv_scale)
    assert abs(sums[0] - want) <= 1e-13 * want  # FP64 partial sums of 1e5 terms


def test_grad_stats_of_nothing_and_of_much() -> None:
    found, total = f32(0.0), torch.full((), 7.0, dtype=torch.float64)
    run = _library.triton_launcher("grad_stats_")
    run([], None, found, total)
    assert (total.item(), found.item()) == (0.0, 0.0)
    run([torch.empty(0)], f32(1.0), found, total)
    assert (total.item(), found.item()) == (0.0, 0.0)
    run([torch.full((70,), 3e38)], None, found, total)  # the square of each overflows FP32
    assert found.item() == 0.0
    assert total.item() == pytest.approx(70 * 9e76, rel=1e-6)
    run([f32(1.0, INF)], None, found, total)
    assert (total.item(), found.item()) == (INF, 1.0)


# adamw_

NUMBERS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
MIXES = [(p, g, p in (torch.bfloat16, torch.float16)) for p in WIDE for g in WIDE]
MIXES += [(torch.bfloat16, torch.bfloat16, False), (torch.float32, torch.bfloat16, True)]
MIXES += [(torch.float64, torch.float64, False), (torch.float64, torch.float64, True)]


def adamw_arguments(
    param: torch.dtype,
    grad: torch.dtype,
    masters: bool,
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (33,), (13, 17), (1025,)),
    steps: tuple[float, ...] = (0.0, 1.0, 7.0, 999.0, 1e6),
    layout: Layout = contiguous,
    maximize: bool = False,
    flags: tuple[float | None, float | None, float | None] = (0.5, 0.25, 0.0),
    **numbers: float,
) -> list[Any]:
    real = torch.float64 if param == torch.float64 else torch.float32

    def draw(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        return [layout(normal(s, dtype, seed=10 * i + seed)) for i, s in enumerate(shapes)]

    wide = draw(real, 0)
    params = [w.to(param) if masters else p for w, p in zip(wide, draw(param, 0), strict=True)]
    squares = [layout(v.square()) for v in draw(real, 3)]
    lists = [params, draw(grad, 1), draw(real, 2), squares, wide if masters else []]
    counts = [torch.full((1,) if i % 2 else (), s) for i, s in enumerate(steps)]
    scalars = [None if f is None else f32(f) for f in flags]
    return [*lists, counts, *(NUMBERS | numbers).values(), maximize, *scalars]


@pytest.mark.parametrize("mix", MIXES, ids=name)
def test_adamw(mix: tuple[torch.dtype, torch.dtype, bool]) -> None:
    agree("adamw_", lambda: adamw_arguments(*mix))
    agree("adamw_", lambda: adamw_arguments(*mix, maximize=True, flags=(None, 0.3, None)))


@pytest.mark.parametrize("flags", list(itertools.product((None, 0.7), (None, 0.3), (None, 0.0))))
def test_adamw_flags(flags: tuple[float | None, ...]) -> None:
    agree("adamw_", lambda: adamw_arguments(torch.bfloat16, torch.float16, True, flags=flags))


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, INF, NAN])
def test_adamw_skips(found_inf: float) -> None:
    """Nothing is written, the step not either, whatever the gradients hold."""
    for mix in ((torch.bfloat16, torch.bfloat16, True), (torch.float64, torch.float64, False)):
        args = adamw_arguments(*mix, flags=(0.5, None, found_inf))
        args[1] = [torch.full_like(g, NAN) for g in args[1]]
        before = [t.clone() for t in tensors(args[:6])]
        _library.triton_launcher("adamw_")(*args)
        for after, was in zip(tensors(args[:6]), before, strict=True):
            ind.assert_same_bits(after, was)


@pytest.mark.parametrize("layout", WRITABLE, ids=name)
def test_adamw_layouts(layout: Layout) -> None:
    shapes = ((13, 17), (2, 3, 5))
    mix = (torch.bfloat16, torch.float32, True)
    make = lambda: adamw_arguments(*mix, shapes, (0.0, 3.0), layout)  # noqa: E731
    agree("adamw_", make)

    def mixed() -> list[Any]:  # the gradients in another order than the rest
        args = make()
        args[1] = [transposed(g) for g in args[1]]
        return args

    agree("adamw_", mixed)


@pytest.mark.parametrize(
    "numbers",
    [
        {"lr": 0.0, "weight_decay": 0.0},
        {"beta1": 0.0, "beta2": 0.0},
        {"eps": 0.0},
        {"eps": 1e-30, "lr": 1e10, "weight_decay": 0.3},
        {"beta1": 0.95, "beta2": 0.99999, "lr": 3.3e-5},
    ],
    ids=name,
)
def test_adamw_numbers(numbers: dict[str, float]) -> None:
    for mix in ((torch.float16, torch.float16, True), (torch.float64, torch.float64, False)):
        agree("adamw_", lambda mix=mix: adamw_arguments(*mix, **numbers))


def test_adamw_of_any_pattern() -> None:
    """Subnormal, huge, infinite and NaN states; 2^13 patterns of each."""

    def make() -> list[Any]:
        bits = [[random_bits(1 << 13, torch.float32, seed)] for seed in range(4)]
        p, g, m, v = bits
        return [p, g, m, v, [], [f32(4.0)], *NUMBERS.values(), False, f32(0.3), f32(0.7), None]

    agree("adamw_", make)
    agree("adamw_", lambda: [[]] * 6 + [*NUMBERS.values(), False, None, None, None])


def test_adamw_of_many_params() -> None:
    """More than one program's worth of step constants."""
    count = 131
    shapes, steps = ((3,),) * count, tuple(float(i * i) for i in range(count))
    make = lambda: adamw_arguments(torch.float32, torch.float32, False, shapes, steps)  # noqa: E731
    agree("adamw_", make)


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
    sums = [*random_bits(300, torch.float64).abs(), *normal((50,), torch.float64).square() * 9]
    special = torch.tensor([0.0, INF, NAN, 1.0], dtype=torch.float64)
    for x, max_norm in itertools.product([*sums, *special], (1.0, 0.3, 1e300, INF)):
        agree("clip_coef", lambda x=x, n=max_norm: [x, n])


@pytest.mark.parametrize("found", [0.0, 1.0, 2.0, NAN])
@pytest.mark.parametrize("scale", [65536.0, 1.0, 2.0**-24, 2.0**-26, 3e38, 1e-45, INF, NAN])
def test_update_scale(scale: float, found: float) -> None:
    rules = (
        (2.0, 0.5, 1, 2.0**-24, INF, 1),
        (2.0, 0.5, 3, 0.0, 2.0**16, 2),
        (1.1, 0.9, 3, 2.0**-24, 2.0**17, 2),
    )
    for rule, growth, left in itertools.product(rules, (0, 2), (0, 1, 2)):
        trackers = growth, left

        def make(trackers: tuple[int, int] = trackers, rule: tuple[Any, ...] = rule) -> list[Any]:
            ints = [torch.tensor([t], dtype=torch.int32) for t in trackers]
            return [f32(scale).reshape(1), *ints, f32(found), *rule]

        agree("update_scale_", make)
