"""Bytes of text for the demo: the standard library's source code, or a file of the user's."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

HELD_OUT = 10  # one file in ten, or the last tenth of a single file, is for validation only
# Not part of the library itself, or not installed everywhere: leave them out of everyone's text.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class TextError(Exception):
    """The text cannot be read or is too short; the message is one sentence for the user."""


@dataclass(frozen=True)
class Text:
    """train and validation: uint8 [bytes], from different files (or parts of one)."""

    source: str
    train: torch.Tensor
    validation: torch.Tensor

    def unigram_entropy(self) -> float:
        """-sum p log2 p over all bytes of the text: bits per byte of a model without context."""
        counts = torch.bincount(torch.cat((self.train, self.validation)).long(), minlength=256)
        p = counts[counts > 0].double() / counts.sum()
        return float(-(p * p.log2()).sum())


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def standard_library() -> Text:
    """The .py files of the running interpreter's standard library, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not SKIPPED.intersection(path.relative_to(root).parts)
    )
    files = [(root / name).read_bytes() for name in names]
    train = b"\n".join(data for i, data in enumerate(files) if i % HELD_OUT != HELD_OUT - 1)
    validation = b"\n".join(files[HELD_OUT - 1 :: HELD_OUT])
    return Text(f"standard library, {len(files)} files", as_tensor(train), as_tensor(validation))


def text_file(path: str) -> Text:
    """One file: its last tenth is held out."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TextError(f"cannot read the text file {path}: {error.strerror}") from error
    cut = len(data) - len(data) // HELD_OUT
    return Text(path, as_tensor(data[:cut]), as_tensor(data[cut:]))


def load(path: str | None, context: int) -> Text:
    """The text to train on. TextError if it cannot be read or has too few bytes for `context`."""
    text = text_file(path) if path else standard_library()
    need = 8 * HELD_OUT * (context + 1)
    have = text.train.numel() + text.validation.numel()
    if text.validation.numel() < 8 * (context + 1) or have < need:
        raise TextError(
            f"the text ({text.source}) has {have} bytes, too short to hold out a part for "
            f"validation: at least {need} are needed"
            + ("" if path else " (give a text of your own with --text FILE)")
        )
    return text


class Batches:
    """`count` batches (tokens, targets), both int64 [batch, context]; the same at each iteration.

    Training windows start at places drawn from `seed`; with seed=None they are spread evenly
    over the text, for validation.
    """

    def __init__(
        self, data: torch.Tensor, batch: int, context: int, count: int, seed: int | None
    ) -> None:
        self.data, self.batch, self.context, self.count = data, batch, context, count
        last = data.numel() - context - 1
        if seed is None:
            starts = torch.linspace(0, last, count * batch, dtype=torch.float64).long()
        else:
            generator = torch.Generator().manual_seed(seed)
            starts = torch.randint(last + 1, (count * batch,), generator=generator)
        self.starts = starts.view(count, batch)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= i < self.count:  # ends a for loop over the batches
            raise IndexError(i)
        window = self.starts[i, :, None] + torch.arange(self.context + 1)
        text = self.data[window].long()
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
