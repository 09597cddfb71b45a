"""What the forward pass of a class computes, known from the class itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from .._originals import CALL, METHODS, methods_of
from ..ops.act_quantize import KINDS


class NormSpec(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight; with subtract_mean, the same of x - mean(x), plus bias.

    size: K, the last dimension of x; weight, bias: [K] or None. The result has the dtype of x or,
    with promote, that of x * weight.
    """

    size: int
    eps: float
    weight: torch.Tensor | None
    bias: torch.Tensor | None = None
    subtract_mean: bool = False
    promote: bool = False


class MLPSpec(NamedTuple):
    """last(act(layers[0](x))), or last(act(layers[0](x)) * layers[1](x)); then `after` of that.

    layers, last: the nn.Linear of `convert`; act: the module of the activation.
    """

    layers: tuple[nn.Module, ...]
    act: nn.Module
    last: nn.Module
    after: nn.Module | None = None


class FirstHalf(NamedTuple):
    """act(dense(x)): the first half of an MLP whose halves are modules. See `SecondHalf`."""

    dense: nn.Module
    act: nn.Module


class SecondHalf(NamedTuple):
    """norm(dropout(dense(a)) + x), of what the first half made of x."""

    dense: nn.Module
    dropout: nn.Module
    norm: nn.Module


Spec = NormSpec | MLPSpec | FirstHalf | SecondHalf | str
Describe = Callable[[Any], Spec | None]


class _Known(NamedTuple):
    # As they were when the class was registered: with another method it is another class.
    forward: Any
    methods: dict[str, Any]
    describe: Describe


_known: dict[type[nn.Module], _Known] = {}
# Tables of the classes of other libraries, which are looked at where the library is imported.
_TABLES = {"transformers": "mixprec.integrations.fused_transformers"}


def register_fusion(kind: type[nn.Module], describe: Describe) -> None:
    """Tell `mixprec.convert(fuse=True)` what the forward pass of the class `kind` computes.

        mixprec.nn.register_fusion(MyNorm, lambda m: NormSpec(m.dim, m.eps, m.weight))
        mixprec.nn.register_fusion(MyMLP, lambda m: MLPSpec((m.up,), m.act, m.down))
        mixprec.nn.register_fusion(MyGELU, lambda m: "gelu")

    describe(module) returns a `NormSpec`, an `MLPSpec`, the name of an activation of
    `mixprec.act_quantize` ("silu", "gelu", "gelu_tanh", "relu2"), or None for a module that is to
    run as it is. It is called by `convert` and in each forward pass, so that it should read the
    module's attributes. The forward pass must take one tensor. Nothing checks that the description
    is right: compare outputs with and without fuse=True.

    Only modules of exactly this class are meant: a subclass, or a class or module whose `forward`
    is replaced later, runs as it is. The description holds for the process: register before
    unpickling a fused model, too. Registering a class again replaces its description. TypeError if
    kind is not a class of modules, or describe not callable.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_fusion: kind must be a subclass of nn.Module, got {kind!r}")
    if not callable(describe):
        raise TypeError(f"register_fusion: describe must be callable, got {describe!r}")
    _known[kind] = _Known(kind.forward, methods_of(kind), describe)


def load_tables() -> None:
    """Register the known classes of the libraries that have been imported."""
    for library, table in _TABLES.items():
        if library in sys.modules:
            importlib.import_module(table).register()


def spec_of(module: nn.Module) -> Spec | None:
    """What the class of `module` computes, with its settings as they are now; None if that is not
    known."""
    kind = type(module)
    known = _known.get(kind)
    if known is None or kind.forward is not known.forward or kind.__call__ is not CALL:
        return None
    own = vars(kind)
    if any(own.get(name) is not method for name, method in known.methods.items()):
        return None
    spec = known.describe(module)
    if isinstance(spec, (NormSpec, FirstHalf, SecondHalf)) or spec is None or spec in KINDS:
        return spec
    if isinstance(spec, MLPSpec) and len(spec.layers) in (1, 2):
        if all(isinstance(m, nn.Module) for m in (*spec.layers, spec.act, spec.last)):
            return spec
        raise TypeError(f"MLPSpec: layers, act and last must be modules, got {spec}")
    raise TypeError(
        f"register_fusion: describe of {kind.__name__} must return a NormSpec, an MLPSpec of "
        f"one or two layers, None or one of {', '.join(KINDS)}, got {spec!r}"
    )


def _layer_norm(module: nn.LayerNorm) -> NormSpec | None:
    if len(module.normalized_shape) != 1:
        return None
    return NormSpec(module.normalized_shape[0], module.eps, module.weight, module.bias, True)


def _rms_norm(module: nn.RMSNorm) -> NormSpec | None:
    if len(module.normalized_shape) != 1:
        return None
    # The eps of FP32 for any dtype, in which torch computes.
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return NormSpec(module.normalized_shape[0], eps, module.weight)


def _gelu(module: nn.GELU) -> str | None:
    return {"tanh": "gelu_tanh", "none": "gelu"}.get(module.approximate)


_OF_TORCH: dict[type[nn.Module], Describe] = {
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GELU: _gelu,
    nn.SiLU: lambda module: "silu",
}
for _kind, _describe in _OF_TORCH.items():
    _known[_kind] = _Known(METHODS[_kind]["forward"], METHODS[_kind], _describe)
