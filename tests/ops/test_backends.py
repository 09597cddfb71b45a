"""Which variant runs: the order, the forced one, and the reasons when none can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mixprec
from mixprec.ops._dispatch import backends, library
from mixprec.ops._dispatch.op import OPS, Op


def test_the_kernels_are_built_and_chosen_on_the_cpu() -> None:
    assert library.LOAD_ERROR is None
    assert library.C is not None
    for op in OPS.values():
        assert op.why_not("cpp", "cpu") is None
        assert op.backend("cpu") == "cpp"


def test_use_backend_is_restored_after_an_error() -> None:
    with pytest.raises(ValueError, match=r"^dequantize"), mixprec.use_backend("reference"):
        mixprec.dequantize(mixprec.quantize(torch.ones(2), "fp16"), torch.int8)
    assert OPS["amax"].backend("cpu") == "cpp"
    assert mixprec.amax(torch.tensor([-2.0])).item() == 2.0


@pytest.mark.parametrize("backend", ["CUDA", "", None])
def test_unknown_backend(backend: object) -> None:
    expected = r"^use_backend: backend must be one of .*cpp.*got"
    with pytest.raises(ValueError, match=expected), mixprec.use_backend(backend):
        pytest.fail("the block must not run")
    assert OPS["gemm"].backend("cpu") == "cpp"
    assert "unknown backend" in str(OPS["gemm"].why_not("opencl", "cpu"))


def test_missing_build_is_an_error_with_the_command(fresh: pytest.MonkeyPatch) -> None:
    """No silent slow path: without the kernels, the first op says how to build them."""
    why = f"mixprec._C is not built: run: {library.INSTALL}"
    fresh.setattr(library, "LOAD_ERROR", why)
    with pytest.raises(RuntimeError, match=r"^amax: no backend can run on cpu.*cpp: .*pip install"):
        mixprec.amax(torch.ones(2))
    with mixprec.use_backend("reference"):
        assert mixprec.amax(torch.ones(2)).item() == 1.0


def refusal(op: str, backend: str) -> str:
    """Why the op cannot run for cuda tensors on a backend that is asked for."""
    with mixprec.use_backend(backend), pytest.raises(RuntimeError) as caught:
        OPS[op].choose("cuda")
    assert str(caught.value).startswith(f"{op}: no backend can run on cuda")
    return str(caught.value)


def test_forced_backend_that_cannot_run_says_why() -> None:
    assert "run on cpu tensors" in refusal("amax", "cpp")
    with pytest.raises(NotImplementedError, match="amax_triton"):
        torch.ops.mixprec.amax_triton(torch.ones(2))


def test_on_a_gpu_cuda_comes_first_then_triton(gpu: pytest.MonkeyPatch) -> None:
    """Where one cannot run the next does, and the reason is given."""
    gpu.setattr(library, "has_cuda_kernel", lambda op: op == "amax")
    assert OPS["amax"].order("cuda") == ("cuda", "triton", "reference")
    assert OPS["amax"].backend("cuda") == "cuda"
    assert OPS["quantize"].backend("cuda") == "triton"
    assert OPS["gemm"].why_not("cuda", "cuda") == "it has no CUDA kernel"
    assert OPS["amax"].why_not("vendor", "cuda") == "torch has no kernel for the same job"
    gpu.setattr(OPS["amax"], "triton", None)
    with mixprec.use_backend("triton"):
        assert OPS["quantize"].backend("cuda") == "triton"
    assert "triton: it has no Triton kernel" in refusal("amax", "triton")
    for backend in ("triton", "cuda", "vendor"):
        reason = OPS["gemm"].why_not(backend, "cpu")
        assert str(reason).endswith("kernels run on cuda tensors, not cpu")
    gpu.setattr(library, "TRITON_ERROR", "triton is not installed: pip install triton")
    gpu.setattr(library, "CUDA_ERROR", "they were not built: no nvcc")
    assert OPS["quantize"].backend("cuda") == "reference"
    assert "pip install triton" in refusal("quantize", "triton")
    assert "no nvcc" in refusal("amax", "cuda")


ALL = "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"
# A build's architectures: the GPUs that it runs on, and those that it does not.
ARCHS = {
    ALL: ([(8, 0), (8, 7), (9, 0), (10, 3), (13, 1)], [(7, 5), (11, 0)]),  # 11.0: PTX is of 12.0
    "9.0a": ([(9, 0)], [(10, 0)]),
    "9.0a+PTX": ([], [(10, 0)]),
    "8.0+PTX": ([(9, 0)], []),
    "10.0f": ([(10, 3)], [(12, 0)]),
    "7.0 7.5": ([(7, 5)], []),  # torch takes spaces too
    "Hopper": ([(8, 0)], []),  # a name that only torch knows: nothing is refused
}


@pytest.mark.parametrize("archs", ARCHS)
def test_which_gpus_a_build_is_for(archs: str) -> None:
    runs, refused = ARCHS[archs]
    assert [backends.why_not_built(archs, capability) for capability in runs] == [None] * len(runs)
    for major, minor in refused:
        reason = str(backends.why_not_built(archs, (major, minor)))
        assert reason.startswith("the CUDA kernels were built for ")
        assert f"this GPU is {major}.{minor};" in reason


def test_a_gpu_that_the_build_is_not_for_falls_to_triton(gpu: pytest.MonkeyPatch) -> None:
    capabilities = {0: (9, 0), 1: (7, 5)}
    gpu.setattr(library, "capability", capabilities.__getitem__)
    assert OPS["amax"].backend("cuda", 0) == "cuda"
    assert OPS["amax"].backend("cuda", 1) == "triton"
    reason = str(OPS["amax"].why_not("cuda", "cuda", 1))
    assert "built for 8.0, 9.0a, 12.0+PTX, and this GPU is 7.5" in reason
    gpu.setattr(library, "capability", lambda index: None)  # torch sees no GPU: nothing to refuse
    assert OPS["amax"].backend("cuda", 1) == "cuda"
    gpu.setattr(library, "capability", capabilities.__getitem__)
    gpu.setattr(library, "driver", lambda: 12000)  # without large arguments of kernels
    assert OPS["quantize"].backend("cuda", 0) == "triton"


def test_a_gpu_kernel_is_compared_before_its_first_use(gpu: pytest.MonkeyPatch) -> None:
    """Once per kernel and GPU: what one GPU gets right another need not."""
    asked = []

    def difference(op: Op, run: object, device: str, skip: object) -> str | None:
        asked.append((op.name, device))
        return None if op.name == "amax" else "1 of 2 values differ"

    gpu.setattr(Op, "difference", difference)
    gpu.setattr(backends, "can_compare", lambda: False)
    OPS["amax"].choose("cuda", 0)
    assert not asked, "while tracing, for example"
    gpu.setattr(backends, "can_compare", lambda: True)
    for _ in range(2):
        OPS["amax"].choose("cuda", 0)
        with mixprec.use_backend("cuda"):
            OPS["amax"].choose("cuda", 0)
    assert asked == [("amax", "cuda:0")], "once, and not forgotten because tracing came first"
    for _ in range(2):
        OPS["amax"].choose("cuda", 1)
    assert asked == [("amax", "cuda:0"), ("amax", "cuda:1")]


def test_a_gpu_kernel_that_disagrees_is_left_out_and_the_next_one_runs(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On that GPU alone, with one line in the log; what is asked for by name is refused."""
    wrong = {"amax": ["cuda"], "quantize": ["cuda", "triton"], "gemm": ["cuda", "triton"]}

    def difference(op: Op, run: Any, device: str, skip: object) -> str | None:
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        runs = [v for v in wrong[op.name] if run == op.handle(v) and device == "cuda:0"]
        return "1 of 2 values differ" if runs else None

    gpu.setattr(Op, "difference", difference)
    gpu.setattr(backends, "can_compare", lambda: True)
    for _ in range(2):
        with FlopCounterMode(display=False):
            assert OPS["amax"].choose("cuda", 0) == OPS["amax"].handle("triton")
        assert OPS["quantize"].choose("cuda", 0) == OPS["quantize"].handle("reference")
        assert OPS["quantize"].choose("cuda", 1) == OPS["quantize"].handle()
        args = next(iter(OPS["gemm"].examples("cpu")))
        assert OPS["gemm"].choose("cuda", 0, tuple(args)) == OPS["gemm"].handle("reference")
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == sum(map(len, wrong.values()))
    assert errors[0].startswith("amax: the cuda kernel does not agree with its reference on this ")
    assert "(1 of 2 values differ). It is left out" in errors[0]
    assert "does not agree" in str(OPS["amax"].why_not("cuda", "cuda", 0))
    with (
        mixprec.use_backend("cuda"),
        pytest.raises(RuntimeError, match=r"cuda: .* not agree .*differ"),
    ):
        OPS["amax"].choose("cuda", 0)


def test_triton_compiles_and_compares_what_is_about_to_run(gpu: pytest.MonkeyPatch) -> None:
    asked = []

    def difference(op: Op, run: object, device: str, skip: Any) -> None:
        asked.append([args for args in op.examples("cpu") if not skip(tuple(args))])

    gpu.setattr(Op, "difference", difference)
    gpu.setattr(backends, "can_compare", lambda: True)
    gpu.setenv("MIXPREC_DISABLE", "cuda")
    op, x = OPS["quantize"], torch.ones(4, 8)
    for _ in range(2):
        for dtype, granularity in (("float8_e4m3fn", "row"), ("float8_e5m2", "tensor")):
            args = (x, getattr(torch, dtype), None, True, granularity, True)
            assert op.choose("cuda", 0, args) == op.handle("triton")
    assert [[(a[1], a[4]) for a in args] for args in asked] == [
        [(torch.float8_e4m3fn, "row")], [(torch.float8_e5m2, "tensor")],
    ]  # fmt: skip
    assert op.choose("cuda", 0, (x.half(), torch.float16, None, False, "tensor", False)) is not None
    assert 1 <= len(asked[2]) <= 4, "the examples most like it"
    assert all(args[1] == torch.float16 for args in asked[2])


def test_strict_disable_and_a_capture_without_warm_up(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(Op, "difference", lambda *_: "1 of 2 values differ")
    gpu.setattr(torch.cuda, "is_available", lambda: True)
    gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"^amax: a graph is being captured and the cuda kernel"):
        OPS["amax"].choose("cuda", 0)
    gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpu.setenv("MIXPREC_DISABLE", "cuda:amax, triton")
    assert OPS["amax"].choose("cuda", 0) == OPS["amax"].handle("reference")
    assert OPS["amax"].why_not("cuda", "cuda") == "MIXPREC_DISABLE leaves it out"
    assert OPS["quantize"].backend("cuda") == "cuda"
    gpu.setenv("MIXPREC_DISABLE", "gemm")
    with pytest.raises(ValueError, match=r"^MIXPREC_DISABLE must list cuda, triton, .* got 'gemm'"):
        OPS["gemm"].why_not("cuda", "cuda")
    gpu.delenv("MIXPREC_DISABLE")
    gpu.setenv("MIXPREC_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"^quantize: the cuda kernel does not agree .*differ"):
        OPS["quantize"].choose("cuda", 0)


def test_nothing_is_compared_while_values_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not backends.can_compare()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backends.can_compare()
    with torch._subclasses.FakeTensorMode():
        assert not backends.can_compare()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not backends.can_compare()


def test_an_allocation_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words, and on a GPU by the class, that programs look for to use a smaller batch."""
    huge = torch.ones(1, 1).expand(1 << 40, 1 << 18)  # 2^60 bytes, if they were there
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        mixprec.quantize(huge, mixprec.E4M3)

    def fail(*args: object) -> None:
        raise RuntimeError("CUDA out of memory for a result of mixprec")

    monkeypatch.setattr(OPS["amax"], "_chosen", {(None, torch.device("cpu")): ("cpu", fail)})
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        mixprec.amax(torch.ones(3))
