"""Monitor: it changes nothing else, waits for nothing, and writes what is new."""

from __future__ import annotations

import gc
import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from models import Model
from test_stats import Net, measured, of, one_linear, one_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.diagnostics.writers import finite
from mixprec.stats import Monitor


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8", "fp8-delayed", "fp8-block"])
def test_no_bit_of_the_model_changes(recipe: str) -> None:
    def train(watched: bool) -> tuple[list[torch.Tensor], Monitor]:
        torch.manual_seed(0)
        model = mixprec.convert(Net(), recipe)
        monitor = Monitor(model, every=2, sqnr=True)
        if watched:
            monitor.attach()
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = mixprec.optim.AdamW(params, 1e-2)
        for _ in range(4):
            y = one_step(model, torch.randn(8, 16))
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
        monitor.close()
        assert not any(m._forward_hooks for m in model.modules()), "close() removes the hooks"
        return [y.detach(), *model.state_dict().values()], monitor

    (plain, _), (watched, monitor) = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert len(monitor.records) == 2
    assert of(monitor, "twice", "x")["calls"] == 2
    assert of(monitor, "tied", "w")["amax"] == of(monitor, "twice", "w")["amax"]
    rows = monitor.records[0]["tensors"]
    assert ("frozen", "g") not in {(row["layer"], row["tensor"]) for row in rows}


def test_nothing_waits_for_the_device_before_flush() -> None:
    """A fake tensor has no value: whoever asks for one raises."""
    gc.collect()  # delayed layers of other tests, whose scales a step would update too
    with torch._subclasses.FakeTensorMode():
        model = mixprec.convert(Net(), "fp8-delayed")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        monitor = Monitor(model, every=1, sqnr=True, scaler=mixprec.GradScaler()).attach()
        for _ in range(2):
            one_step(model, torch.randn(8, 16))
            optimizer.step()
            monitor.step()
        # x, w, y of four calls, and g of the three that are not frozen.
        assert sum(len(key) == 5 for key, _ in monitor._samples) == 2 * (4 * 3 + 3)
        with pytest.raises(RuntimeError):
            monitor.flush()
    # No layer of fake tensors may be left for the optimizer steps of other tests to update.
    del model, optimizer, monitor
    gc.collect()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_repeated_forward_counts_once(reentrant: bool) -> None:
    """`last` is after it: a repeated forward ends where it may."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.last(self.inner(x)), x, use_reentrant=reentrant)

    model = Model(forward, inner=nn.Linear(16, 16), last=nn.Linear(16, 16))
    monitor = measured(mixprec.convert(model, "fp8"), torch.randn(8, 16, requires_grad=True))
    assert [of(monitor, "inner", t)["calls"] for t in "xwgy"] == [1, 1, 1, 1]


def test_passes_without_grad_and_steps_between_samples_leave_nothing() -> None:
    model = one_linear()
    with Monitor(model, every=3) as monitor:
        with torch.no_grad():
            model(torch.randn(2, 16))
        one_step(model, torch.ones(2, 16))
        with mixprec.autocast(enabled=False):
            one_step(model, torch.ones(5, 16))
        with mixprec.autocast("bf16"):
            one_step(model, torch.ones(7, 16))
        for _ in range(5):
            monitor.step()
            one_step(model, torch.ones(3, 16))
    assert [record["step"] for record in monitor.records] == [0, 3]
    first = [r for r in monitor.records[0]["tensors"] if r["tensor"] == "x"]
    assert [(r["format"], r["elements"]) for r in first] == [("e4m3", 32), ("bf16", 112)]


def test_compiled_layers_are_left_alone() -> None:
    model = one_linear()
    with Monitor(model, every=1) as monitor:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        y = one_step(compiled, torch.ones(2, 16))
        monitor.step()
    torch._dynamo.reset()
    assert monitor.records[0]["tensors"] == []
    assert torch.equal(y, model(torch.ones(2, 16)))


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        Monitor([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have layers with a recipe"):
        Monitor(nn.Linear(2, 2))
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match="every must be an int of 1 or more"):
            Monitor(one_linear(), every=every)  # type: ignore[arg-type]
    monitor = Monitor(one_linear())
    for wrong in (print, "runs/1", logging.getLogger("mixprec")):  # its log() takes a level
        with pytest.raises(TypeError, match=r"add_scalar\(tag, .* or log\(dict, step=\), .* got "):
            monitor.to_logger(wrong)
    assert monitor.table() == "nothing was sampled"
    monitor.to_jsonl(tmp_path / "none.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_outputs_take_only_what_is_new(tmp_path: Path) -> None:
    model, path = one_linear(), tmp_path / "r.jsonl"
    writer, wandb = Mock(spec=["add_scalar"]), Mock(spec=["log"])
    path.write_text('{"cut sho')
    with Monitor(model, every=1) as monitor:
        for _ in range(2):
            for _ in range(2):
                one_step(model, torch.ones(2, 16))
                monitor.step()
            monitor.flush()
            monitor.to_jsonl(path)
            monitor.to_logger(writer)
            monitor.to_logger(wandb)
    lines = path.read_text().splitlines()
    assert lines[0] == '{"cut sho'
    assert [json.loads(line)["step"] for line in lines[1:]] == [0, 1, 2, 3]
    assert json.loads(lines[1])["tensors"] == finite(monitor.records[0]["tensors"])
    added = [call.args for call in writer.add_scalar.call_args_list]
    assert [s for tag, _, s in added if tag == "amax/x/0"] == [0, 1, 2, 3]
    assert ("scale_max/x/0", 256.0, 0) in added
    logged = [(call.args[0], call.kwargs["step"]) for call in wandb.log.call_args_list]
    assert [step for _, step in logged] == [0, 1, 2, 3]
    assert [(*number, step) for numbers, step in logged for number in numbers.items()] == added


def test_table_of_many_layers_with_long_names() -> None:
    layers = {f"encoder_of_the_first_modality_with_a_long_name_{i}": nn.Linear(16, 16)
              for i in range(5)}  # fmt: skip
    model = mixprec.convert(nn.Sequential(OrderedDict(layers)), "fp8")
    with torch.no_grad():
        model[3].weight[0, 0] = 1e6  # beside which the others become 0
    monitor = measured(model, torch.randn(4, 16), sqnr=True)
    lines = monitor.table(limit=2).splitlines()
    assert "name_3  w e4m3" in lines[3]
    assert "99.61%" in lines[3]
    assert max(map(len, lines)) <= 80
    assert [line.split()[0][:3] for line in lines[3:]] == ["..."] * 3
    assert lines[-1] == "... and 18 more"
