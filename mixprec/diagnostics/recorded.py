"""Records of training steps, as lines of JSON and as numbers for TensorBoard and others."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]


def finite(value: Any) -> Any:
    """`value` with NaN and Inf, which JSON does not have, as None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(v) for key, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def append_jsonl(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    lines = [json.dumps(finite(record), allow_nan=False) + "\n" for record in records]
    if not lines:
        return
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            lines[0] = lines[0] if file.read(1) == b"\n" else "\n" + lines[0]
        file.write("".join(lines).encode())


class Recorded:
    """Has `records`, each with its "step". A subclass says which numbers are in a record."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._written: dict[Any, int] = {}  # how many records a file or logger has

    def _numbers(self, record: Record) -> Iterable[tuple[str, float]]:
        """(tag, value) of every number in `record`."""
        raise NotImplementedError

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Append the records that were not written there yet, a line each, with None for NaN and
        Inf. All lines are written at once; a line truncated by a crash does not affect later
        ones."""
        done = self._written.get(os.path.abspath(path), 0)
        append_jsonl(self.records[done:], path)
        self._written[os.path.abspath(path)] = len(self.records)

    def to_logger(self, logger: Any) -> None:
        """Give every number of `records` that `logger` does not have yet to it.

        logger: an object with add_scalar(tag, value, global_step), such as TensorBoard's
        SummaryWriter, which gets one call per number; or with log(dict, step=), such as a run of
        Weights & Biases or its module `wandb`, which gets one call per record. TypeError for
        another object.
        """
        add = getattr(logger, "add_scalar", None)
        log = getattr(logger, "log", None)
        if isinstance(logger, logging.Logger) or not (callable(add) or callable(log)):
            raise TypeError(
                f"{type(self).__name__}: logger must have add_scalar(tag, value, global_step), as "
                "TensorBoard's SummaryWriter, or log(dict, step=), as a run of Weights & Biases, "
                f"got {type(logger).__name__}"
            )
        for record in self.records[self._written.get(logger, 0) :]:
            numbers, step = dict(self._numbers(record)), record["step"]
            if not callable(add):
                logger.log(numbers, step=step)
                continue
            for tag, value in numbers.items():
                add(tag, value, step)
        self._written[logger] = len(self.records)
