"""The memory of a training step: tensors saved for backward in 8 and 4 bits; torch's allocator."""

from .caching_allocator import (
    empty_cache,
    memory_allocated,
    memory_reserved,
    use_caching_allocator,
)
from .compress_saved import compress_saved

__all__ = [
    "compress_saved",
    "empty_cache",
    "memory_allocated",
    "memory_reserved",
    "use_caching_allocator",
]
