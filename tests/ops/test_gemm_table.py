"""Which gemm runs on a GPU: what torch's own can do exactly, measured entries, the user's entries.

Played on the CPU: the tensors are CPU tensors, and `call` is told that they are CUDA's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FP8, name, small_integers

import mixprec
from mixprec.ops._dispatch import backends, gemm_table, gemm_vendor, library, self_check
from mixprec.ops._dispatch.op import Op
from mixprec.ops.gemm import gemm_accumulate_op, gemm_op

E4M3, E5M2 = FP8
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ONE = torch.ones(())


def operands(
    dtype: torch.dtype, m: int = 32, n: int = 48, k: int = 64, b_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [M, K] with K contiguous, b [K, N] with K contiguous."""
    return small_integers((m, k), dtype), small_integers((n, k), b_dtype or dtype).t()


def arguments(
    a: Any, b: Any, out: torch.dtype, a_inv: Any = None, b_inv: Any = None, bias: Any = None
) -> tuple[Any, ...]:
    return a, b, a_inv, b_inv, bias, out, False


ROW, COLUMN = torch.ones(32, 1), torch.ones(1, 48)
A8, B8 = operands(E4M3)
CAN: dict[str, tuple[Any, ...]] = {
    "fp16": arguments(*operands(HALF), HALF),
    "bf16": arguments(*operands(BF16), BF16),
    "bf16 of any size": arguments(*operands(BF16, 3, 5, 7), BF16),
    "bf16 of any strides": arguments(operands(BF16)[0], operands(BF16)[1].contiguous(), BF16),
    "bf16 to fp32": arguments(*operands(BF16), FP32),
    "bf16 bias": arguments(*operands(BF16), BF16, bias=torch.ones(48).bfloat16()),
    "K = 0": arguments(torch.ones(4, 0).half(), torch.ones(0, 5).half(), HALF),
    "fp8": arguments(A8, B8, BF16, ONE, ONE),
    "fp8 to fp32, no scale": arguments(A8, B8, FP32),
    "fp8 to fp16": arguments(A8, B8, HALF, ONE.view(1, 1), None),
    "fp8 with a bias": arguments(A8, B8, BF16, ONE, ONE, torch.ones(48).bfloat16()),
    "fp8 that starts anywhere": arguments(
        *(operands(E4M3, k=80)[0][:, 8:72], operands(E4M3, k=80)[1][3:67], BF16, ONE, ONE)
    ),
    "e5m2 x e4m3": arguments(*operands(E5M2, b_dtype=E4M3), BF16, ONE, ONE),
    "fp8 by rows": arguments(A8, B8, BF16, ROW, COLUMN),
}
BIAS, STRIDED = torch.ones(48), torch.ones(96).bfloat16()[::2]
B5, ROWS = operands(E5M2)[1], torch.ones(32, 2)
LINES = small_integers((32, 72), E4M3)[:, :64]
SCALES_OF_BLOCKS = torch.ones(32, 2), torch.ones(2, 1)
CANNOT: dict[str, tuple[tuple[Any, ...], str]] = {
    "a scale": (arguments(*operands(BF16), BF16, ONE), "no scales for bfloat16"),
    "bias of another dtype": (arguments(*operands(BF16), BF16, bias=BIAS), "takes a bias only"),
    "bias to fp32": (arguments(*operands(HALF), FP32, bias=BIAS), "takes a bias only"),
    "fp16 to bf16": (arguments(*operands(HALF), BF16), "float16 operands no bfloat16 result"),
    "e5m2 x e5m2": (arguments(*operands(E5M2), BF16, ONE, ONE), "float8_e5m2 by float8_e5m2"),
    "odd K": (arguments(*operands(E4M3, k=40), BF16, ONE, ONE), "multiples of 16, got K = 40"),
    "odd N": (arguments(*operands(E4M3, n=50), BF16, ONE, ONE), "multiples of 16, .*N = 50"),
    "empty": (arguments(*operands(E4M3, m=0), BF16, ONE, ONE), "multiples of 16"),
    "b by rows": (arguments(A8, B8.contiguous(), BF16, ONE, ONE), "K next to each other"),
    "a by columns": (arguments(A8.t().contiguous().t(), B8, BF16, ONE, ONE), "K next to"),
    "odd line": (arguments(LINES, B8, BF16, ONE, ONE), "lines 16 bytes apart"),
    "fp32 bias": (arguments(A8, B8, BF16, ONE, ONE, BIAS), "no float32 bias for a bfloat16 res"),
    "bias to an fp32 result": (arguments(A8, B8, FP32, ONE, ONE, BIAS), "bias for a float32 res"),
    "strided bias": (arguments(A8, B8, BF16, ONE, ONE, STRIDED), "contiguous bias"),
    "mixed granularities": (arguments(A8, B8, BF16, ROW, ONE), "one granularity"),
    "blocks": (arguments(*operands(E4M3, k=256), BF16, *SCALES_OF_BLOCKS), "scales of blocks"),
    "rows to fp32": (arguments(A8, B8, FP32, ROW, COLUMN), "bfloat16 result"),
    "rows, e5m2 b": (arguments(A8, B5, BF16, ROW, COLUMN), "float8_e4m3fn b"),
    "strided scales": (arguments(A8, B8, BF16, ROWS[:, :1], COLUMN), "contiguous scales"),
}


@pytest.mark.parametrize("case", CAN)
def test_what_torch_does_in_one_call_has_the_right_values(case: str) -> None:
    """The very calls, on torch's CPU kernels (which have no FP32 result for 16-bit operands)."""
    args = CAN[case]
    assert gemm_vendor.gemm_why_not(gemm_op.Args(*args), (9, 0)) is None
    if args[0].dtype.itemsize == 2 and args[5] == FP32:
        pytest.skip("torch's CPU kernels give 16-bit operands no fp32 result")
    got = gemm_vendor.gemm_vendor(*args)
    want = torch.ops.mixprec.gemm_reference(*args)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert torch.equal(got, want)


@pytest.mark.parametrize("case", CANNOT)
def test_what_torch_cannot_do_is_refused_with_the_reason(case: str) -> None:
    args, reason = CANNOT[case]
    refused = gemm_vendor.gemm_why_not(gemm_op.Args(*args), (9, 0))
    assert refused is not None
    assert re.search(f"^torch.*{reason}", refused)


def test_what_a_gpu_is_too_old_for() -> None:
    old, rows = "8.9 or more", "only on compute capability 9 and 10"
    for capability, of_plain, of_rows in (
        *(((8, 0), old, old), ((8, 9), None, rows), ((9, 0), None, None)),
        *(((12, 0), None, rows), (None, None, None)),
    ):
        for case, reason in (("fp8", of_plain), ("fp8 by rows", of_rows), ("bf16", None)):
            got = gemm_vendor.gemm_why_not(gemm_op.Args(*CAN[case]), capability)
            assert (got is None) is (reason is None)
            assert reason is None or reason in (got or "")
    args = gemm_op.Args(*CAN["fp8"])
    assert gemm_table.cuda_why_not(args, (9, 0)) is None
    too_old = str(gemm_table.cuda_why_not(args, (8, 0)))
    assert "for compute capability 9.0 (Hopper), this GPU is 8.0" in too_old


@pytest.mark.parametrize("head", [(), ("acc",)])
def test_the_cuda_kernel_has_scales_along_k_for_fp8_only(head: tuple[Any, ...]) -> None:
    def why_not(dtype: torch.dtype, *shapes: tuple[int, ...] | None) -> str | None:
        scales = [None if shape is None else torch.ones(shape) for shape in shapes]
        a, b = (torch.ones(shape).to(dtype) for shape in ((256, 384), (384, 128)))
        tail = () if head else (None, FP32, False)
        op = gemm_accumulate_op if head else gemm_op
        return gemm_table.cuda_why_not(op.Args(*head, a, b, *scales, *tail), (9, 0))

    for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert why_not(fp8, (256, 3), (3, 1)) is None
    for shapes in ((None, None), ((), ()), ((256, 1), (1, 128)), (None, (1, 128))):
        assert why_not(torch.bfloat16, *shapes) is None
    for shapes in (((256, 3), None), ((2, 3), (1, 128)), (None, (3, 128)), ((), (3, 1))):
        assert "FP8 operands only" in str(why_not(torch.float16, *shapes))


def test_accumulate_is_the_fp32_product_added() -> None:
    def why_not(*args: Any) -> str | None:
        return gemm_vendor.gemm_accumulate_why_not(gemm_accumulate_op.Args(*args), (9, 0))

    acc = small_integers((32, 48), FP32, seed=5)
    want, args = acc.clone(), (A8, B8, ONE * 2, ONE / 4)
    assert why_not(acc, *args) is None
    gemm_vendor.gemm_accumulate_vendor_(acc, *args)
    torch.ops.mixprec.gemm_accumulate_reference_(want, *args)
    assert torch.equal(acc, want)
    assert "bfloat16 result" in str(why_not(acc, A8, B8, ROW, COLUMN)), "no FP32 result by rows"
    assert why_not(acc, *operands(BF16), None, None) is None


FLAGS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=name)
@pytest.mark.parametrize("on", [True, False])
def test_torch_sums_in_fp32_whatever_the_flags_say(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, on: bool
) -> None:
    """They are off during the launch, and afterwards as before, also after an error."""
    matmul, seen = torch.backends.cuda.matmul, []
    kind = "fp16" if dtype == HALF else "bf16"

    def mm(a: torch.Tensor, b: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append([getattr(matmul, flag) for flag in FLAGS if kind in flag])
        raise MemoryError

    monkeypatch.setattr(torch, "mm", mm)
    before = [getattr(matmul, flag) for flag in FLAGS]
    try:
        for flag in FLAGS:
            setattr(matmul, flag, on)
        for out in (dtype, FP32):
            with pytest.raises(MemoryError):
                gemm_vendor.gemm_vendor(*arguments(*operands(dtype), out))
        assert [getattr(matmul, flag) for flag in FLAGS] == [on] * 3
    finally:
        for flag, value in zip(FLAGS, before, strict=True):
            setattr(matmul, flag, value)
    assert seen == [[False] * (2 if dtype == HALF else 1)] * 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As on a GPU of compute capability 9.0 with everything built, without any entry."""
    monkeypatch.setattr(library, "TRITON_ERROR", None)
    monkeypatch.setattr(library, "CUDA_ERROR", None)
    monkeypatch.setattr(library, "CUDA_ARCHS", "9.0a")
    monkeypatch.setattr(library, "has_cuda_kernel", lambda op: True)
    monkeypatch.setitem(library._capabilities, 0, (9, 0))
    for op in (gemm_op, gemm_accumulate_op):
        monkeypatch.setattr(op, "_able", {})
        monkeypatch.setattr(op, "agreed", {})
    monkeypatch.setenv("MIXPREC_TUNED", "/nowhere/gemm_table.json")
    gemm_table.table.cache_clear()
    yield monkeypatch
    gemm_table.table.cache_clear()


def chosen(args: tuple[Any, ...]) -> str:
    return gemm_op.backend_of_call(0, args)


def on_gpu(*args: Any) -> Any:
    """A call as for tensors on a GPU."""
    try:
        return gemm_op.choose("cuda", 0, args)(*args)
    except Exception:
        gemm_op.check(*args)
        raise


def test_without_an_entry_torch_where_it_is_exact_else_ours(gpu: pytest.MonkeyPatch) -> None:
    assert all(chosen(args) == "vendor" for args in CAN.values())
    assert all(chosen(args) == "cuda" for args, _ in CANNOT.values())
    acc = torch.zeros(32, 48)
    assert gemm_accumulate_op.backend_of_call(0, (acc, A8, B8, ONE, ONE)) == "vendor"
    assert gemm_accumulate_op.backend_of_call(0, (acc, A8, B8, ROW, ONE)) == "cuda"
    gpu.setitem(library._capabilities, 0, (8, 0))
    gpu.setattr(library, "CUDA_ARCHS", "8.0")
    gemm_op._able.clear()
    assert chosen(CAN["bf16"]) == "vendor"
    assert chosen(CAN["fp8"]) == "triton", "the CUDA kernel is Hopper's"
    gpu.setattr(library, "TRITON_ERROR", "not installed")
    gemm_op._able.clear()
    assert chosen(CAN["fp8"]) == "reference"


def test_the_error_lists_every_variant_with_its_reason(gpu: pytest.MonkeyPatch) -> None:
    with mixprec.use_backend("vendor"):
        assert chosen(CAN["bf16"]) == "vendor"
        with pytest.raises(RuntimeError, match=r"^gemm: no backend can run on cuda. vendor: torch"):
            chosen(CANNOT["a scale"][0])
    with mixprec.use_backend("cuda"):
        assert chosen(CAN["bf16"]) == "cuda", "overridden"
    gpu.setattr(gemm_table, "DEFAULT", ("vendor", "cuda", "triton"))
    gpu.setitem(library._capabilities, 0, (8, 0))
    gpu.setattr(library, "CUDA_ARCHS", "8.0")
    gpu.setattr(library, "TRITON_ERROR", "triton is not installed")
    gemm_op._able.clear()
    reasons = r"vendor: torch._scaled_mm needs .* 8\.9 .*; cuda: .*Hopper.* 8\.0; triton: .*not"
    with pytest.raises(RuntimeError, match=reasons):
        chosen(CAN["fp8"])


def test_bad_arguments_are_named_by_the_check(gpu: pytest.MonkeyPatch) -> None:
    """Choosing looks at shapes: what it trips over, the op's own check explains."""
    a, b = operands(BF16)
    cases = {r"a must be \[M, K\]": (a[0], b), "agree in K": (a, b[:3])}
    cases |= {"a and b must both be": (a, b.half()), "b must be a torch.Tensor": (a, None)}
    for message, bad in cases.items():
        with pytest.raises((ValueError, TypeError), match=f"^gemm: .*{message}"):
            on_gpu(*arguments(*bad, BF16))


TILE = {"block_m": 64, "block_n": 128, "block_k": 64, "warps": 4, "stages": 3}
ENTRIES = {
    "9.0": {"16-bit thin": ("cuda", None), "fp8 small": ("triton", TILE)},
    "8.0": {"fp8 medium": ("cuda", None)},
}


def test_entries_decide_for_their_arch_family_and_size(
    gpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "entries.json").write_text(json.dumps(ENTRIES))
    gpu.setenv("MIXPREC_TUNED", str(tmp_path / "entries.json"))
    large = operands(BF16, 80, 96, 64)
    assert chosen(CAN["bf16"]) == "cuda"
    assert chosen(arguments(*large, BF16)) == "vendor", "of another size"
    assert chosen(arguments(*operands(E4M3, 80, 96, 64), BF16, ONE, ONE)) == "triton"
    assert chosen(CAN["fp8"]) == "vendor"
    gpu.setattr(library, "has_cuda_kernel", lambda op: False)
    gemm_op._able.clear()
    assert chosen(CAN["bf16"]) == "vendor", "its variant cannot run: the usual order"


def test_where_the_users_entries_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIXPREC_TUNED", str(tmp_path / "mine.json"))
    assert gemm_table.user_file() == tmp_path / "mine.json"
    monkeypatch.delenv("MIXPREC_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gemm_table.user_file() == tmp_path / "mixprec" / "gemm_table.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gemm_table.user_file() == tmp_path / ".cache" / "mixprec" / "gemm_table.json"


DAMAGED = [b"", b"{", b"[1]", b'{"9.0": 1}', b'{"9.0": {"fp8 thin": ["cuda"]}}', b"[" * 100_000]
DAMAGED += [b"\xff\xfe", b'{"9.0": {"fp8 thin": ["reference", null]}}']


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_named_once_and_ignored(
    gpu: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    path = tmp_path / "entries.json"
    path.write_bytes(text)
    gpu.setenv("MIXPREC_TUNED", str(path))
    with caplog.at_level(logging.WARNING, "mixprec"):
        assert [chosen(CAN["bf16"]) for _ in range(3)] == ["vendor"] * 3
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert "mixprec.bench tune" in caplog.text


def test_size_classes() -> None:
    sizes = {
        "thin": [(64, 4096, 4096, 2), (4096, 1, 4096, 1), (0, 0, 0, 2)],
        "small": [(65, 4096, 4096, 2), (1448, 1448, 1448, 2)],
        "unaligned": [(2047, 3073, 8192, 2), (2048, 3080, 8192, 1), (1448, 1448, 1448, 1)],
        "medium": [(2048, 3080, 8192, 2), (1456, 1448, 1448, 2), (4096, 4096, 4096, 2)],
        "large": [(4096, 4096, 4112, 1)],
    }
    for size, cases in sizes.items():
        assert [gemm_table.size_class(*case) for case in cases] == [size] * len(cases)


@pytest.fixture
def vendor_on_cpu() -> Iterator[list[str]]:
    """The vendor variant for CPU tensors; yields the names of the variants that ran."""
    ran: list[str] = []

    def gemm_vendor(*args: Any) -> torch.Tensor:
        ran.append("vendor")
        return gemm_op.checked_vendor(*args)

    library = torch.library.Library("mixprec", "IMPL")
    library.impl("gemm_vendor", gemm_vendor, "CPU")
    yield ran
    library._destroy()


def test_the_choice_compiles_into_one_graph(
    gpu: pytest.MonkeyPatch, fresh_compiler: None, vendor_on_cpu: list[str], tmp_path: Path
) -> None:
    """fullgraph, also where the table is first read while tracing; another choice is traced anew.
    (The variant "cuda" is the op mixprec::gemm, which has a kernel for these tensors too.)"""
    (tmp_path / "entries.json").write_text(json.dumps(ENTRIES))
    gpu.setenv("MIXPREC_TUNED", str(tmp_path / "entries.json"))

    @torch.compile(fullgraph=True, backend="eager")
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return on_gpu(a, b, None, None, None, BF16, False)

    thin, larger = operands(BF16), operands(BF16, 80, 96, 64)
    assert torch.equal(product(*thin), thin[0] @ thin[1])
    assert not vendor_on_cpu, "the entry says cuda"
    assert torch.equal(product(*larger), larger[0] @ larger[1])
    assert vendor_on_cpu == ["vendor"]
    assert torch.equal(product(*thin), thin[0] @ thin[1])
    assert vendor_on_cpu == ["vendor"]


def test_sizes_that_change_compile_too(
    gpu: pytest.MonkeyPatch, fresh_compiler: None, vendor_on_cpu: list[str]
) -> None:
    """With M left open, the choice is made for all of a size class at once."""
    graphs = []

    def counted(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=counted, dynamic=True)
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return on_gpu(a, b, ONE, ONE, None, BF16, False)

    for m in (80, 96, 112):
        a, b = operands(E4M3, m, 96, 64)
        assert torch.equal(product(a, b), (a.float() @ b.float()).bfloat16())
    assert len(graphs) == 1
    assert vendor_on_cpu == ["vendor"] * 3


def test_each_variant_is_compared_with_what_it_can_do(gpu: pytest.MonkeyPatch) -> None:
    """Before its first use, on the inputs that it does not refuse."""
    seen = []

    def difference(op: Op, run: object, device: str, skip: Any) -> None:
        kept = [args for args in op.examples("cpu") if not skip(args)]
        seen.append((op.name, device, len(kept)))

    gpu.setattr(self_check, "difference", difference)
    gpu.setattr(backends, "can_compare", lambda: True)
    for _ in range(2):
        gemm_op.choose("cuda", 0, CAN["bf16"])
        gemm_op.choose("cuda", 0, CANNOT["a scale"][0])
    every = len(list(gemm_op.examples("cpu")))
    (of_vendor, of_cuda) = seen
    assert of_cuda == ("gemm", "cuda:0", every)
    assert of_vendor[:2] == ("gemm", "cuda:0")
    assert 5 <= of_vendor[2] < every, "fp16, bf16, and FP8 in two mixes, one of them by rows"


def test_autocast_does_not_reach_into_the_variant(vendor_on_cpu: list[str]) -> None:
    args = arguments(*operands(HALF), HALF)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(*args[:2]).dtype == BF16, "what has to be kept out"
        assert gemm_op._vendor(*args).dtype == HALF
        assert torch.ops.mixprec.gemm_vendor(*args[:5], BF16, False).dtype == BF16
    assert vendor_on_cpu == ["vendor"]


def test_the_raw_variant_refuses_what_it_cannot_do(vendor_on_cpu: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"^gemm: torch.mm takes no scales for bfloat16"):
        torch.ops.mixprec.gemm_vendor(*CANNOT["a scale"][0])
    with pytest.raises(ValueError, match=r"^gemm: a \[M, K\] and b \[K, N\] must agree in K"):
        torch.ops.mixprec.gemm_vendor(*arguments(A8, B8[:32], BF16, ONE, ONE))
