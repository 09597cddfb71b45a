"""examples/train_gpt.py, the demo: its data, model, conditions for success, and error handling."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
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
STEPS = 50


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import train_gpt

        yield train_gpt


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four sets of four letters take turns: 4 bits per byte, 2 given the byte before."""
    turns = ("abcd", "efgh", "ijkl", "mnop")
    draw = random.Random(1)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(draw.choice(turns[i % 4]) for i in range(9000)))
    return str(path)


def test_the_demo_end_to_end(demo: ModuleType, text: str, tmp_path: Path) -> None:
    arguments = [*TINY, f"--steps={STEPS}", f"--text={text}", "--seed=5"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert demo.main([*arguments, f"--out={tmp_path}"]) == 0
    assert "bits/byte" in printed.getvalue()
    assert "passed: every matrix product" in printed.getvalue()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "results.json"]

    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["rows"]
    assert [row["recipe"] for row in rows] == ["fp32", "bf16", "fp16", "fp8"]
    for row in rows:
        assert abs(row["difference_to_fp32"]) < 0.02
        expected = row["validation_loss"] / math.log(2)
        assert math.isclose(row["validation bits/byte"], expected)
        assert set(BLOCK_LINEARS) < set(row["gemms_by_module"])
        assert row["data_crc32"] == rows[0]["data_crc32"]
    assert rows[3]["gemms"]["forward"] == {"e4m3 x e4m3": STEPS * 5}
    assert rows[3]["gemms"]["grad_weight"] == {"e5m2 x e4m3": STEPS * 5}
    assert results["options"]["seed"] == 5
    environment = results["environment"]
    assert {"torch", "processor", "threads", "commit"} < environment.keys()
    assert environment["problems"] == []
    assert math.isclose(environment["unigram_bits_per_byte"], 4.0, rel_tol=0.01)

    demo.main([*arguments, f"--out={tmp_path}", "--recipes=fp8"])
    (again,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert again["train_losses"] == rows[3]["train_losses"], "the same run, bit for bit"


def test_failures_are_reported_and_the_other_precisions_run(
    demo: ModuleType, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """bf16 is out of memory; fp8 leaves a layer out. Results are written after each precision."""
    compare = mixprec.compare
    out = tmp_path / "results.json"
    written: list[list[str]] = []

    def faulty(make: Any, batches: Any, recipe: str, **more: Any) -> Report:
        if out.exists():
            written.append([row["status"] for row in json.loads(out.read_text())["rows"]])
        if recipe == "bf16":
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore of it")
        more["module_filter_fn"] = lambda module, fqn: fqn != "blocks.0.up"
        return compare(make, batches, recipe, **more)

    monkeypatch.setattr(mixprec, "compare", faulty)
    arguments = [*TINY, "--steps=2", f"--text={text}", f"--out={tmp_path}"]
    assert demo.main([*arguments, "--recipes=fp32,bf16,fp8"]) == 1
    failed = "failed: OutOfMemoryError: CUDA out of memory."
    assert written == [
        ["complete", "not started", "not started"],
        ["complete", failed, "not started"],
    ]
    results = json.loads(out.read_text())
    assert [row["status"] for row in results["rows"]] == ["complete", failed, "complete"]
    problems = results["environment"]["problems"]
    assert problems[0] == f"bf16 {failed}"
    wrong = "fp8: {} of blocks.0.up should have run as"
    for kind, problem in zip(("forward", "grad_input", "grad_weight"), problems[1:4], strict=True):
        assert problem.startswith(wrong.format(kind))
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed")] == [
        f"failed: {problem}" for problem in problems
    ]


def test_every_condition_of_success(demo: ModuleType) -> None:
    def problems(fp32: float, fp8: float, status: str = "complete", gain: float = 0.25) -> Any:
        rows = [
            Row("fp32", "complete", fp32 * math.log(2)),
            Row("fp8", status, fp8 * math.log(2)),
        ]
        return demo.problems(Report(rows=rows), [], 4.0, gain)

    assert problems(2.9, 2.95) == []
    assert problems(2.9, 2.97) == ["fp8 is +2.41% from fp32, more than 2%"]
    assert problems(2.9, 2.83) == ["fp8 is -2.41% from fp32, more than 2%"]
    assert problems(2.99, 3.01) == [
        "fp8 reached 3.010 bits per byte, which is not 25% below the 4.000 of single bytes"
    ]
    assert len(problems(2.9, 2.9, gain=0.33)) == 2
    assert problems(2.9, math.nan) == ["fp8 has no finite validation loss"]
    assert problems(2.9, 2.9, "diverged") == ["fp8 diverged"]

    rows = [Row("fp32", data=[1, 2, 3]), Row("bf16", data=[1, 2]), Row("fp8", data=[1, 7, 3])]
    for row in rows:
        row.status, row.seconds = "complete", [0.1] * len(row.data)
    assert demo.problems(Report(rows=rows), [], 4.0, 0.25) == ["fp8 was trained on other data"]
    rows[0].data = []  # it failed before its first batch
    assert demo.problems(Report(rows=rows[:2]), [], 4.0, 0.25) == []


def test_tf32_is_allowed_in_its_own_run_only(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """What mixprec.compare is called with on a GPU, and with which matmul precision of torch."""
    import gpt_data

    options = demo.parse_arguments([*TINY, "--device=cuda", f"--text={text}"])
    calls: list[tuple[str, str, str]] = []

    def compare(make: Any, batches: Any, recipe: str, **more: Any) -> Report:
        calls.append((recipe, torch.get_float32_matmul_precision(), more["device"]))
        more["progress"](recipe, 1, 1, 0.5)
        return Report(rows=[Row(recipe)], environment={"device": more["device"]})

    monkeypatch.setattr(mixprec, "compare", compare)
    seen: list[str] = []
    before = torch.get_float32_matmul_precision()
    data = gpt_data.load(text, options.context)
    report = demo.compare(options, data, lambda recipe, *_: seen.append(recipe))
    assert torch.get_float32_matmul_precision() == before
    names = ["fp32", "tf32", "bf16", "fp16", "fp8"]
    assert calls == [
        ("fp32" if name == "tf32" else name, "high" if name == "tf32" else "highest", "cuda")
        for name in names
    ]
    assert [row.recipe for row in report.rows] == options.recipes == names == seen
    assert report.options == {"tf32": {name: name == "tf32" for name in names}}


def test_one_model_is_in_memory_at_a_time(
    demo: ModuleType, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the previous model would count in the peak memory of the next run."""
    import gpt_data
    import gpt_runs

    made: list[weakref.ref[torch.nn.Module]] = []
    alive: list[int] = []

    class Counted(gpt_runs.GPT):
        def __init__(self, config: Any) -> None:
            alive.append(sum(model() is not None for model in made))
            super().__init__(config)
            made.append(weakref.ref(self))

    monkeypatch.setattr(gpt_runs, "GPT", Counted)
    monkeypatch.setattr(gpt_runs, "VALIDATION_BYTES", 256)
    options = demo.parse_arguments([*TINY, "--steps=1", f"--text={text}", "--recipes=fp32,fp8"])
    gc.disable()
    try:
        demo.compare(options, gpt_data.load(text, options.context))
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_a_text_that_cannot_be_used(demo: ModuleType, tmp_path: Path, capsys: Any) -> None:
    path, out = tmp_path / "text.txt", tmp_path / "out"
    for content, message in (
        (None, r"error: cannot read the text file \S+: No such file or directory"),
        ("", r"error: the text \(\S+\) has 0 bytes, too short .* at least 2640 are needed"),
        ("a" * 2500, r"error: the text \(\S+\) has 2500 bytes, too short"),
    ):
        if content is not None:
            path.write_text(content)
        assert demo.main([*TINY, f"--text={path}", f"--out={out}"]) == 1
        error = capsys.readouterr().err
        assert re.fullmatch(message + ".*\n", error), error
        assert not out.exists()


def test_results_that_cannot_be_written(
    demo: ModuleType, text: str, tmp_path: Path, capsys: Any
) -> None:
    assert demo.main([*TINY, f"--text={text}", f"--out={text}/out"]) == 1
    assert capsys.readouterr().err == f"error: {text}/out: Not a directory\n"
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    (tmp_path / "results.json").symlink_to("/dev/full")
    arguments = [*TINY, "--steps=1", f"--text={text}", f"--out={tmp_path}", "--recipes=fp32"]
    assert demo.main(arguments) == 1
    error = capsys.readouterr().err
    assert error == f"error: cannot write {tmp_path}/results.json: No space left on device\n"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a usable GPU")
def test_no_gpu(demo: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--device cuda: there is no GPU to use"):
        demo.main(["--device=cuda"])


def test_bad_options(demo: ModuleType, capsys: Any) -> None:
    for argument in ("--recipes=fp32,fp4", "--recipes=tf32", "--steps=0", "--width=33"):
        with pytest.raises(SystemExit) as stopped:
            demo.main([argument])
        assert stopped.value.code == 2
        assert argument.split("=")[0] in capsys.readouterr().err


def test_ctrl_c_keeps_the_results_so_far(tmp_path: Path) -> None:
    """As a program of its own, on the default text."""
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, "--steps=100000"]
    # In the background of a script Ctrl-C is ignored, and child processes inherit that.
    process = subprocess.Popen(
        [*command, f"--out={tmp_path}", "--recipes=bf16,fp8"],
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
    assert "(standard library, " in lines[0]
    assert lines[2].startswith(" bf16  step     1/100000"), lines
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "bf16" in printed
    assert "interrupted: the table and the files hold the results so far" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["interrupted"] is True
    assert results["rows"][0]["steps"] >= 1
    assert results["rows"][1]["status"] == "not started"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "results.json"]


def test_the_text(demo: ModuleType) -> None:
    import gpt_data

    library = gpt_data.load(None, 128)
    assert library.train.numel() > 5 * library.validation.numel() > 100_000
    assert 4.0 < library.unigram_entropy() < 5.0
    # Whole files are held out: no long piece of them is in the training text.
    piece = bytes(library.validation[5000:5400].numpy())
    assert piece not in bytes(library.train.numpy())
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


def test_the_model_is_causal_and_starts_near_uniform_predictions(demo: ModuleType) -> None:
    from gpt_model import GPT, GPTConfig

    config = GPTConfig(layers=2, width=64, heads=2, context=16)
    data = torch.randint(0, 256, (8, 17))
    assert GPT(config)(data[:, :-1], data[:, 1:]).item() < 1.25 * math.log(256)

    model = GPT(config)
    for block in model.blocks:  # zero at the start: then no position would see another
        torch.nn.init.normal_(block.attention.proj.weight, std=0.1)
        torch.nn.init.normal_(block.down.weight, std=0.1)
    logits: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, out: logits.append(out[:, :8]))
    tokens = torch.randint(0, 256, (1, 16))
    later, earlier = tokens.clone(), tokens.clone()
    later[0, 12] ^= 1
    earlier[0, 3] ^= 1
    for each in (tokens, later, earlier):
        model(each, each)
    assert torch.equal(logits[1], logits[0])
    changed = (logits[2] != logits[0]).any(-1)[0]
    assert changed.tolist() == [False] * 3 + [True] * 5
