"""Small models for tests, whose forward passes are functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Model(nn.Module):
    """Parts by their names, and `function` of the model and what it is called with.

    Model(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    """

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)
