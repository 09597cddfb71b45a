"""Which variant runs: the order, the forced one, and the reasons when none can."""

from __future__ import annotations

import logging

import pytest
import torch

import mixprec
from mixprec import ops
from mixprec.ops import _backends, _library


def test_the_kernels_are_built_and_chosen_on_the_cpu() -> None:
    assert _library.LOAD_ERROR is None
    assert _library.C is not None
    for op in _library.OPS:
        assert _backends.why_not(op, "cpp", "cpu") is None
        assert _backends.chosen_backend(op, "cpu") == "cpp"


def test_every_op_has_its_variants() -> None:
    expected = {
        "adamw_", "amax", "clip_coef", "dequantize", "gemm", "gemm_accumulate_", "grad_stats_",
        "inv_scale", "quantize", "scale_from_amax_", "sgd_", "unscale_", "update_scale_",
    }  # fmt: skip
    assert set(_library.OPS) >= expected
    for op in _library.OPS:
        kernel = getattr(torch.ops.mixprec, op).default
        written = str(kernel._schema).split("(", 1)[1]
        for variant in ("reference", *(["triton"] if op in _library.TRITON else [])):
            other = getattr(torch.ops.mixprec, _library.variant_name(op, variant)).default
            assert str(other._schema).split("(", 1)[1] == written, "the signatures differ"
        mutates = op.endswith("_")
        assert (
            any(a.alias_info and a.alias_info.is_write for a in kernel._schema.arguments) is mutates
        )
        assert not (mutates and kernel._schema.returns), "a mutated argument is never returned"
        assert hasattr(ops, op)


def test_variant_names() -> None:
    assert _library.variant_name("gemm", "triton") == "gemm_triton"
    assert _library.variant_name("unscale_", "reference") == "unscale_reference_"


def test_use_backend_runs_that_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spy(name: str) -> object:
        calls.append(name)
        return getattr(torch.ops.mixprec, name).default

    monkeypatch.setattr(_library, "op_handle", spy)
    monkeypatch.setattr(_backends, "_chosen", {})
    x = torch.ones(3)
    mixprec.amax(x)
    with mixprec.use_backend("reference"):
        mixprec.amax(x)
        with mixprec.use_backend("cpp"):
            mixprec.amax(x)
        mixprec.amax(x)
    mixprec.amax(x)
    assert calls == ["amax", "amax_reference", "amax"], "choices are remembered and restored"


def test_use_backend_is_restored_after_an_error() -> None:
    with pytest.raises(ValueError, match=r"^dequantize"), mixprec.use_backend("reference"):
        mixprec.dequantize(mixprec.quantize(torch.ones(2), "fp16"), torch.int8)
    assert _backends.chosen_backend("amax", "cpu") == "cpp"
    assert mixprec.amax(torch.tensor([-2.0])).item() == 2.0


@pytest.mark.parametrize("backend", ["CUDA", "", None, "CPP"])
def test_unknown_backend(backend: object) -> None:
    with (
        pytest.raises(ValueError, match=r"^use_backend: backend must be one of .*cpp.*got"),
        mixprec.use_backend(backend),  # type: ignore[arg-type]
    ):
        raise AssertionError("the block must not run")
    assert _backends.chosen_backend("gemm", "cpu") == "cpp"
    reason = _backends.why_not("gemm", "opencl", "cpu")
    assert reason is not None
    assert "unknown backend" in reason


def test_missing_build_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """No silent slow path: without the kernels, the first op says how to build them."""
    why = f"mixprec._C is not built: run: {_library.INSTALL}"
    monkeypatch.setattr(_library, "LOAD_ERROR", why)
    monkeypatch.setattr(_backends, "_chosen", {})
    with pytest.raises(RuntimeError, match=r"^amax: no backend can run on cpu.*cpp: .*pip install"):
        mixprec.amax(torch.ones(2))
    with mixprec.use_backend("reference"):
        assert mixprec.amax(torch.ones(2)).item() == 1.0


def test_forced_backend_that_cannot_run_says_why() -> None:
    with (
        mixprec.use_backend("cpp"),
        pytest.raises(RuntimeError, match=r"amax: no backend can run on cuda.*run on cpu tensors"),
    ):
        _backends.choose("amax", "cuda")


def test_on_a_gpu_cuda_comes_first_then_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one cannot run the next does, and the reason is given."""
    monkeypatch.setattr(_library, "TRITON_ERROR", None)
    monkeypatch.setattr(_library, "CUDA_ERROR", None)
    monkeypatch.setattr(_library, "has_cuda_kernel", lambda op: op == "amax")
    assert _backends.order("cuda") == ("cuda", "triton", "reference")
    assert _backends.chosen_backend("amax", "cuda") == "cuda"
    assert _backends.chosen_backend("quantize", "cuda") == "triton"
    assert _backends.chosen_backend("gemm", "cuda") == "reference"
    assert _backends.why_not("gemm", "cuda", "cuda") == "it has no CUDA kernel"
    with mixprec.use_backend("triton"):
        for op in _library.TRITON:
            assert _backends.chosen_backend(op, "cuda") == "triton"
        with pytest.raises(RuntimeError, match=r"^gemm: .*triton: it has no Triton kernel"):
            _backends.choose("gemm", "cuda")
    for backend in ("triton", "cuda"):
        reason = _backends.why_not("amax", backend, "cpu")
        assert reason is not None
        assert reason.endswith("kernels run on cuda tensors, not cpu")
    monkeypatch.setattr(_library, "TRITON_ERROR", "triton is not installed: pip install triton")
    monkeypatch.setattr(_library, "CUDA_ERROR", "they were not built: no nvcc")
    assert _backends.chosen_backend("amax", "cuda") == "reference"
    with (
        mixprec.use_backend("triton"),
        pytest.raises(RuntimeError, match=r"^amax: no backend can run on cuda.*pip install triton"),
    ):
        _backends.choose("amax", "cuda")
    with (
        mixprec.use_backend("cuda"),
        pytest.raises(RuntimeError, match=r"^amax: no backend can run on cuda.*cuda: .*no nvcc"),
    ):
        _backends.choose("amax", "cuda")


def test_a_gpu_kernel_is_compared_before_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played on the CPU: `call` on device type "cuda" looks at cpu tensors here."""
    asked = []

    def right(name: str, op: object, device: str) -> dict:
        asked.append((name, device))
        return {"ok": name == "amax", "worst": 0.5, "reason": None}

    monkeypatch.setattr(_library, "CUDA_ERROR", None)
    monkeypatch.setattr(_library, "has_cuda_kernel", lambda op: True)
    monkeypatch.setattr(_backends, "_can_compare", lambda: True)
    monkeypatch.setattr(_backends._self_test, "compare", right)
    monkeypatch.setattr(_backends, "_chosen", {})
    monkeypatch.setattr(_backends, "_compared", set())
    monkeypatch.setattr(_backends, "_can_compare", lambda: False)
    _backends.choose("amax", "cuda")
    assert not asked, "while tracing, say"
    monkeypatch.setattr(_backends, "_can_compare", lambda: True)
    for _ in range(2):
        _backends.choose("amax", "cuda")
        with mixprec.use_backend("cuda"):
            _backends.choose("amax", "cuda")
    assert asked == [("amax", "cuda")], "once, and not forgotten because tracing came first"
    for _ in range(2):  # and no silent stand-in the second time
        with pytest.raises(RuntimeError, match=r"^quantize: the cuda kernel does not agree .*0\.5"):
            _backends.choose("quantize", "cuda")
    with mixprec.use_backend("reference"):
        _backends.choose("quantize", "cuda")


def test_nothing_is_compared_while_values_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not _backends._can_compare()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _backends._can_compare()
    with torch._subclasses.FakeTensorMode():
        assert not _backends._can_compare()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not _backends._can_compare()


def test_the_triton_variant_is_not_reached_by_cpu_tensors() -> None:
    with (
        mixprec.use_backend("triton"),
        pytest.raises(RuntimeError, match=r"triton: the Triton kernels run on cuda tensors"),
    ):
        mixprec.amax(torch.ones(2))
    with pytest.raises(NotImplementedError, match="amax_triton"):
        torch.ops.mixprec.amax_triton(torch.ones(2))


def test_a_reference_that_was_not_asked_for_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_backends, "_chosen", {})
    monkeypatch.setattr(_backends, "_ORDER", {"cuda": ("reference",)})
    with caplog.at_level(logging.WARNING, "mixprec"):
        for _ in range(3):
            _backends.choose("amax", "cuda")
        assert [r.getMessage().split()[0] for r in caplog.records] == ["amax"]
        caplog.clear()
        with mixprec.use_backend("reference"):
            _backends.choose("amax", "cuda")
        assert not caplog.records, "no warning where it was asked for"


def test_meta_tensors_give_shapes_only() -> None:
    x = torch.empty(4, 6, device="meta")
    q = mixprec.quantize(x, "e4m3", transpose=True)
    assert (q.data.device.type, q.data.dtype) == ("meta", torch.float8_e4m3fn)
    assert q.data_t is not None
    assert q.data_t.shape == (6, 4)
    c = mixprec.gemm(q.data, q.data_t, out_dtype=torch.float16)
    assert (c.shape, c.dtype, c.device.type) == ((4, 4), torch.float16, "meta")
