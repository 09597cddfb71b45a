"""How much memory a training step takes, and whether a larger one still fits."""

from __future__ import annotations

import gc

import torch

from . import gpu
from .vision_models import Batch
from .vision_step import Trainer


def peak(trainer: Trainer, batch: Batch) -> int | None:
    """Bytes of tensors at the fullest moment of a step; None on a CPU, where nobody counts."""
    if gpu.ON_CPU:
        trainer.step(batch)
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    trainer.step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def guess(count: int, most: int | None) -> int | None:
    """The batch that fills the device if all but parameters and states grows with the batch, by
    the peak `most` of a step of `count` images."""
    if most is None:
        return None
    release()
    return int(gpu.free_bytes() * count / (most - torch.cuda.memory_allocated()))


def can_step(trainer: Trainer, count: int) -> bool:
    """Whether a step of `count` images has the memory it needs. Gives back all that it took."""
    try:
        trainer.step(trainer.batch(count)).item()
    except torch.OutOfMemoryError:
        fine = False
    except RuntimeError as error:
        if not _for_want_of_memory(error):
            raise
        fine = False
    else:
        fine = True
    trainer.optimizer.zero_grad()
    release()
    return fine


def _for_want_of_memory(error: RuntimeError) -> bool:
    """Libraries that ask for memory themselves say so in their own words."""
    text = str(error).lower()
    return "out of memory" in text or "alloc_failed" in text


def release() -> None:
    gc.collect()
    gpu.release()
