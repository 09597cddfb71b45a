"""What bench/results/ has to hold of a GPU, on made-up folders: complete, and with one thing wrong.

Also docs/gpu.md, which is made of the same folders.
"""

from __future__ import annotations

import copy
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mixprec.bench import __main__ as cli
from mixprec.bench import (
    evidence,
    gpu_folder,
    gpu_page,
    gpu_stages,
    report,
    results,
    sources,
)
from mixprec.ops._dispatch import library

ROOT = Path(__file__).resolve().parents[2]
GPU = "NVIDIA H200"
KERNELS = list(gpu_folder.measured([]))
Files = dict[str, dict[str, Any]]
FACTS = {
    "gpu_name": GPU, "rehearsal": False, "torch": "2.13.0", "commit": "0123456789ab",
    "date": "2026-01-02T03:04:05+00:00", "gpu_memory": 150e9,
    "sources": {op: sources.digest((op,), sources.CHOSEN) for op in library.OPS},
}  # fmt: skip


def a_row(op: str) -> dict[str, Any]:
    """A row of gpu-bench in which every kernel of `op` was timed."""
    variants = {
        backend: {"status": "ok", "reason": "", "sources": sources.digest((op,), backend),
                  "seconds": 1e-4, "call": 1e-5, "figure": 1.5, "share": 0.9, "met": True}
        for name, backend in KERNELS if name == op
    }  # fmt: skip
    return {
        "name": f"cuda/{op}/made-up", "op": op, "device": "cuda", "status": "ok", "reason": "",
        "target": {"value": 1.0, "unit": "x", "at_least": True}, "share_target": None, "met": True,
        "variants": variants, "default": "cuda", "ops": [op], "figure": 1.5, "host": False,
        "median": {"ours": 1e-4, "torch": 1.5e-4}, "best_rival": "torch", "rivals_refused": {},
        "waits": [], "flops": 0.0, "bytes": 1e8, "watched": {"clocks.sm": [1700.0, 1980.0]},
    }  # fmt: skip


def self_tests(backend: str) -> dict[str, str]:
    ops = [op for op, of in KERNELS if of == backend]
    return {f"test_values.py::test_self_test[{backend}-{op}]": "passed" for op in ops}


def a_stage(**more: Any) -> dict[str, Any]:
    """As tests/gpu/stages.py writes it: a commit given from outside stands beside the rest."""
    facts = {**FACTS, "environment": {"torch": FACTS["torch"], "commit": None}}
    return {**facts, "status": 0, "running": False, "seconds": 12.0, **more}


def a_training() -> dict[str, Any]:
    row = {
        "status": "complete", "tokens_per_second": 1e5, "peak_bytes": 12e9, "skipped_steps": 0,
        "median_seconds_by_part": {"forward": 1e-3, "backward": 2e-3, "optimizer": 5e-4},
        "validation bits/byte": 2.5, "difference_to_fp32": 0.001,
    }  # fmt: skip
    rows = [{"recipe": name, **row} for name in ("fp32", "tf32", "fp8")]
    rows[2]["tokens_per_second"] = 3e5
    text = {"text": "a text", "problems": ["fp8 learned nothing"]}
    options = {"tf32": {"fp32": False, "tf32": True, "fp8": False}, "parameters": 160_000_000,
               "steps": 150, "batch": 16, "context": 1024, "seed": 0}  # fmt: skip
    return {"environment": {**FACTS, **text}, "options": options, "rows": rows,
            "loss_name": "bits/byte"}  # fmt: skip


def a_vision() -> dict[str, Any]:
    row = {
        "model": "resnet50", "source": "torchvision", "precision": "autocast-bf16", "tf32": None,
        "batch": 64, "params": 25_557_032, "images_per_s": 1000.0, "samples": [0.064],
        "peak_bytes": 9e9, "largest_batch": 512, "largest_batch_bounded": True, "status": "ok",
        "reason": "",
    }  # fmt: skip
    failed = {"images_per_s": None, "status": "failed", "reason": "out of memory"}
    rows = [row, row | {"precision": "bf16", "images_per_s": 1500.0},
            row | {"precision": "fp8", **failed}]  # fmt: skip
    return {"environment": FACTS, "rows": rows}


def complete() -> Files:
    """All that the folder of one GPU holds when nothing is missing."""
    files = {"gpu-env.json": a_stage()}
    for name in gpu_folder.TESTS:
        files[name] = a_stage(tests={**self_tests("cuda"), "test_x": "skipped: it needs 100 GiB"})
    for name, (backend, tools) in gpu_folder.SANITIZERS.items():
        result = {"status": 0, "errors": 0, "tests": self_tests(backend)}
        files[name] = a_stage(tools={tool: copy.deepcopy(result) for tool in tools})
    rows = [a_row(op) for op in dict.fromkeys(op for op, _ in KERNELS)]
    for stage in ("memory", "step", "gemm", "layer", "overhead"):
        mine = rows if stage == "memory" else []
        snapshot = {"driver_version": "570.1", "clocks.max.sm": "1980"}
        where = {key: value for key, value in FACTS.items() if key != "sources"}
        files[f"bench-{stage}.json"] = {
            "schema": results.SCHEMA, "gpu_before": snapshot, "environment": where, "rows": mine,
        }  # fmt: skip
    files |= {gpu_folder.TRAINING: a_training(), gpu_folder.VISION: a_vision()}
    assert list(files) == list(gpu_folder.FILES)
    return files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """README, docs and the results of the CPU, to be written to."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "bench" / "results" / "cpu", tmp_path / "bench" / "results" / "cpu")
    shutil.copy(ROOT / "bench" / "results" / "cuda_build.json", tmp_path / "bench" / "results")
    return tmp_path


def put(tree: Path, files: Files, folder: str = "nvidia-h200", *, reported: bool = True) -> None:
    path = tree / "bench" / "results" / folder
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    if reported:  # without the pictures, which take seconds
        for page, text in report.render(tree).items():
            page.write_text(text)


def test_the_files_are_those_that_gpu_test_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    runs, sanitize = importlib.import_module("runs"), importlib.import_module("sanitize")
    read = {gpu_folder.ENVIRONMENT, *gpu_folder.TESTS, *gpu_folder.SANITIZERS}
    assert read == set(runs.FILES.values())
    assert gpu_folder.SANITIZERS["gpu-sanitize.json"] == ("cuda", sanitize.TOOLS)


def test_without_a_result_the_commands_are_named(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.write(tree)
    assert cli.main(["evidence", "--root", str(tree)]) == 1
    commands = "make gpu-test, make gpu-bench, make gpu-train, make gpu-vision"
    assert capsys.readouterr().out == (
        f"missing: bench/results/ holds no result of a GPU; on one, run {commands}\n"
    )
    page = (tree / "docs" / "gpu.md").read_text()
    assert page.count(gpu_page.NOTHING) == len(gpu_page.BLOCKS)
    places = [page.index(f"`{command}`") for command in commands.split(", ")]
    assert places == sorted(places)


def test_a_complete_folder_is_the_evidence(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tree, complete())
    assert evidence.main(tree) == 0
    assert capsys.readouterr().out == (
        f"{GPU}: complete\n"
        "  not needed: train-gpt-results.json: fp8 learned nothing\n"
        "  not needed: vision.json: resnet50 in fp8: failed (out of memory)\n"
    )


def first_row(files: Files) -> dict[str, Any]:
    row: dict[str, Any] = files["bench-memory.json"]["rows"][0]
    return row


def stale_kernel(files: Files) -> None:
    first_row(files)["variants"]["triton"]["sources"] = "0" * 16


def nameless_sources(files: Files) -> None:
    first_row(files)["variants"]["cuda"]["sources"] = None


def missing_op(files: Files) -> None:
    rows = files["bench-memory.json"]["rows"]
    rows[:] = [row for row in rows if row["op"] != "dequantize"]


def refused_kernel(files: Files) -> None:
    variant = {"status": "refused", "reason": "no such GPU", "sources": None}
    first_row(files)["variants"]["cuda"] = variant


def wrong_values(files: Files) -> None:
    row = a_row("amax") | {"name": "cuda/amax/wrong"}
    row["variants"]["cuda"] |= {"status": "wrong", "reason": "element 7 differs"}
    files["bench-memory.json"]["rows"].append(row)


def sanitizer(files: Files) -> dict[str, Any]:
    found: dict[str, Any] = files["gpu-sanitize.json"]["tools"]
    return found


def unclean(files: Files) -> None:
    sanitizer(files)["racecheck"] |= {"errors": 3, "status": 1}


def no_count(files: Files) -> None:
    sanitizer(files)["memcheck"]["errors"] = None


def tool_left_out(files: Files) -> None:
    del sanitizer(files)["synccheck"]


def op_left_out_of_a_tool(files: Files) -> None:
    tests = sanitizer(files)["initcheck"]["tests"]
    tests["test_values.py::test_self_test[cuda-gemm]"] = "not run"


def no_sanitizer(files: Files) -> None:
    more = {"skipped": "compute-sanitizer is not installed", "tools": {}}
    files["gpu-sanitize-triton.json"] |= more


def failed_test(files: Files) -> None:
    files["gpu-test-cuda.json"]["tests"]["test_graph[fp8]"] = "failure: 1 is not 2"
    files["gpu-test-cuda.json"]["status"] = 1


def ended_stage(files: Files) -> None:
    files["gpu-test-large.json"] |= {"status": None, "running": True}


def no_test_passed(files: Files) -> None:
    files["gpu-test-triton.json"]["tests"] = {"test_x": "skipped: no GPU here"}


def old_tests(files: Files) -> None:
    files["gpu-test-cuda.json"]["sources"] = FACTS["sources"] | {"sgd_": "0" * 16}


def sanitizer_of_unknown_sources(files: Files) -> None:
    files["gpu-sanitize.json"]["sources"] = dict.fromkeys(FACTS["sources"])


def nothing_of_sources(files: Files) -> None:
    del files["gpu-env.json"]["sources"]


def file_left_out(files: Files) -> None:
    del files["gpu-sanitize.json"]


def stage_left_out(files: Files) -> None:
    del files["bench-layer.json"]


def no_benchmark(files: Files) -> None:
    for name in BENCH:
        del files[name]


FIRST = KERNELS[0][0]
BENCH = [name for name in gpu_folder.FILES if name.startswith("bench-")]
WRONG: dict[Callable[[Files], None], list[str]] = {
    stale_kernel: [f"{FIRST} on triton: out of date, its sources have changed since "
                   f"cuda/{FIRST}/made-up was measured"],
    nameless_sources: [f"{FIRST} on cuda: out of date, its sources have changed since "
                       f"cuda/{FIRST}/made-up was measured"],
    missing_op: ["dequantize on cuda: no result", "dequantize on triton: no result"],
    refused_kernel: [f"{FIRST} on cuda: no result (refused: no such GPU)"],
    wrong_values: ["cuda/amax/wrong on cuda: wrong (element 7 differs)"],
    unclean: ["gpu-sanitize.json: racecheck: is not clean, 3 errors"],
    no_count: ["gpu-sanitize.json: memcheck: came to no count of errors"],
    tool_left_out: ["gpu-sanitize.json: synccheck: has not run"],
    op_left_out_of_a_tool: [
        "gpu-sanitize.json: initcheck: test_values.py::test_self_test[cuda-gemm]: not run",
        "gpu-sanitize.json: initcheck: has not run gemm"],
    no_sanitizer: ["gpu-sanitize-triton.json: compute-sanitizer is not installed"],
    failed_test: ["gpu-test-cuda.json: ended with exit status 1",
                  "gpu-test-cuda.json: test_graph[fp8]: failure: 1 is not 2"],
    ended_stage: ["gpu-test-large.json: was ended while it ran"],
    no_test_passed: ["gpu-test-triton.json: no test has passed"],
    old_tests: ["gpu-test-cuda.json: out of date, sgd_ has changed since"],
    sanitizer_of_unknown_sources: ["gpu-sanitize.json: does not say which sources it ran"],
    stage_left_out: ["bench-layer.json: is not there (make gpu-bench)"],
    no_benchmark: [f"{name}: is not there (make gpu-bench)" for name in BENCH],
    nothing_of_sources: ["gpu-env.json: does not say which sources it ran"],
    file_left_out: ["gpu-sanitize.json: is not there (make gpu-test)"],
}  # fmt: skip


@pytest.mark.parametrize("spoil", WRONG, ids=lambda f: f.__name__)
def test_what_is_wrong_is_named(
    tree: Path, spoil: Callable[[Files], None], capsys: pytest.CaptureFixture[str]
) -> None:
    files = complete()
    spoil(files)
    put(tree, files)
    assert evidence.main(tree) == 1
    expected = [f"missing: {GPU}: {words}" for words in WRONG[spoil]]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("name", gpu_folder.FILES)
def test_a_rehearsal_is_refused(tree: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for mark in (True, None):  # None: a file that does not say
        files = copy.deepcopy(complete())
        for where in (files[name], files[name]["environment"]):
            where["rehearsal"] = mark
        put(tree, files, reported=False)
        assert evidence.main(tree) == 1
        said = capsys.readouterr().out
        assert said.count("\n") == 1
        assert f"{name}: is a rehearsal without a GPU, and no result" in said
        with pytest.raises(results.ResultError, match="is a rehearsal"):
            report.write(tree)


def test_what_stands_in_for_a_gpu_is_none(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = ROOT / "tests" / "cuda_on_cpu" / "device" / "cudart.cpp"
    if not device.exists():
        pytest.skip("this tree has no device that stands in for a GPU")
    assert f'"{gpu_folder.STAND_IN}"' in device.read_text()
    files = complete()
    files["bench-memory.json"]["environment"]["gpu_name"] = gpu_folder.STAND_IN
    put(tree, files, reported=False)
    assert evidence.main(tree) == 1
    assert "bench-memory.json: is a rehearsal without a GPU" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}", '{"environment": {}}', '{"status": 0}'])
@pytest.mark.parametrize("name", [gpu_folder.TRAINING, "gpu-test-cuda.json"])
def test_a_damaged_file_is_named(
    tree: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tree, complete(), reported=False)
    (tree / "bench" / "results" / "nvidia-h200" / name).write_text(text)
    assert evidence.main(tree) == 1
    said = capsys.readouterr().out
    assert f"{name}: is " in said
    assert "damaged" in said or "rehearsal" in said


def test_a_page_that_was_not_generated_again_is_named(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tree, complete())
    page = tree / "docs" / "gpu.md"
    page.write_text(page.read_text().replace("570.1", "580.2"))
    assert evidence.main(tree) == 1
    said = capsys.readouterr().out
    assert said == f"missing: {page}: run python -m mixprec.bench report\n"


def test_one_complete_gpu_is_enough(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other one is not hidden."""
    put(tree, complete())
    other = {name: content for name, content in complete().items() if name.startswith("bench-")}
    for content in other.values():
        content["environment"] = content["environment"] | {"gpu_name": "NVIDIA L4"}
    put(tree, other, "nvidia-l4")
    assert evidence.main(tree) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{GPU}: complete\n")
    assert "\nNVIDIA L4: incomplete\n" in said
    assert "  not needed: vision.json: is not there (make gpu-vision)\n" in said


def test_without_sources_nothing_is_judged(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tree, complete())
    monkeypatch.setattr(sources, "root", lambda: None)
    assert evidence.main(tree) == 1
    assert "sources are not at hand" in capsys.readouterr().out


def test_claims_follow_from_the_files(tree: Path) -> None:
    files = complete()
    rows = files["bench-memory.json"]["rows"]
    rows.append(a_row("amax") | {"name": "cuda/layer/fp8/eager", "figure": 1.25})
    rows.append(a_row("amax") | {"name": "cuda/layer/fp8/compiled", "figure": None})
    put(tree, files)
    claims = section((tree / "docs" / "claims.md").read_text(), "claims")
    assert f"; {GPU}: tf32 1.00x, fp8 3.00x |" in claims
    assert f"the time; {GPU}: layer/fp8/eager 1.25x |" in claims
    assert f"; {GPU}: adamw_/made-up 1.50x, sgd_/made-up 1.50x |" in claims
    assert "GPU: not measured" not in claims


def test_every_kernel_is_in_a_row_of_the_benchmark() -> None:
    """Else the evidence could never be complete."""
    measured = {op for ops, _ in gpu_stages.STAGES.values() for op in ops}
    inside = {"clip_coef", "inv_scale", "update_scale_", "grad_stats_"}  # of an optimizer's step
    assert {op for op, _ in KERNELS} <= measured | inside


def test_readme_says_where_anything_has_run(tree: Path) -> None:
    front = tree / "README.md"
    text = front.read_text()
    if f"<!-- {report.STATE} -->" not in text:
        front.write_text(f"{text}\n<!-- {report.STATE} -->\n<!-- end -->\n")
    put(tree, {})
    assert "Nothing here has been measured or run" in section(front.read_text(), report.STATE)
    put(tree, complete())
    said = section(front.read_text(), report.STATE)
    assert f"on other GPUs than {GPU}; [docs/gpu.md](docs/gpu.md)" in said


def section(page: str, name: str) -> str:
    return page.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0]


def test_the_page_follows_from_the_files(tree: Path) -> None:
    files = complete()
    stale_kernel(files)
    missing_op(files)
    unclean(files)
    failed_test(files)
    put(tree, files, reported=False)
    pictures = [tree / f"bench/results/nvidia-h200/bench-{k}.png" for k in ("roofline", "ratio")]
    pages = [tree / name for name in ("README.md", "docs/gpu.md", "docs/claims.md")]
    assert report.write(tree) == pages + pictures
    assert report.write(tree) == []
    page = (tree / "docs" / "gpu.md").read_text()
    machine = section(page, "machine")
    assert "driver 570.1, memory 150 GB, SM clock 1700 to 1980 MHz (at most 1980 MHz)" in machine
    assert "| `bench-memory.json` | 2026-01-02T03:04 | 2.13.0 | 0123456789ab | **out of" in machine
    assert "-cuda.json` | 2026-01-02T03:04 | 2.13.0 | 0123456789ab | today's |" in machine
    count = len(self_tests("cuda"))
    tests = section(page, "tests")
    assert f"| CUDA kernels | **exit status 1** | {count} passed, 1 failed, 1 skipped |" in tests
    assert "- `test_graph[fp8]`: failure: 1 is not 2\n- 4 skipped: it needs 100 GiB\n" in tests
    tools = section(page, "sanitizers")
    assert f"| cuda | memcheck | ok | 0 | {count} passed, 0 failed, 0 skipped |" in tools
    assert "| cuda | racecheck | **exit status 1** | **3** |" in tools
    kernels = section(page, "kernels")
    assert f"| `{FIRST}` | 1 row | 1 row, **out of date** |" in kernels
    assert "| `dequantize` | **no result** | **no result** |" in kernels
    assert "| `update_delayed_scales_` | 1 row | no kernel |" in kernels
    assert "| memory | 13 | 13 of 13 targets met |  |" in section(page, "bench")
    for picture in pictures:
        assert f"(../bench/results/nvidia-h200/{picture.name})" in section(page, "bench")
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_training_and_vision_on_the_page(tree: Path) -> None:
    put(tree, complete())
    page = (tree / "docs" / "gpu.md").read_text()
    training = section(page, "training")
    assert "| tf32 | on | 100,000 | 1.00x | 1 ms | 2 ms | 500 us | - | 12 GB | 2.5000 |" in training
    assert "| fp8 | off | 300,000 | 3.00x |" in training
    assert "160 million parameters, 150 steps of 16,384 tokens" in training
    assert "- failed: fp8 learned nothing\n" in training
    assert gpu_page.LOSSES not in training, "there is no such picture"
    vision = section(page, "vision")
    first = "| resnet50 | torchvision | bf16 | - | 64 | 25.6 M |"
    assert f"{first} 1,500 | 42.7 ms | 1.50x | 9 GB | at least 512 | ok |" in vision
    assert "| resnet50 | torchvision | fp8 | - |  |  |  |  |  |  |  | failed |" in vision
    assert "\n- resnet50 fp8: out of memory\n" in vision

    put(tree, {gpu_page.LOSSES: {}})
    page = (tree / "docs" / "gpu.md").read_text()
    assert f"(../bench/results/nvidia-h200/{gpu_page.LOSSES})" in section(page, "training")
