"""Loss scaling: the GradScaler, its rules, and what it reports."""

from .grad_scaler import GradScaler

__all__ = ["GradScaler"]
