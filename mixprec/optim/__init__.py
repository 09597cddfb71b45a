"""Optimizers that train 16-bit parameters as FP32 numbers: with masters, remainders, or chance."""

from ._fp32 import fp32_state_dict
from .adamw import Adam, AdamW
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "fp32_state_dict"]
