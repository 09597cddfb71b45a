"""Optimizers that train 16-bit parameters through FP32 master weights."""

from .adamw import AdamW

__all__ = ["AdamW"]
