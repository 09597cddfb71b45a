"""What a training step keeps in memory: tensors saved for backward, in 8 and 4 bits."""

from .compress_saved import compress_saved

__all__ = ["compress_saved"]
