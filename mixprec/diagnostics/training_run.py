"""One training run of compare() and its measurements."""

from __future__ import annotations

import ctypes
import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..functional import observed
from ..memory.compress_saved import recorded
from ..nn import Layer
from ..optim._state import short
from .layers import after_forward
from .memory_report import SavedBytes
from .passes import map_tensors, scalar_loss, tensors
from .report import Row
from .suggest import choose_outliers, model_sqnr
from .writers import SHORT

MAX_NOT_FINITE = 10  # losses in a row that are Inf or NaN before a run is ended as diverged


def torch_formats(dtype: torch.dtype) -> str:
    """The formats of a GEMM run by torch.nn.Linear, for a Row."""
    name = SHORT.get(short(dtype), str(dtype))
    return f"{name} x {name} (torch)"


def checksum(batch: Any, start: int) -> int:
    """CRC-32 of the bytes of the batch's tensors, continued from `start`."""
    for item in tensors(batch):
        flat = item.detach().cpu().contiguous()
        start = zlib.crc32(ctypes.string_at(flat.data_ptr(), flat.nbytes), start)
    return start


def tensor_bytes(values: Iterable[object]) -> int:
    return sum(t.nbytes for t in values if isinstance(t, torch.Tensor))


class _Clock:
    """Times of the parts of a step; on a GPU by events, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, part: str) -> None:
        """Record the end of `part`."""
        self._marks.append((part, self._now()))

    def parts(self) -> dict[str, float]:
        """Seconds of each part; on a GPU, call it after a synchronization."""
        seconds = {}
        for (_, start), (part, end) in itertools.pairwise(self._marks):
            seconds[part] = start.elapsed_time(end) * 1e-3 if self._on_gpu else end - start
        return seconds


class TrainingRun:
    """A model with its optimizer and scaler, trained once; measurements go into `row`."""

    def __init__(
        self,
        row: Row,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
        cast_inputs: bool,
        count: Callable[[Any], int] | None,
    ) -> None:
        self.row, self.model, self.optimizer, self.scaler = row, model, optimizer, scaler
        self.device, self.count = device, count
        self.last: Any = None  # the batch of the newest step
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.optimizer_calls, self._was_called = 0, False
        optimizer.register_step_post_hook(self._called)
        # The dtype of most elements of the parameters, except norms, which stay FP32.
        sizes: dict[torch.dtype, int] = {}
        for p in model.parameters():
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
        self.input_dtype = max(sizes, key=lambda d: sizes[d]) if cast_inputs and sizes else None

    def _called(self, *_: Any) -> None:
        self._was_called = True  # perhaps once more, from a subclass that calls super().step()

    def _on_device(self, t: torch.Tensor) -> torch.Tensor:
        return t.to(self.device, self.input_dtype if t.is_floating_point() else None)

    def _loss(self, batch: Any) -> torch.Tensor:
        batch = map_tensors(self._on_device, batch)
        remedy = "forward must return it, or an output with it as `loss`"
        return scalar_loss("compare", self.model, batch, None, remedy)

    def choose_outliers(self, batches: Iterable[Any]) -> None:
        """Of all layers whose recipe has some."""
        layers = (m for m in self.model.modules() if isinstance(m, Layer))
        if any(layer.recipe.outliers for layer in layers):
            choose_outliers(self.model, (map_tensors(self._on_device, b) for b in batches))

    def train(
        self,
        batches: Iterable[Any],
        steps: int | None,
        schedule: Callable[[int], float] | None,
        progress: Callable[[str, int, int | None, float], None],
        same_data: list[int],
    ) -> None:
        """Run the steps; the batches' checksums must be those of `same_data` where it has some."""
        row, not_finite = self.row, 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.model.train()
        with self._gemms_counted():
            for step, batch in enumerate(itertools.islice(batches, steps)):
                row.status = f"interrupted in step {step + 1}"  # until the step is over
                self.last = batch
                row.data.append(checksum(batch, row.data[-1] if row.data else 0))
                if step < len(same_data) and row.data[step] != same_data[step]:
                    raise ValueError(
                        f"compare: batches must be the same for every recipe, but step {step + 1} "
                        f"of {row.recipe} got other data than in the first run: seed what shuffles"
                    )
                units = self.count(batch) if self.count else _first_size(batch)
                for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
                    group["lr"] = base * (schedule(step) if schedule else 1.0)
                start = time.perf_counter()
                loss = self._step(batch, probe=step == 0)
                row.seconds.append(time.perf_counter() - start)
                row.units.append(units)
                row.losses.append(loss)
                progress(row.recipe, step + 1, steps, loss)
                not_finite = 0 if math.isfinite(loss) else not_finite + 1
                if not_finite == MAX_NOT_FINITE:
                    row.status = (
                        f"diverged: {MAX_NOT_FINITE} losses in a row not finite, step {step + 1}"
                    )
                    return
        if not row.steps:
            raise ValueError("compare: batches must hold at least one batch, got none")
        row.status = "complete"

    def _step(self, batch: Any, probe: bool) -> float:
        clock = _Clock(self.device)
        saved = SavedBytes(self.model.parameters() if probe else ())
        with recorded(saved) if probe else nullcontext():
            loss = self._loss(batch)
        if probe:
            self.row.saved_bytes = sum(saved.values())
        clock.mark("forward")
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        clock.mark("backward")
        if self.scaler is None:
            self.optimizer.step()
            clock.mark("optimizer")
        else:
            self.scaler.step(self.optimizer)
            clock.mark("optimizer")
            self.scaler.update()
            clock.mark("scaler")
        self.optimizer_calls += self._was_called
        self._was_called = False
        if probe:
            self.row.gradient_bytes = tensor_bytes(p.grad for p in self.model.parameters())
        self.optimizer.zero_grad(set_to_none=True)
        number = loss.item()  # waits for a GPU, so that the time of the step is the whole step
        for name, seconds in clock.parts().items():
            self.row.parts.setdefault(name, []).append(seconds)
        return number

    def finish(self) -> None:
        """Measure memory, skipped steps and loss scale when the run ends, also by an error."""
        states = [s for p, s in self.optimizer.state.items() if isinstance(p, torch.Tensor)]
        if self.device.type == "cuda":
            self.row.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.row.parameter_bytes = tensor_bytes(self.model.parameters())
        self.row.optimizer_bytes = tensor_bytes(t for state in states for t in state.values())
        # An optimizer that skips on the device does not count the step; one without a count is not
        # called for a skipped step.
        counts = [int(state["step"]) for state in states if "step" in state]
        self.row.skipped_steps = self.row.steps - max(counts, default=self.optimizer_calls)
        if self.scaler is not None:
            self.row.loss_scale = self.scaler.get_scale()

    def measure_sqnr(self) -> None:
        """Measure each layer in one more pass over the last batch, without an optimizer step."""

        def forward_and_backward() -> None:
            loss = self._loss(self.last)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

        self.row.sqnr = model_sqnr(self.model, forward_and_backward)
        self.optimizer.zero_grad(set_to_none=True)

    def validate(self, batches: Iterable[Any]) -> float:
        """The mean loss of the batches, in evaluation mode; ValueError if there are none."""
        self.model.eval()
        with torch.no_grad():
            losses = [self._loss(batch).item() for batch in batches]
        if not losses:
            raise ValueError("compare: validation must hold at least one batch, got none")
        return math.fsum(losses) / len(losses)

    @contextmanager
    def _gemms_counted(self) -> Iterator[None]:
        """Count the GEMMs of every Linear: ours report each, torch's are counted by hooks."""
        gemms = self.row.gemms

        def ours(kind: str, name: str, a: str, b: str) -> None:
            gemms[name, kind, f"{a} x {b}"] += 1

        def torchs(name: str, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
            formats = torch_formats(y.dtype)
            gemms[name, "forward", formats] += 1
            operands = {"grad_input": x, "grad_weight": module.weight}
            kinds = [kind for kind, t in operands.items() if t.requires_grad]

            def after_backward(grad: torch.Tensor) -> None:
                gemms.update((name, kind, formats) for kind in kinds)

            if y.requires_grad:
                y.register_hook(after_backward)

        layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and not isinstance(module, Layer)
        }
        with observed(ours), after_forward(layers, torchs):
            yield


def _first_size(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one."""
    return next((t.shape[0] for t in tensors(batch) if t.dim()), 1)
