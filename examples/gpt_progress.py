"""Progress of a comparison: a bar per precision with rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

LINES = 8  # plain lines per precision


class Progress:
    """`step` is what compare() calls after each training step; use as a context manager."""

    def __init__(self, tokens_per_step: int, loss_factor: float, recipes: int) -> None:
        self.tokens, self.factor = tokens_per_step, loss_factor
        self.to_come = recipes  # after the current one
        self.recipe, self.started = "", 0.0
        self.bars: Any = None
        self.bar: Any = None
        self.stack = ExitStack()

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            try:
                from rich import progress
            except ImportError:
                return self
            self.bars = self.stack.enter_context(
                progress.Progress(
                    progress.TextColumn("{task.description:>5}"),
                    progress.BarColumn(),
                    progress.MofNCompleteColumn(),
                    progress.TextColumn("{task.fields[state]}"),
                    progress.TimeElapsedColumn(),
                )
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stack.close()

    def step(self, recipe: str, step: int, steps: int | None, loss: float) -> None:
        if recipe != self.recipe:  # the first step's time, which warms up, is not in the speed
            self.recipe, self.started = recipe, time.perf_counter()
            self.to_come -= 1
            if self.bars is not None:
                self.bar = self.bars.add_task(recipe, total=steps, state="")
        seconds = time.perf_counter() - self.started
        state = f"{loss * self.factor:6.3f} bits/byte"
        if step > 1:
            state += f"  {(step - 1) * self.tokens / seconds:6,.0f} bytes/s"
        if step > 1 and steps is not None:  # as if all recipes were as fast as this one
            left = (steps - step + steps * self.to_come) * seconds / (step - 1)
            state += f"  {round(left) // 60:2d}:{round(left) % 60:02d} left"
        if self.bars is not None:
            self.bars.update(self.bar, completed=step, state=state)
        elif steps is None or step in (1, steps) or step % max(1, steps // LINES) == 0:
            print(f"{recipe:>5}  step {step:5d}/{steps}  {state}", flush=True)
