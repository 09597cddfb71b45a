"""What torch asks of an op: true schemas and fakes, traceable, versions bumped, no silent grads."""

from __future__ import annotations

import ctypes
import gc
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

import independent as ind
import pytest
import torch
from cases import FP8, WIDE, normal
from op_arguments import CROSS_ENTROPY, FUSED, UPDATES, arguments

import mixprec
from mixprec import ops
from mixprec.ops._dispatch import self_check
from mixprec.ops._dispatch.op import OPS

LOW = (torch.float16, torch.bfloat16, *FP8)
BLOCKS = ("quantize_mx", "dequantize_mx")
ARRANGEMENTS = ("contiguous", "permuted", "empty")


def cases() -> list[tuple[str, str, torch.dtype, str]]:
    fp64 = (*WIDE, torch.float64)
    dtypes = {
        **dict.fromkeys(("amax", "quantize", "pack", "unpack", *FUSED, *BLOCKS), WIDE),
        **dict.fromkeys(("attention", "attention_backward", "rotary"), WIDE),
        **dict.fromkeys(("dequantize", *(op for op in OPS if op.startswith("gemm"))), LOW),
        **dict.fromkeys(("unscale_", "grad_stats_", *UPDATES), fp64),
        **dict.fromkeys(("scale_from_amax_", *CROSS_ENTROPY), (torch.float32,)),
    }
    table = []
    for op in sorted(OPS.keys() - dtypes.keys()):
        table += [(op, variant, torch.float32, "contiguous") for variant in ("cpp", "reference")]
    for op, kinds in dtypes.items():
        # One dtype in every arrangement, every other dtype in one of them: they are independent.
        table += [(op, "cpp", kinds[0], arrangement) for arrangement in ARRANGEMENTS]
        for i, dtype in enumerate(kinds[1:]):
            table.append((op, "cpp", dtype, ARRANGEMENTS[i % 3]))
        # The reference shares schema, fake and check: permuted inputs alone show its strides.
        table.append((op, "reference", kinds[0], "permuted"))
    return table


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


@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith("_")])
def test_fakes_give_the_exact_strides(backend: str, op: str) -> None:
    """On every example of the op, and on the cases above."""
    given = [arguments(op, *case[2:]) for case in cases() if case[0] == op]
    raw = OPS[op].handle(backend)
    for args in (*given, *OPS[op].examples("cpu")):
        real = outputs(raw(*args))
        with torch._subclasses.FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            promised = outputs(raw(*fake))
        assert len(real) == len(promised)
        for got, said in zip(real, promised, strict=True):
            assert (got.shape, got.dtype) == (said.shape, said.dtype)
            assert got.stride() == said.stride()
            assert got.storage_offset() == said.storage_offset()


class _Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def in_use() -> int:
    """Bytes that malloc has handed out."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("glibc has mallinfo2 from 2.33 on")
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


@pytest.mark.parametrize("op", sorted(OPS))
def test_calls_leave_no_memory_in_use(op: str) -> None:
    """The conversion of a str argument by the headers of torch 2.11 to 2.13 does."""
    dtype = torch.bfloat16 if op.startswith(("gemm", "dequantize")) else torch.float32
    raw, args = OPS[op].handle("cpp"), arguments(op, dtype, "contiguous")
    few = 200
    for _ in range(few):
        raw(*args)
    gc.collect()
    before = in_use()
    for _ in range(few):
        raw(*args)
    assert in_use() - before < 16 * few


def mutating_call(op: str) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """The tensors that the op writes to, by its schema, and a call of the function."""
    products = ("gemm_accumulate_", "gemm_grouped_accumulate_")
    dtype = dict.fromkeys(products, torch.float16) | dict.fromkeys(UPDATES, torch.bfloat16)
    args = arguments(op, dtype.get(op, torch.float32), "contiguous")
    written = [
        value if isinstance(value, list) else [value]
        for argument, value in zip(OPS[op].handle()._schema.arguments, args, strict=True)
        if argument.alias_info and argument.alias_info.is_write
    ]
    named = dict(zip(OPS[op].arguments, args, strict=True))
    named |= {"fmt": named.pop("dtype")} if op == "scale_from_amax_" else {}
    if op in UPDATES:
        states, settings = named.pop("states"), named.pop("settings")
        named |= {name: [state] for name, state in zip(OPS[op].states, states, strict=True)}
        named |= zip(OPS[op].settings, settings, strict=True)
        named.pop("lr_tensor")  # an lr that is a tensor
    return list(chain(*written)), lambda: getattr(ops, op)(**named)


mutating = pytest.mark.parametrize("op", [op for op in OPS if op.endswith("_")])


@mutating
def test_versions_of_mutated_tensors_are_bumped(backend: str, op: str) -> None:
    """Autograd notices that a tensor it saved was changed."""
    tensors, call = mutating_call(op)
    before = [t._version for t in tensors]
    call()
    assert tensors
    assert all(t._version > v for t, v in zip(tensors, before, strict=True))
    with torch.inference_mode():
        mutating_call(op)[1]()  # inference tensors carry no version: no error


OFFS = torch.tensor([1, 4], dtype=torch.int32)
X, HALF, SCALE = normal((8, 6), torch.float32), normal((8, 6), torch.float16), torch.tensor(3.0)
COMPILED: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    "quantize": (lambda x: mixprec.quantize(x, "e4m3", transpose=True)[:4], (X.bfloat16(),)),
    "quantize with a scale": (
        lambda x, s: mixprec.quantize(x, mixprec.E5M2, scale=s)[:3],
        (X.t(), SCALE),
    ),
    "gemm": (
        lambda a, b, s: mixprec.gemm(a, b, a_scale_inv=s, out_dtype=torch.float32),
        (HALF, HALF.t(), SCALE),
    ),
    "gemm of Quantized": (
        lambda a, b: mixprec.gemm(mixprec.quantize(a, "e4m3"), mixprec.quantize(b, "e5m2").t()),
        (X, X.clone()),
    ),
    "gemm_grouped": (
        lambda a, b, offs: ops.gemm_grouped(a, b.t(), offs),
        (HALF.t(), HALF.t(), OFFS),
    ),
    "act_quantize": (lambda x, y: mixprec.act_quantize(x, "e4m3", y)[:3], (HALF, HALF + 1)),
    "norm_quantize": (
        lambda x, s: mixprec.norm_quantize(x, "e4m3", scale=s, transpose=True)[0][:4],
        (X.bfloat16(), SCALE),
    ),
    "unpack": (lambda x: ops.unpack(*ops.pack(x, 2), 2, x.shape, x.dtype), (HALF,)),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiles_without_graph_breaks(backend: str, case: str) -> None:
    function, args = COMPILED[case]
    eager = outputs(function(*args))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, want in zip(outputs(compiled(*args)), eager, strict=True):
        if want is not None:
            ind.assert_same_bits(got, want)
            assert got.stride() == want.stride()
    resized = tuple(torch.cat([a, a]) if a.dim() == 2 and case == "quantize" else a for a in args)
    for got, want in zip(outputs(compiled(*resized)), outputs(function(*resized)), strict=True):
        if want is not None:
            ind.assert_same_bits(got, want, "second shape")


@mutating
def test_mutating_ops_compile(op: str) -> None:
    (eager, call), (traced, compiled_call) = mutating_call(op), mutating_call(op)
    call()
    torch.compile(compiled_call, backend="aot_eager", fullgraph=True)()
    for got, want in zip(traced, eager, strict=True):
        ind.assert_same_bits(got.double(), want.double(), op)


def test_raw_ops_give_no_silent_gradients() -> None:
    """An op without a formula must not let backward run as if it were a constant."""
    x, plain = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    half, number = plain.half(), torch.ones(1, requires_grad=True)
    for call in (
        lambda: mixprec.amax(x),
        lambda: mixprec.quantize(x, "e4m3"),
        lambda: mixprec.quantize(plain, "e4m3", number),
        lambda: mixprec.quantize(plain, "e4m3", number * 0),
        lambda: mixprec.dequantize(mixprec.quantize(plain, "e4m3")._replace(scale_inv=number)),
        lambda: mixprec.act_quantize(x.detach(), "bf16", x),
        lambda: mixprec.norm_quantize(x.detach(), "bf16", x[0]),
        lambda: ops.pack(x, 8),
        lambda: ops.attention(*[x.view(1, 1, 4, 4)] * 3, True, 1.0),
        lambda: ops.cross_entropy(x, torch.arange(4), plain),
        lambda: ops.rotary(x.view(1, 1, 4, 4), torch.ones(4, 2), torch.ones(4, 2)),
        lambda: ops.rotary(plain.view(1, 1, 4, 4), torch.ones(4, 2), x[:, :2]),
        lambda: mixprec.gemm(x.half(), half),
        lambda: mixprec.gemm(half, x.half()),
        lambda: mixprec.gemm(half, half, bias=x[0]),
        lambda: mixprec.gemm(half, half, b_scale_inv=x[:1]),
        lambda: mixprec.gemm_accumulate_(torch.zeros(4, 4), x.half(), x.half()),
        lambda: mixprec.gemm_accumulate_(x, half, half),
        lambda: ops.gemm_grouped(x.half(), half, OFFS),
        lambda: ops.gemm_grouped(half, x.half(), OFFS),
        lambda: ops.gemm_grouped_accumulate_(torch.zeros(2, 4, 4), x.half(), half, OFFS),
        lambda: mixprec.unscale_([x], torch.ones(()), torch.zeros(1)),
        lambda: ops.grad_stats_([x], None, torch.zeros(1), torch.zeros(1).double()),
        lambda: ops.sgd_([x], [plain], [], [], torch.zeros(1), lr=0.1),
        lambda: ops.muon_direction_([x], [plain], [plain], [], torch.zeros(1), momentum=0.9),
    ):
        with pytest.raises(RuntimeError, match="no derivative"):
            call()
        with torch.no_grad():
            call()


# Their kernels take no sizes, or no GPU has a kernel for them.
WITHOUT_TWINS = ("inv_scale", "clip_coef", "update_scale_", "update_delayed_scales_", "attention",
                 "attention_backward", "gemm_simulated")  # fmt: skip


@pytest.mark.parametrize("op", sorted(OPS.keys() - set(WITHOUT_TWINS)))
def test_examples_come_in_twins(op: str) -> None:
    """Those that a kernel is compared on (which of them, for a call: test_triton_compile.py).
    With the same dtypes and options there are a multiple of 16 elements and another number, and
    in each list both, and one that begins between multiples of 16 bytes."""
    twins = defaultdict(set)
    for example in OPS[op].examples("cpu"):
        first, (kernel, *_) = example[0], self_check.kind(OPS[op].arguments, example)
        if isinstance(first, list):
            found = {(self_check._aligned(x), x.numel() % 16 == 0) for x in first}
            assert found >= {(True, True), (True, False), (False, True)}
        else:
            twins[kernel].add(first.numel() % 16 == 0)
    assert all(found == {False, True} for found in twins.values()), twins
