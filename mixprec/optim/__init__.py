"""Optimizers that train 16-bit parameters in FP32 precision: FP32 masters, 16-bit remainders, or
stochastic rounding."""

import sys

from . import sgd
from .adamw import Adam, AdamW
from .averaged import AveragedModel, fp32_state_dict
from .masters import Masters
from .muon import Muon
from .sgd import SGD, Lion

__all__ = ["SGD", "Adam", "AdamW", "AveragedModel", "Lion", "Masters", "Muon", "fp32_state_dict"]

sys.modules[f"{__name__}.lion"] = sgd  # where pickles of earlier versions look for Lion
