"""mixprec.env: the report is complete, its self-tests can fail, and the exit code shows it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mixprec
from mixprec import env
from mixprec.availability import why_not_cuda
from mixprec.bench import tune
from mixprec.ops._dispatch import backends, gemm_table, library, self_check
from mixprec.ops._dispatch.op import OPS
from mixprec.recipes import RECIPES, Recipe


def test_json_and_a_forced_level_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mixprec.env", "--json"]
    base = {**os.environ, "MIXPREC_ISA": "base", "MIXPREC_PRODUCTS": "torch"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=base)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["versions"]["torch"] == str(torch.__version__)
    assert report["versions"]["mixprec"] == mixprec.__version__
    assert min(report["machine"]["threads"], report["machine"]["cores"]) >= 1
    extension = report["extension"]
    assert (extension["isa"], extension["isa_forced"]) == ("base", "base")
    assert "base" in extension["isa_available"]
    assert (extension["products"], extension["products_forced"]) == ("torch", "torch")
    assert set(report["ops"]["cpu"]) == set(OPS)
    for name, op in report["ops"]["cpu"].items():
        assert op["uses"] == "cpp", name
        assert set(op["others"]) == set(backends.BACKENDS) - {"cpp"}, name
        assert all(op["others"].values()), f"{name}: a backend was left without a reason"
        assert report["self_test"]["cpu"][name] is None


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return env.report()


def test_without_the_extension(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not built: the reason is printed, no op claims to work, and the exit code is 1."""
    monkeypatch.setattr(library, "C", None)
    monkeypatch.setattr(library, "LOAD_ERROR", "mixprec._C is not built: run this")
    assert env.main([]) == 1
    text = capsys.readouterr().out
    assert "NOT LOADED   mixprec._C is not built: run this" in text
    assert "not tested: no backend can run it" in text
    assert "Something is wrong" in text
    assert env.main(["--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["ops"]["cpu"]["gemm"]["uses"] is None
    assert facts["extension"] == {"loaded": False, "reason": "mixprec._C is not built: run this"}


def first_tensor(values: object) -> torch.Tensor | None:
    """The first tensor in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, (list, tuple)):
        return next((t for v in values if (t := first_tensor(v)) is not None), None)
    return None


def test_self_test_detects_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each op: a result, or a first argument afterwards, that is off by 1."""
    for wrong, op in OPS.items():
        handle = op.handle

        def off_by_one(variant: str = "cpp", handle: Any = handle) -> Any:
            def run(*arguments: object) -> object:
                result = handle(variant)(*arguments)
                target = first_tensor([result, arguments])
                assert target is not None
                target.copy_(target.float() + 1)
                return result

            return handle(variant) if variant == "reference" else run

        monkeypatch.undo()
        monkeypatch.setattr(op, "handle", off_by_one)
        monkeypatch.setattr(op, "_chosen", {})
        assert re.search("values differ, by ", env.self_test(wrong, "cpu") or ""), wrong

    report = env.report()  # with the last of them
    assert not report["ok"]
    failed = [name for name, found in report["self_test"]["cpu"].items() if found]
    assert failed == [wrong]
    text = env.describe(report)
    assert re.search(rf"^  {wrong} +cpp +FAILED, .* differ", text, re.MULTILINE)


def test_running_out_of_memory_is_no_disagreement() -> None:
    def full(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        OPS["amax"].difference(full, "cpu")


def test_difference() -> None:
    x = torch.tensor([0.0, math.nan, math.inf, 1.0])
    assert self_check._difference(x, x.clone()) is None
    for i, (other, by) in enumerate(((-0.0, "0"), (1.0, "inf"), (3e38, "inf"), (1.5, "0.5"))):
        y = x.clone()
        y[i] = other
        assert self_check._difference(y, x) == f"1 of 4 values differ, by {by} at most"
    assert self_check._difference(x.half(), x) is not None
    assert self_check._difference(x[None], x) is not None


def test_how_gemm_is_chosen_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tuned: Path, report: dict[str, Any]
) -> None:
    """The report of this machine as if its CPU were a GPU, with and without measured choices."""
    monkeypatch.setattr(library, "capability", lambda index: (9, 0))
    for entries, said in (({}, "nothing is measured for compute capability 9.0"),
                          ({"16-bit thin": ["cuda", None]}, "\n    16-bit thin ")):  # fmt: skip
        tune.save(tuned, {k: gemm_table.Entry(*entry) for k, entry in entries.items()}, "9.0")
        ops, tests = env.variants("cuda"), report["self_test"]["cpu"]
        tested = {"cuda": {name: tests[name] for name in ops}}
        facts = {"ops": {"cuda": ops}, "gemm": env.gemm_choice(), "self_test": tested}
        assert facts["gemm"]["entries"] == entries
        assert (ops["gemm"]["uses"], ops["gemm"]["others"]["reference"]) == (
            "vendor",
            "vendor comes first",
        )
        text = env.describe(report | facts)
        assert "gemm uses the first of vendor, cuda, triton, reference" in text
        assert said in text


# is_available and why_not: an answer for every device, with the reason


GPUS = {
    "GTX 1080": (6, 1), "V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "RTX 3090": (8, 6),
    "L4": (8, 9), "H200": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0),
}  # fmt: skip
FP16 = {"V100", "T4", "A100", "RTX 3090", "L4", "H200", "B200", "RTX 5090"}
BF16 = FP16 - {"V100", "T4"}
FP8 = BF16 - {"A100", "RTX 3090"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_nvidia_from_pascal_to_blackwell(recipe: str) -> None:
    native = {"fp16": FP16, "bf16": BF16}.get(recipe, FP8)
    if RECIPES[recipe].is_block:
        reason = why_not_cuda(RECIPES[recipe], (10, 0), "B200")
        assert reason is None if recipe != "mxfp4" else "decoded to bf16" in str(reason)
        assert "decoded to bf16" in str(why_not_cuda(RECIPES[recipe], (9, 0), "H100"))
        return
    for gpu, capability in GPUS.items():
        reason = why_not_cuda(Recipe.parse(recipe), capability, gpu)
        assert (reason is None) == (gpu in native), gpu
        # What is missing, and what is lost
        assert reason is None or re.search(rf"^{gpu} \(.*recipe runs.*speed is not gained", reason)


def test_devices_without_kernels_have_a_reason() -> None:
    assert why_not_cuda(Recipe.parse("fp8"), (8, 0), "A100") == (
        "A100 (Ampere, compute capability 8.0) has no tensor cores for fp8, which came with Ada or "
        "Hopper (8.9); the recipe runs, memory is saved as with the format, speed is not gained"
    )
    for device in ("xpu", "mps", "xla", "hpu", "meta"):
        for recipe in RECIPES:
            assert not mixprec.is_available(recipe, device)
            assert len(mixprec.why_not(recipe, device) or "") > 20


def test_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "fnuz" in (mixprec.why_not("fp8", "cuda") or "")
    assert mixprec.is_available("bf16", "cuda")


def test_cuda_without_and_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert mixprec.why_not("bf16", "cuda") == "this torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert mixprec.why_not("bf16", "cuda:0") == "torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    assert mixprec.is_available("bf16")
    assert "A100" in (mixprec.why_not("fp8", 0) or "")


def test_the_cpu() -> None:
    assert "decoded exactly" in (mixprec.why_not("fp8", "cpu") or "")
    assert "fp32" in (mixprec.why_not("fp16", "cpu") or "")
    bf16 = mixprec.why_not("bf16", "cpu")
    assert bf16 is None or "instructions for bf16" in bf16


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="recipe must be"):
        mixprec.why_not("fp9", "cpu")
    with pytest.raises(RuntimeError):
        mixprec.is_available("fp8", "gpu")
