"""What train_gpt.py measures of each precision, as a table and as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mixprec.amp.rules import power
from mixprec.diagnostics.writers import aligned, finite, readable

BITS = 1 / math.log(2)  # a loss in nats times this is in bits
SIZES = ("params", "grads", "optim", "saved", "peak")


@dataclass
class Row:
    """One training run. Losses are in nats; tokens: of a step; reseeded: fp32 from another seed,
    which shows what chance changes.

    status: "complete", or where and why the run ended; bytes: of parameters, gradients, optimizer
    state with FP32 masters, what a step saves for its backward pass, and on a GPU the largest
    allocation; data: CRC-32 of the batches; audit: of a step after the training, its summary and
    findings; wrong: which layers did not run in the precision; sqnr: by layer and product, in dB.
    """

    recipe: str
    tokens: int = 0
    reseeded: bool = False
    status: str = "not started"
    validation_loss: float | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    skipped_steps: int = 0
    loss_scale: float | None = None
    data: int = 0
    audit: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    sqnr: dict[str, dict[str, float | None]] = field(default_factory=dict)


@dataclass
class Report:
    """A row for each precision; interrupted: Ctrl-C ended the comparison."""

    rows: list[Row]
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def difference(self, row: Row) -> float | None:
        """Relative difference of the validation loss to fp32's: 0.01 is one percent worse."""
        base = next((r.validation_loss for r in self.rows if r.recipe == "fp32"), None)
        return None if not base or row.validation_loss is None else row.validation_loss / base - 1

    def chance(self) -> float | None:
        """How much another seed changes the loss of fp32, relatively."""
        differences = (self.difference(row) for row in self.rows if row.reseeded)
        return next((abs(x) for x in differences if x is not None and math.isfinite(x)), None)

    def table(self) -> list[list[str]]:
        sizes = [name for name in SIZES if any(name in row.bytes for row in self.rows)]
        header = ["recipe", "bits/byte", "vs fp32", "tokens/s", *sizes]
        return [header, *([*self._cells(row, sizes)] for row in self.rows)]

    def _cells(self, row: Row, sizes: list[str]) -> Iterator[str]:
        loss, difference = row.validation_loss, self.difference(row)
        yield row.recipe
        yield "-" if loss is None else f"{loss * BITS:.4f}"
        yield "-" if difference is None else f"{difference:+.2%}"
        yield f"{row.tokens / statistics.median(row.seconds):,.0f}" if row.seconds else "-"
        yield from (readable(row.bytes.get(name)) for name in sizes)

    def notes(self) -> list[str]:
        """What the table has no column for, in sentences."""
        sentences = []
        for row in self.rows:
            said, skipped = row.recipe, f"{row.skipped_steps} of {len(row.losses)} steps skipped"
            if row.status != "complete":
                sentences.append(f"{said}: {row.status}, {len(row.losses)} steps")
            if row.loss_scale is not None:
                skipped += f", loss scale {power(row.loss_scale)} at the end"
            if row.skipped_steps or row.loss_scale is not None:
                sentences.append(f"{said}: {skipped}")
        if (chance := self.chance()) is None:
            return sentences
        rows = [r for r in self.rows if r.recipe != "fp32" and r.validation_loss is not None]
        gaps = {row.recipe: abs(self.difference(row) or 0.0) for row in rows if not row.reseeded}
        said = f"fp32 from another seed, which changes the loss by {chance:.2%}"
        sentences += [f"{row.recipe}: {said}" for row in rows if row.reseeded]
        if within := [name for name, gap in gaps.items() if gap <= chance]:
            sentences.append(f"{', '.join(within)}: within run-to-run noise")
        if beyond := [name for name in gaps if name not in within]:
            said = "a larger one, which a single run cannot tell from chance"
            sentences.append(f"{', '.join(beyond)}: {said}")
        return sentences

    def __str__(self) -> str:
        return "\n".join([*aligned(self.table()), *self.notes()])

    def save(self, path: Path) -> None:
        content = {**asdict(self), "table": self.table(), "notes": self.notes()}
        path.write_text(json.dumps(finite(content), indent=1, allow_nan=False) + "\n")
