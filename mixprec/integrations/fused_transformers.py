"""What classes of transformers compute, for `mixprec.convert(fuse=True)`: norms, activations, MLPs.

`mixprec.nn` imports this when transformers has been imported. A class is known if it is the one
that its module of transformers defines, with all of its methods, in a version that the tests of
this table have run with (tests/integrations/test_fused_families.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from ..nn._feed_forward import register_feed_forward
from ..nn._known_functions import register_rotary
from ..nn._region import current_region
from ..nn.known import Describe, FirstHalf, MLPSpec, NormSpec, SecondHalf, register_fusion
from . import transformers_classes as names

__all__ = ["CLASSES", "LAYERS", "VERSIONS", "register"]

VERSIONS = ("5.23", "5.24")


def _rms_norm(m: Any) -> NormSpec:
    """weight * (x / sqrt(mean(x^2) + eps)), where the weight may be FP32 beside 16 bits."""
    return NormSpec(m.weight.shape[0], m.variance_epsilon, m.weight, promote=True)


def _gemma_norm(m: Any) -> NormSpec | None:
    """(1 + weight) * (x / sqrt(mean(x^2) + eps)), in the dtype of x."""
    if "_norm" in vars(m):
        return None
    return NormSpec(m.weight.shape[0], m.eps, 1.0 + m.weight.float())


def _mlp(first: tuple[str, ...], act: str, last: str, dropout: str) -> Describe:
    """What an MLP computes, from the names of its attributes."""

    def describe(m: Any) -> MLPSpec | None:
        if not isinstance(getattr(m, act), nn.Module):
            return None
        layers = tuple(getattr(m, name) for name in first)
        after = getattr(m, dropout) if dropout else None
        return MLPSpec(layers, getattr(m, act), getattr(m, last), after)

    return describe


def _first_half(m: Any) -> FirstHalf | None:
    act = m.intermediate_act_fn
    return FirstHalf(m.dense, act) if isinstance(act, nn.Module) else None


def _second_half(m: Any) -> SecondHalf:
    return SecondHalf(m.dense, m.dropout, m.LayerNorm)


def _gelu(m: Any) -> str | None:
    return "gelu" if m.act is nn.functional.gelu else None


def _new_gelu(m: Any) -> str | None:
    # In a region torch.pow is FP32, and so is what it returns.
    return "gelu_tanh" if current_region() is None else None


def _gelu_tanh(m: Any) -> str | None:
    act = m.act
    known = isinstance(act, functools.partial) and act.func is nn.functional.gelu and not act.args
    return "gelu_tanh" if known and act.keywords == {"approximate": "tanh"} else None


Classes = dict[str, dict[str, Describe]]


def _classes() -> Classes:
    found: Classes = {
        "activations": {
            "SiLUActivation": lambda m: "silu",
            "GELUActivation": _gelu,
            "GELUTanh": _gelu_tanh,
            "NewGELUActivation": _new_gelu,
            "ReLUSquaredActivation": lambda m: "relu2",
        }
    }

    def add(entries: Iterable[str], describe: Describe) -> None:
        for entry in entries:
            path, name = place(entry)
            found.setdefault(path, {})[name] = describe

    add((f"{entry}RMSNorm" for entry in names.RMS_NORMS.split()), _rms_norm)
    add(names.GEMMA_NORMS.split(), _gemma_norm)
    for attributes, entries in names.MLPS.items():
        add(entries.split(), _mlp(*attributes))
    add((f"{_halves(entry)}Intermediate" for entry in names.ENCODERS.split()), _first_half)
    add((f"{_halves(entry)}Output" for entry in names.ENCODERS.split()), _second_half)
    return found


def place(entry: str) -> tuple[str, str]:
    """The module in transformers, and the class."""
    *where, name = entry.split("/")
    return f"models.{where[0]}.modeling_{where[-1]}", name


def _halves(entry: str) -> str:
    layer, _, other = entry.partition(":")
    return f"{layer.rpartition('/')[0]}/{other}" if other else layer


# By module of transformers; and the layers whose MLP is two modules.
CLASSES = _classes()
LAYERS = [place(f"{entry.partition(':')[0]}Layer") for entry in names.ENCODERS.split()]


def register() -> None:
    """Register the classes of the modules that have been imported since the last call."""
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        return
    for path, classes in CLASSES.items():
        module = sys.modules.get(f"transformers.{path}")
        if module is None:
            continue
        for name, describe in classes.items():
            kind: Any = vars(module).get(name)
            if _is_defined_by(kind, module):
                register_fusion(kind, describe)
    for path, name in LAYERS:
        module = sys.modules.get(f"transformers.{path}")
        kind = vars(module).get(name) if module is not None else None
        if module is not None and _has_feed_forward(kind, module):
            register_feed_forward(kind)
    _register_rotary()


def _register_rotary() -> None:
    deprecation = sys.modules.get("transformers.utils.deprecation")
    decorator = getattr(deprecation, "deprecate_kwarg", None)
    codes: set[CodeType] = set()
    if isinstance(decorator, FunctionType) and decorator.__globals__ is vars(deprecation):
        codes.update(_codes(decorator.__code__))
    for entry in names.ROTARY.split():
        module = sys.modules.get(f"transformers.{place(f'{entry}/')[0]}")
        rotate, half = (getattr(module, n, None) for n in ("apply_rotary_pos_emb", "rotate_half"))
        if not (isinstance(rotate, FunctionType) and isinstance(half, FunctionType)):
            continue
        if rotate.__globals__ is half.__globals__ is vars(module):
            register_rotary(rotate, codes)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """This one, and those of the functions that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_defined_by(kind: Any, module: ModuleType) -> bool:
    """Whether no other library has replaced the class or one of its methods."""
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        return False
    methods = [m for m in vars(kind).values() if isinstance(m, FunctionType)]
    own = all(m.__globals__ is vars(module) for m in methods)
    return own and kind.__bases__ == (nn.Module,) and "forward" in vars(kind)


def _has_feed_forward(kind: Any, module: ModuleType) -> bool:
    """Whether the layer's feed_forward_chunk is the one that its module defines."""
    method = vars(kind).get("feed_forward_chunk") if isinstance(kind, type) else None
    return isinstance(method, FunctionType) and method.__globals__ is vars(module)
