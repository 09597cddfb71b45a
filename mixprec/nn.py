"""Modules that compute in low precision: torch.nn's own, with a recipe."""

from __future__ import annotations

from typing import Any

import torch

from . import functional
from .recipes import Recipe


class Linear(torch.nn.Linear):
    """y = x @ weight^T + bias with the operands of all three GEMMs cast as `recipe` says.

    A torch.nn.Linear in everything else: parameters, initialisation, state_dict keys. Parameters
    may be fp32, bf16 or fp16 and are never changed. The output has the input's dtype; under
    torch.autocast, the autocast dtype. recipe: "bf16", "fp16", "fp8" or a Recipe. name: what
    `mixprec.functional.observed` reports; `mixprec.convert` sets it to the module's path. See
    `mixprec.functional.linear` for the formulas and what is raised.
    """

    recipe: Recipe
    name: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "fp8",
        name: str = "",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = Recipe.parse(recipe)
        self.name = name

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, recipe: Recipe | str = "fp8", name: str = ""
    ) -> Linear:
        """A Linear that shares `linear`'s parameters, hooks and every other attribute.

        Handles of hooks that were registered on `linear` keep working. ValueError if `linear`
        carries a forward of its own (put there by a wrapper or by .compile()), which would be
        lost: convert first, then wrap or compile.
        """
        if not isinstance(linear, torch.nn.Linear):
            got = type(linear).__name__
            raise TypeError(f"from_linear: linear must be a torch.nn.Linear, got {got}")
        recipe = Recipe.parse(recipe)
        state: dict[str, Any] = dict(linear.__dict__)
        for attribute in ("forward", "_compiled_call_impl"):
            if state.get(attribute) is not None:
                raise ValueError(
                    f"from_linear: linear must be a plain torch.nn.Linear, but {name or 'it'} has "
                    f"its own {attribute}: convert it before it is wrapped or compiled"
                )
        # The registries are copied, so that a parameter added to one module does not appear in
        # the other; hook dictionaries stay shared, because their handles point into them.
        for registry in ("_parameters", "_buffers", "_modules"):
            state[registry] = state[registry].copy()
        converted = cls.__new__(cls)
        converted.__dict__ = state
        converted.recipe = recipe
        converted.name = name
        return converted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        out_dtype = None
        if device != "meta" and torch.is_autocast_enabled(device):  # it knows no meta device
            out_dtype = torch.get_autocast_dtype(device)
        return functional.linear(
            x, self.weight, self.bias, recipe=self.recipe, out_dtype=out_dtype, name=self.name
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"
