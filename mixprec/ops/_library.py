"""The torch library "mixprec": op definitions, and the compiled extension behind them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

LIBRARY = torch.library.Library("mixprec", "DEF")

OPS: dict[str, Callable[..., None]] = {}  # every op that define() made, with its check

INSTALL = "pip install --no-build-isolation -e ."


def _load() -> tuple[ModuleType | None, str | None]:
    """Import mixprec._C; on failure keep the reason, which is raised when an op first needs it."""
    try:
        return importlib.import_module("mixprec._C"), None
    except ModuleNotFoundError:
        here = Path(__file__).resolve().parents[1]
        hint = (
            f"mixprec is imported from its source folder {here}, which holds no build; there, "
            if (here.parent / "setup.py").exists()
            else "this installation holds no compiled ops; in the source folder "
        )
        return None, f"mixprec._C is not built: {hint}run: {INSTALL}"
    except ImportError as error:
        return None, (
            f"mixprec._C was built but does not load ({error}); it needs torch >= 2.11 and the "
            f"Python it was built for. To rebuild it, in the source folder run: {INSTALL}"
        )


C, LOAD_ERROR = _load()


def variant_name(name: str, variant: str) -> str:
    """`gemm`, `triton` -> `gemm_triton`; `unscale_`, `reference` -> `unscale_reference_`."""
    return f"{name[:-1]}_{variant}_" if name.endswith("_") else f"{name}_{variant}"


def define(
    name: str,
    signature: str,
    *,
    check: Callable[..., None],
    reference: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
) -> None:
    """Define `mixprec::name` and `mixprec::name_reference` from one signature string.

    The first gets its kernels from the compiled libraries, by device; the second is `reference`
    on every device. All three take the schema's arguments in order. `check` raises ValueError or
    TypeError for arguments that do not fit together; `fake` computes output shapes, dtypes and
    strides (None for an op that returns nothing). The compiled kernels check again, in C++.
    """

    def checked_fake(*args: Any) -> Any:
        check(*args)
        return fake(*args) if fake is not None else None

    def checked_reference(*args: Any) -> Any:
        check(*args)
        # The dtypes are the op's own business: torch.autocast must not change a reference's.
        with torch.autocast(_device_type(args), enabled=False):
            return reference(*args)

    OPS[name] = check
    reference_name = variant_name(name, "reference")
    for op in (name, reference_name):
        LIBRARY.define(op + signature, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"mixprec::{op}", checked_fake, lib=LIBRARY)
    LIBRARY.impl(reference_name, checked_reference, "CompositeExplicitAutograd")


def _device_type(args: tuple[Any, ...]) -> str:
    """The device type of the first tensor among the arguments of an op."""
    for arg in args:
        if isinstance(arg, (list, tuple)) and arg:
            arg = arg[0]
        if isinstance(arg, torch.Tensor):
            return arg.device.type
    return "cpu"


def op_handle(name: str) -> Callable[..., Any]:
    """The callable of an op that `define` made."""
    return getattr(torch.ops.mixprec, name).default
