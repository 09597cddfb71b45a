"""What torch asks of an op: true schemas and fakes, traceable, versions bumped, no silent grads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import independent as ind
import pytest
import torch
from cases import FP8, WIDE, normal, permuted, small_integers

import mixprec
from mixprec import ops
from mixprec.ops._dispatch.op import ALL, Op

OPS: dict[str, Op] = {op.name: op for op in ALL}

LOW = (torch.float16, torch.bfloat16, *FP8)
ARRANGEMENTS = ("contiguous", "permuted", "empty")


def tensor(shape: tuple[int, ...], dtype: torch.dtype, arrangement: str) -> torch.Tensor:
    """Small integers: exact in every format, so that functional and in-place runs compare equal."""
    if arrangement == "empty":
        shape = (0, *shape[1:])
    x = small_integers(shape, dtype, limit=4)
    return permuted(x) if arrangement == "permuted" else x


def cases() -> list[tuple[str, str, torch.dtype, str]]:
    dtypes = {
        "amax": WIDE,
        "quantize": WIDE,
        "dequantize": LOW,
        "gemm": LOW,
        "gemm_accumulate_": LOW,
        "unscale_": (*WIDE, torch.float64),
        "grad_stats_": (*WIDE, torch.float64),
        "adamw_": (*WIDE, torch.float64),
        "sgd_": (*WIDE, torch.float64),
        "scale_from_amax_": (torch.float32,),
        "update_scale_": (torch.float32,),
        "inv_scale": (torch.float32,),
        "clip_coef": (torch.float64,),
        "update_delayed_scales_": (torch.float32,),
    }
    assert set(dtypes) == set(OPS), "an op without its cases"
    scalars = ("update_scale_", "inv_scale", "clip_coef", "update_delayed_scales_")
    table = []
    for op, kinds in dtypes.items():
        # One dtype in every arrangement, every other dtype in one of them: they are independent.
        arrangements = ("contiguous",) if op in scalars else ARRANGEMENTS
        table += [(op, "cpp", kinds[0], arrangement) for arrangement in arrangements]
        for i, dtype in enumerate(kinds[1:]):
            table.append((op, "cpp", dtype, arrangements[i % len(arrangements)]))
        # The reference shares schema, fake and check: permuted inputs alone show its strides.
        if op not in scalars:
            table.append((op, "reference", kinds[0], "permuted"))
    return table


def arguments(op: str, dtype: torch.dtype, arrangement: str) -> tuple[Any, ...]:
    """Positional arguments of the raw op, in the schema's order."""
    one, flag = torch.ones(()), torch.zeros(1)
    x = tensor((4, 6), dtype, arrangement)
    if op == "amax":
        return (x,)
    if op == "quantize":
        return x, torch.float8_e4m3fn, one, True, "tensor", True
    if op == "dequantize":
        return x, one, torch.bfloat16
    if op in ("gemm", "gemm_accumulate_"):
        b = tensor((6, 5), dtype, "permuted" if arrangement == "permuted" else "contiguous")
        if op == "gemm":
            return x, b, one, None, torch.ones(5).bfloat16(), torch.float32, False
        acc = torch.zeros((5, x.shape[0])).t() if arrangement == "permuted" else torch.zeros(
            (x.shape[0], 5))  # fmt: skip
        return acc, x, b, None, one
    counts = torch.zeros((2, 4), dtype=torch.int64)
    if op == "unscale_":
        return [x, tensor((3,), torch.float32, "contiguous")], one * 0.5, flag, counts
    if op == "grad_stats_":
        grads = [x, tensor((3,), torch.float32, "contiguous")]
        return grads, one, flag, torch.zeros(2).double(), counts
    if op in ("adamw_", "sgd_"):
        real = torch.float64 if dtype == torch.float64 else torch.float32
        wide = [tensor((4, 6), real, arrangement) for _ in range(3)]
        masters = [wide[2]] if real != dtype else []
        shared = (False, 1e9, False, 0, [], None, one, one, flag)
        if op == "sgd_":
            return [x], [x.clone()], [wide[0]], masters, flag + 1, 0.1, 0.9, 0.0, 0.0, True, *shared
        numbers = (1e-3, 0.9, 0.999, 1e-8, 1e-2, True)
        moments = [wide[0]], [wide[1].abs()]
        return ([x], [x.clone()], *moments, masters, torch.ones(1), *numbers, *shared)
    if op == "scale_from_amax_":
        same = [tensor((4, 6), dtype, arrangement) for _ in range(3)]
        return *same, torch.float8_e5m2, 1, True
    if op == "update_scale_":
        trackers = [torch.ones(1, dtype=torch.int32) for _ in range(2)]
        counters, settings = torch.zeros(3).long(), (2.0, 0.5, 1, 0.0, 1e9, 1, 0.5)
        return torch.ones(1), *trackers, counters, flag, torch.ones(()), *settings
    if op == "inv_scale":
        return (one * 4,)
    if op == "update_delayed_scales_":
        histories, scales = [torch.ones(4), torch.zeros(4)], [torch.ones(()), torch.zeros(())]
        return histories, scales, [one * 2, one * 3], [448.0, 57344.0], 0, True, False
    return one.double(), 0.5


@pytest.mark.parametrize(("op", "variant", "dtype", "arrangement"), cases(), ids=str)
def test_opcheck(op: str, variant: str, dtype: torch.dtype, arrangement: str) -> None:
    raw = OPS[op].handle(variant)
    tests = ["test_faketensor", "test_autograd_registration"]
    if dtype not in FP8:  # it compares inputs before and after by arithmetic that FP8 lacks
        tests.append("test_schema")
    if arrangement == "permuted":  # the slow one, on the case with the most to get wrong
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(raw, arguments(op, dtype, arrangement), test_utils=tests)


def outputs(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result or ())


FUNCTIONAL = [c for c in cases() if not c[0].endswith("_")]


@pytest.mark.parametrize(("op", "variant", "dtype", "arrangement"), FUNCTIONAL, ids=str)
def test_fakes_give_the_exact_strides(
    op: str, variant: str, dtype: torch.dtype, arrangement: str
) -> None:
    raw = OPS[op].handle(variant)
    args = arguments(op, dtype, arrangement)
    real = outputs(raw(*args))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        promised = outputs(raw(*fake))
    assert len(real) == len(promised)
    for got, said in zip(real, promised, strict=True):
        assert (got.shape, got.dtype) == (said.shape, said.dtype)
        assert got.stride() == said.stride()
        assert got.storage_offset() == said.storage_offset()


def mutating_calls() -> list[tuple[str, Callable[[], tuple[list[torch.Tensor], Callable]]]]:
    def unscale() -> tuple[list[torch.Tensor], Callable]:
        grads, flag = [torch.ones(3), torch.ones(2).half()], torch.zeros(1)
        counts = torch.zeros(2, 4).long()
        return [*grads, flag, counts], partial(
            mixprec.unscale_, grads, torch.ones(()), flag, counts
        )

    def grad_stats() -> tuple[list[torch.Tensor], Callable]:
        flag, total, counts = torch.zeros(1), torch.zeros(1).double(), torch.zeros(1, 4).long()
        call = partial(ops.grad_stats_, [torch.ones(3)], None, flag, total, counts)
        return [flag, total, counts], call

    def accumulate() -> tuple[list[torch.Tensor], Callable]:
        acc, a = torch.zeros(2, 2), torch.ones(2, 2).half()
        return [acc], lambda: mixprec.gemm_accumulate_(acc, a, a)

    def scale() -> tuple[list[torch.Tensor], Callable]:
        s, inv = torch.ones(3), torch.ones(3)
        return [s, inv], lambda: ops.scale_from_amax_(s, inv, torch.ones(3), "e4m3")

    def update() -> tuple[list[torch.Tensor], Callable]:
        s, g, h = torch.ones(1), torch.ones(1).int(), torch.ones(1).int()
        c = torch.zeros(3).long()
        return [s, g, h, c], lambda: ops.update_scale_(s, g, h, c, torch.zeros(1))

    def adamw() -> tuple[list[torch.Tensor], Callable]:
        p, m, v, master, step = (torch.ones(3) for _ in range(5))
        p, step = p.bfloat16(), step[:1].clone()
        hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}
        lists = ([p], [torch.ones(3)], [m], [v], [master])
        return [p, m, v, master, step], lambda: ops.adamw_(*lists, step, **hyper)

    def sgd() -> tuple[list[torch.Tensor], Callable]:
        p, m, step = torch.ones(3).bfloat16(), torch.ones(3).bfloat16(), torch.zeros(1)
        lists = ([p], [torch.ones(3)], [m], [])
        return [p, m, step], lambda: ops.sgd_(
            *lists, step, lr=0.1, momentum=0.9, stochastic_rounding=True, indices=[4], seed=7
        )

    def delayed() -> tuple[list[torch.Tensor], Callable]:
        history, s, seen = torch.ones(3), torch.zeros(()), torch.ones(())
        call = partial(ops.update_delayed_scales_, [history], [s], [seen], [448.0])
        return [history, s, seen], call

    made = {
        "update_delayed_scales_": delayed,
        "unscale_": unscale,
        "grad_stats_": grad_stats,
        "gemm_accumulate_": accumulate,
        "scale_from_amax_": scale,
        "update_scale_": update,
        "adamw_": adamw,
        "sgd_": sgd,
    }
    assert set(made) == {op for op in OPS if op.endswith("_")}
    return list(made.items())


@pytest.mark.parametrize(
    "make", [m for _, m in mutating_calls()], ids=[n for n, _ in mutating_calls()]
)
def test_versions_of_mutated_tensors_are_bumped(backend: str, make: Callable) -> None:
    """Autograd notices that a tensor it saved was changed."""
    tensors, call = make()
    before = [t._version for t in tensors]
    call()
    assert all(t._version > v for t, v in zip(tensors, before, strict=True))
    with torch.inference_mode():
        tensors, call = make()
        call()  # inference tensors carry no version: no error


def test_a_changed_tensor_saved_for_backward_is_an_error() -> None:
    weight = torch.ones(3, requires_grad=True)
    grad = torch.ones(3)
    loss = (weight * grad).sum()
    mixprec.unscale_([grad], torch.tensor(0.5), torch.zeros(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def x2d(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal((8, 6), dtype)


COMPILED: dict[str, Callable[[], tuple[Callable, tuple[torch.Tensor, ...]]]] = {
    "amax": lambda: (mixprec.amax, (x2d(),)),
    "quantize": lambda: (
        lambda x: mixprec.quantize(x, "e4m3", transpose=True)[:4],
        (x2d(torch.bfloat16),),
    ),
    "quantize with a scale": lambda: (
        lambda x, s: mixprec.quantize(x, mixprec.E5M2, scale=s)[:3],
        (x2d().t(), torch.tensor(3.0)),
    ),
    "dequantize": lambda: (
        lambda x: mixprec.dequantize(mixprec.quantize(x, "fp16"), torch.bfloat16),
        (x2d(),),
    ),
    "gemm": lambda: (
        lambda a, b, s: mixprec.gemm(a, b, a_scale_inv=s, out_dtype=torch.float32),
        (x2d(torch.float16), x2d(torch.float16).t(), torch.tensor(0.5)),
    ),
    "gemm of Quantized": lambda: (
        lambda a, b: mixprec.gemm(mixprec.quantize(a, "e4m3"), mixprec.quantize(b, "e5m2").t()),
        (x2d(), x2d()),
    ),
    "inv_scale": lambda: (ops.inv_scale, (torch.tensor(3.0),)),
    "clip_coef": lambda: (lambda s: ops.clip_coef(s, 2.0), (torch.tensor(9.0).double(),)),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiles_without_graph_breaks(backend: str, case: str) -> None:
    torch._dynamo.reset()
    function, args = COMPILED[case]()
    eager = outputs(function(*args))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, want in zip(outputs(compiled(*args)), eager, strict=True):
        if want is not None:
            ind.assert_same_bits(got, want)
            assert got.stride() == want.stride()
    resized = tuple(torch.cat([a, a]) if a.dim() == 2 and case == "amax" else a for a in args)
    for got, want in zip(outputs(compiled(*resized)), outputs(function(*resized)), strict=True):
        if want is not None:
            ind.assert_same_bits(got, want, "second shape")


@pytest.mark.parametrize("op", [n for n, _ in mutating_calls()])
def test_mutating_ops_compile(op: str) -> None:
    torch._dynamo.reset()
    make = dict(mutating_calls())[op]
    tensors, call = make()
    call()
    traced, compiled_call = make()
    torch.compile(compiled_call, backend="aot_eager", fullgraph=True)()
    for got, want in zip(traced, tensors, strict=True):
        ind.assert_same_bits(got.double(), want.double(), op)


def test_raw_ops_give_no_silent_gradients() -> None:
    """An op without a formula must not let backward run as if it were a constant."""
    x = torch.ones(4, 4, requires_grad=True)
    for call in (
        lambda: mixprec.amax(x),
        lambda: mixprec.quantize(x, "e4m3"),
        lambda: mixprec.gemm(x.half(), x.half()),
        lambda: mixprec.gemm_accumulate_(torch.zeros(4, 4), x.half(), x.half()),
        lambda: mixprec.unscale_([x], torch.ones(()), torch.zeros(1)),
    ):
        with pytest.raises(RuntimeError, match="no derivative"):
            call()
        with torch.no_grad():
            call()


def test_raw_torch_ops_refuse_bad_arguments_too() -> None:
    """torch.ops.mixprec.* reached directly: an error, not a crash."""
    half = torch.ones(2, 3).half()
    for variant in ("gemm", "gemm_reference"):
        raw = getattr(torch.ops.mixprec, variant)
        with pytest.raises((ValueError, RuntimeError), match="gemm"):
            raw(half, half, None, None, None, torch.float32, False)
        with pytest.raises((ValueError, RuntimeError), match="gemm"):
            raw(half.float(), half.float().t(), None, None, None, torch.float32, False)
    for variant in ("unscale_", "unscale_reference_"):
        raw = getattr(torch.ops.mixprec, variant)
        grad = torch.ones(3)
        with pytest.raises((ValueError, RuntimeError), match="unscale_"):
            raw([grad, torch.ones(1).expand(4)], torch.tensor(0.5), torch.zeros(1), None)
        assert (grad == 1).all()


def test_memory_does_not_grow() -> None:
    """100 rounds of the functional ops keep no tensor alive."""

    def tensors_alive() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    x = normal((33, 65), torch.bfloat16)
    for _ in range(3):
        mixprec.dequantize(mixprec.quantize(x, "e4m3", transpose=True))
    before = tensors_alive()
    for _ in range(100):
        q = mixprec.quantize(x, "e4m3", transpose=True)
        mixprec.gemm(q, q.t())
        mixprec.amax(mixprec.dequantize(q))
    del q
    assert tensors_alive() <= before
