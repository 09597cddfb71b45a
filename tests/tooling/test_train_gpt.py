"""examples/train_gpt.py, the demo: its data, its model, its verdict, and its bad days."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mixprec
from mixprec.diagnostics.report import Report, Row

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ["--layers=1", "--width=64", "--context=32", "--batch=8", "--lr=1e-2"]
BLOCK_LINEARS = [f"blocks.0.{name}" for name in ("attention.qkv", "attention.proj", "up", "down")]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_gpt

    return train_gpt


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Four sets of four letters take turns: 4 bits per byte, 2 given the byte before."""
    turns = ("abcd", "efgh", "ijkl", "mnop")
    draw = random.Random(1)
    path = tmp_path / "text.txt"
    path.write_text("".join(draw.choice(turns[i % 4]) for i in range(9000)))
    return str(path)


def test_the_demo_end_to_end(
    demo: ModuleType, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [*TINY, "--steps=60", f"--text={text}", f"--out={out}", "--seed=5"]
    assert demo.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "bits/byte" in printed
    assert "passed: every matrix product" in printed
    assert sorted(p.name for p in out.iterdir()) == ["loss.png", "results.json"]

    results = json.loads((out / "results.json").read_text())
    assert [row["recipe"] for row in results["rows"]] == ["fp32", "bf16", "fp16", "fp8"]
    for row in results["rows"]:
        assert abs(row["difference_to_fp32"]) < 0.02
        expected = row["validation_loss"] / math.log(2)
        assert math.isclose(row["validation bits/byte"], expected)
        assert set(BLOCK_LINEARS) < set(row["gemms_by_module"])
        assert row["data_crc32"] == results["rows"][0]["data_crc32"]
    fp8 = results["rows"][3]["gemms"]
    assert fp8["forward"] == {"e4m3 x e4m3": 60 * 5}
    assert fp8["grad_weight"] == {"e5m2 x e4m3": 60 * 5}
    assert results["options"]["seed"] == 5
    environment = results["environment"]
    for key in ("torch", "processor", "threads", "commit", "unigram_bits_per_byte"):
        assert key in environment
    assert environment["problems"] == []
    assert math.isclose(environment["unigram_bits_per_byte"], 4.0, rel_tol=0.01)

    assert demo.main(arguments) == 0
    again = json.loads((out / "results.json").read_text())
    for before, after in zip(results["rows"], again["rows"], strict=True):
        assert before["train_losses"] == after["train_losses"], "the same run, bit for bit"


def test_the_standard_library_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, "--steps=2"]
    command += ["--recipes=fp32,fp8", "--out=here"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "standard library" in done.stdout
    failures = done.stderr.strip().splitlines()
    assert len(failures) == 2, "two steps teach neither precision anything"
    assert all(line.startswith("failed: ") and "not 25% below the" in line for line in failures)
    assert (tmp_path / "here" / "results.json").exists()


def test_a_layer_left_out_fails_the_run(
    demo: ModuleType, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    compare = mixprec.compare

    def leaves_one_out(*args: Any, **options: Any) -> Report:
        return compare(*args, module_filter_fn=lambda module, fqn: fqn != "blocks.0.up", **options)

    monkeypatch.setattr(mixprec, "compare", leaves_one_out)
    arguments = [*TINY, "--steps=60", f"--text={text}", f"--out={tmp_path}"]
    assert demo.main([*arguments, "--recipes=fp32,fp8"]) == 1
    failures = capsys.readouterr().err.strip().splitlines()
    assert len(failures) == 3
    assert failures[0].startswith("failed: fp8: forward of blocks.0.up should have run as e4m3")


def test_every_condition_of_the_verdict(demo: ModuleType) -> None:
    def verdict(fp32: float, fp8: float, status: str = "complete", gain: float = 0.25) -> list[str]:
        rows = [
            Row("fp32", "complete", fp32 * math.log(2)),
            Row("fp8", status, fp8 * math.log(2)),
        ]
        return demo.problems(Report(rows=rows), [], 4.0, gain)

    assert verdict(2.9, 2.95) == []
    assert verdict(2.9, 2.97) == ["fp8 is +2.41% from fp32, more than 2%"]
    assert verdict(2.9, 2.83) == ["fp8 is -2.41% from fp32, more than 2%"]
    assert verdict(2.99, 3.01) == [
        "fp8 reached 3.010 bits per byte, which is not 25% below the 4.000 of single bytes"
    ]
    assert len(verdict(2.9, 2.9, gain=0.33)) == 2
    assert verdict(2.9, math.nan) == ["fp8 has no finite validation loss"]
    assert verdict(2.9, 2.9, "diverged") == ["fp8 diverged"]


def test_other_data_would_be_named(demo: ModuleType) -> None:
    rows = [Row("fp32", data=[1, 2, 3]), Row("bf16", data=[1, 2]), Row("fp8", data=[1, 7, 3])]
    for row in rows:
        row.status, row.seconds = "complete", [0.1] * len(row.data)
    assert demo.problems(Report(rows=rows), [], 4.0, 0.25) == ["fp8 got other data"]
    rows[0].data = []  # it has failed
    assert demo.problems(Report(rows=rows[:2]), [], 4.0, 0.25) == []


def test_tf32_is_on_in_its_own_run_alone(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """On a GPU, where no run is made here: what compare would be called with, and under which
    setting of torch."""
    import gpt_data

    options = demo.parse_arguments([*TINY, "--device=cuda", f"--text={text}"])
    assert options.recipes == ["fp32", "tf32", "bf16", "fp16", "fp8"]
    assert options.limit == demo.GPU_LIMIT
    calls: list[tuple[str, str, str]] = []

    def compare(make: Any, batches: Any, recipe: str, **more: Any) -> Report:
        calls.append((recipe, torch.get_float32_matmul_precision(), more["device"]))
        more["progress"](recipe, 1, 1, 0.5)
        return Report(rows=[Row(recipe)], environment={"device": more["device"]})

    monkeypatch.setattr(mixprec, "compare", compare)
    seen: list[str] = []
    before = torch.get_float32_matmul_precision()
    report = demo.compare(
        options, gpt_data.load(text, options.context), lambda recipe, *_: seen.append(recipe)
    )
    assert torch.get_float32_matmul_precision() == before
    names = ["fp32", "tf32", "bf16", "fp16", "fp8"]
    assert calls == [
        ("fp32" if name == "tf32" else name, "high" if name == "tf32" else "highest", "cuda")
        for name in names
    ]
    assert [row.recipe for row in report.rows] == names == seen
    assert report.options == {"tf32": {name: name == "tf32" for name in names}}


def test_a_precision_that_fails_does_not_end_the_others(
    demo: ModuleType, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    compare = mixprec.compare
    out = tmp_path / "results.json"
    kept: list[list[str]] = []

    def fails(make: Any, batches: Any, recipe: str, **more: Any) -> Report:
        if out.exists():  # what is there if the program is killed now
            kept.append([row["status"] for row in json.loads(out.read_text())["rows"]])
        if recipe == "bf16":
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore of it")
        return compare(make, batches, recipe, **more)

    monkeypatch.setattr(mixprec, "compare", fails)
    arguments = [*TINY, "--steps=2", f"--text={text}", f"--out={tmp_path}"]
    assert demo.main([*arguments, "--recipes=fp32,bf16,fp8"]) == 1
    failed = "failed: OutOfMemoryError: CUDA out of memory."
    assert kept == [["complete", "not started", "not started"], ["complete", failed, "not started"]]
    results = json.loads(out.read_text())
    assert [row["status"] for row in results["rows"]] == ["complete", failed, "complete"]
    assert f"bf16 {failed}" in results["environment"]["problems"]
    assert f"failed: bf16 {failed}\n" in capsys.readouterr().err


def test_one_model_is_in_memory_at_a_time(
    demo: ModuleType, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last one's would count in the peak of the next."""
    import gpt_data
    import gpt_runs

    made: list[weakref.ref[torch.nn.Module]] = []
    alive: list[int] = []

    class Noted(gpt_runs.GPT):
        def __init__(self, config: Any) -> None:
            alive.append(sum(model() is not None for model in made))
            super().__init__(config)
            made.append(weakref.ref(self))

    monkeypatch.setattr(gpt_runs, "GPT", Noted)
    options = demo.parse_arguments(
        [*TINY, "--steps=1", f"--text={text}", "--recipes=fp32,bf16,fp8"]
    )
    gc.disable()
    try:
        demo.compare(options, gpt_data.load(text, options.context))
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_a_limit_ends_it_with_what_it_has(
    demo: ModuleType, text: str, tmp_path: Path, capsys: Any
) -> None:
    arguments = [*TINY, "--steps=1000", f"--text={text}", f"--out={tmp_path}", "--limit=0"]
    assert demo.main([*arguments, "--recipes=fp32,fp8"]) == 130
    assert "interrupted: the table and the files hold what there is" in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["interrupted"] is True
    assert [row["steps"] for row in results["rows"]] == [1, 0]


def test_what_is_noted_of_a_gpu(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpt_runs

    from mixprec.bench.gpu import device

    snapshots = iter([{"clocks.sm": "345"}, {"clocks.sm": "1700"}])
    watched = iter([{"clocks.sm": [1980.0]}, {"clocks.sm": [1800.0]}])
    monkeypatch.setattr(device, "snapshot", lambda: next(snapshots))
    monkeypatch.setattr(device, "properties", lambda: {"gpu_name": "NVIDIA H200", "dry_run": False})
    monkeypatch.setattr(device.Watch, "since_last", lambda self: next(watched))
    record = gpt_runs.GpuRecord()
    for recipe in ("fp32", "fp8"):
        record.finished(recipe)
    facts = record.facts()
    record.close()
    assert facts == {
        "gpu_name": "NVIDIA H200",
        "dry_run": False,
        "gpu_before": {"clocks.sm": "345"},
        "gpu_after": {"clocks.sm": "1700"},
        "watched": {"fp32": {"clocks.sm": [1980.0]}, "fp8": {"clocks.sm": [1800.0]}},
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"error: cannot read the text file \S+: No such file or directory"),
        ("", r"error: the text \(\S+\) has 0 bytes, too short .* at least 2640 are needed"),
        ("a" * 2500, r"error: the text \(\S+\) has 2500 bytes, too short"),
    ],
    ids=["missing", "empty", "short"],
)
def test_a_text_that_cannot_be_used(
    demo: ModuleType, tmp_path: Path, capsys: Any, content: str | None, message: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    out = tmp_path / "out"
    assert demo.main([*TINY, f"--text={path}", f"--out={out}"]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(message + ".*\n", error), error
    assert not out.exists()


def test_full_disk(demo: ModuleType, text: str, tmp_path: Path, capsys: Any) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").symlink_to("/dev/full")
    arguments = [*TINY, "--steps=2", f"--text={text}", f"--out={tmp_path}/out", "--recipes=fp32"]
    assert demo.main(arguments) == 1
    error = capsys.readouterr().err
    assert error == f"error: cannot write {tmp_path}/out/results.json: No space left on device\n"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["results.json"]


def test_a_directory_that_cannot_be_made(demo: ModuleType, text: str, capsys: Any) -> None:
    assert demo.main([*TINY, f"--text={text}", f"--out={text}/out"]) == 1
    assert capsys.readouterr().err == f"error: {text}/out: Not a directory\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a usable GPU")
def test_no_gpu(demo: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--device cuda: there is no GPU to use"):
        demo.main(["--device=cuda"])


@pytest.mark.parametrize(
    "argument",
    ["--recipes=fp32,fp4", "--recipes=tf32", "--steps=0", "--width=33", "--layers=x"],
)
def test_bad_options(demo: ModuleType, capsys: Any, argument: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main([argument])
    assert stopped.value.code == 2
    assert argument.split("=")[0] in capsys.readouterr().err


def test_ctrl_c_ends_it_with_what_it_has(text: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, "--steps=100000"]
    command += [f"--text={text}", f"--out={tmp_path}/out", "--recipes=bf16,fp8"]
    # In the background of a script Ctrl-C is ignored, and whoever is started there inherits that.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        printed, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert lines[2].startswith(" bf16  step     1/100000"), lines
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "bf16" in printed
    assert "interrupted: the table and the files hold what there is" in printed
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["interrupted"] is True
    assert results["rows"][0]["steps"] >= 1
    assert results["rows"][1]["status"] == "not started"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["loss.png", "results.json"]


def test_the_text(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpt_data

    library = gpt_data.load(None, 128)
    again = gpt_data.load(None, 128)
    assert torch.equal(library.train, again.train)
    assert torch.equal(library.validation, again.validation)
    assert library.train.numel() > 5 * library.validation.numel() > 100_000
    assert 4.0 < library.unigram_entropy() < 5.0
    # Whole files are held out: no long piece of them is in the training text.
    train = bytes(library.train.tolist())
    piece = bytes(library.validation[5000:5400].tolist())
    assert piece not in train
    text = gpt_data.Text("", torch.tensor([0, 1, 2, 3]).byte(), torch.tensor([0, 1, 2, 3]).byte())
    assert text.unigram_entropy() == 2.0


def test_the_batches(demo: ModuleType) -> None:
    import gpt_data

    numbers = torch.arange(250).byte()
    batches = gpt_data.Batches(numbers, batch=3, context=8, count=40, seed=7)
    pairs = list(batches)
    assert len(pairs) == len(batches) == 40
    starts = set()
    for tokens, targets in pairs:
        assert tokens.shape == targets.shape == (3, 8)
        assert torch.equal(targets, tokens + 1), "the target is the next byte"
        starts |= set(tokens[:, 0].tolist())
    assert 0 <= min(starts) < 25
    assert 200 < max(starts) <= 241
    assert all(torch.equal(a[0], b[0]) for a, b in zip(pairs, batches, strict=True))
    even = [t[0][0, 0].item() for t in gpt_data.Batches(numbers, 1, 8, 4, None)]
    assert even == [0, 80, 160, 241]


def test_the_model_is_causal_and_starts_ignorant(demo: ModuleType) -> None:
    from gpt_model import GPT, GPTConfig

    model = GPT(GPTConfig(layers=2, width=64, heads=2, context=16))
    for block in model.blocks:  # zero at the start: then no position would see another
        torch.nn.init.normal_(block.attention.proj.weight, std=0.1)
        torch.nn.init.normal_(block.down.weight, std=0.1)

    def loss_of_first_half(tokens: torch.Tensor) -> torch.Tensor:
        hidden: list[torch.Tensor] = []
        handle = model.head.register_forward_hook(lambda m, i, out: hidden.append(out))
        model(tokens, tokens)
        handle.remove()
        return hidden[0][:, :8]

    tokens = torch.randint(0, 256, (1, 16))
    later, earlier = tokens.clone(), tokens.clone()
    later[0, 12] += 1 if tokens[0, 12] < 255 else -1
    earlier[0, 3] += 1 if tokens[0, 3] < 255 else -1
    before = loss_of_first_half(tokens)
    assert torch.equal(loss_of_first_half(later), before)
    changed = (loss_of_first_half(earlier) != before).any(-1)[0]
    assert changed.tolist() == [False] * 3 + [True] * 5

    fresh = GPT(GPTConfig(layers=2, width=64, heads=2, context=16))
    data = torch.randint(0, 256, (8, 17))
    assert fresh(data[:, :-1], data[:, 1:]).item() < 1.25 * math.log(256)
