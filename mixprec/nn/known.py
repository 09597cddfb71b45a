"""What the forward pass of a class computes, known from the class itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from .._originals import CALL, METHODS, methods_of
from ..ops.act_quantize import KINDS
from ._content import KnownContents
from .autocast import current_region


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


def spec_of(module: nn.Module) -> Spec | None:
    """What the class of `module` computes, with its settings as they are now; None if that is not
    known."""
    kind = type(module)
    describe = _describe_of(module, kind) if kind.__call__ is CALL else None
    spec = None if describe is None else describe(module)
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


def known_by_content(kinds: Iterable[type]) -> list[type]:
    """Those of them that are."""
    return [kind for kind in kinds if _BY_CONTENT.get(kind) is not None]


def _describe_of(module: nn.Module, kind: Any) -> Describe | None:
    known = _known.get(kind)
    if known is None:
        content = _BY_CONTENT.get(kind)
        if content is None:
            return None
        # (Its own `forward` is what the callers of this look for.)
        has_own = any(name in vars(module) for name in content.methods if name != "forward")
        return None if has_own else _CONTENTS[content.digest or ""]
    attributes = vars(kind)
    same = all(attributes.get(name) is method for name, method in known.methods.items())
    return known.describe if same and kind.forward is known.forward else None


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


# Of classes that are known by their content, which any library may define: None where an attribute
# is missing or of another kind.


def _plain_rms_norm(m: Any) -> NormSpec | None:
    return _norm(m, "variance_epsilon", promote=True)


def _gemma_norm(m: Any) -> NormSpec | None:
    known = _norm(m, "eps")
    return known and known._replace(weight=1.0 + m.weight.float())


def _norm(m: Any, eps_name: str, *, promote: bool = False) -> NormSpec | None:
    weight: Any = getattr(m, "weight", None)
    eps: Any = getattr(m, eps_name, None)
    fits = isinstance(weight, torch.Tensor) and weight.dim() == 1 and isinstance(eps, (int, float))
    return NormSpec(weight.shape[0], eps, weight, promote=promote) if fits else None


def _mlp(first: str, act: str, last: str, after: str = "") -> Describe:
    """What an MLP computes, from the names of its attributes."""

    def describe(m: Any) -> MLPSpec | None:
        layers = _children(m, *first.split())
        sizes = {getattr(layer, "out_features", None) for layer in layers}  # else it is broadcast
        rest = _children(m, act, last, *([after] if after else ()))
        return MLPSpec(layers, *rest) if rest and len(sizes) == 1 else None

    return describe


def _children(m: Any, *names: str) -> tuple[nn.Module, ...]:
    """All of them, or none."""
    children: Any = tuple(getattr(m, name, None) for name in names)
    return children if all(isinstance(each, nn.Module) for each in children) else ()


def _first_half(m: Any) -> FirstHalf | None:
    half = _children(m, "dense", "intermediate_act_fn")
    return FirstHalf(*half) if half else None


def _second_half(m: Any) -> SecondHalf | None:
    half = _children(m, "dense", "dropout", "LayerNorm")
    return SecondHalf(*half) if half else None


def _functional_gelu(m: Any) -> str | None:
    act: Any = getattr(m, "act", None)
    if act is nn.functional.gelu:
        return "gelu"
    known = isinstance(act, functools.partial) and act.func is nn.functional.gelu and not act.args
    return "gelu_tanh" if known and act.keywords == {"approximate": "tanh"} else None


def _gelu_of_powers(m: Any) -> str | None:
    # In a region torch.pow is FP32, and so is what it returns.
    return "gelu_tanh" if current_region() is None else None


# By the content of a class, and how many classes of transformers 5.24 have it.
# weight * (x / sqrt(mean(x^2) + eps)), where the weight may be FP32 beside 16 bits
_RMS_NORM = "42651198016073c9"  # 142
# (1 + weight) * (x / sqrt(mean(x^2) + eps)), in the dtype of x
_GEMMA_NORM = "1c0b413c9b92d473"  # 13
NORM_CONTENTS = (_RMS_NORM, _GEMMA_NORM)
_CONTENTS: dict[str, Describe] = {
    _RMS_NORM: _plain_rms_norm,
    _GEMMA_NORM: _gemma_norm,
    # down(act(gate(x)) * up(x))
    "e44c51fe60b45425": _mlp("gate_proj up_proj", "act_fn", "down_proj"),  # 136
    "f67f4c56f1d93431": _mlp("gate_proj up_proj", "act_fn", "down_proj"),  # 7
    "7c0c63bf2ae83d34": _mlp("gate_proj up_proj", "act_fn", "down_proj"),  # 2
    # last(act(first(x))), the last two of them with dropout
    "b4b222acb8eace4e": _mlp("fc1", "activation_fn", "fc2"),  # 86
    "0edc4be89b8fd362": _mlp("up_proj", "act_fn", "down_proj"),  # 10
    "1a0f3dd1b30874c8": _mlp("linear_fc1", "act_fn", "linear_fc2"),  # 8
    "e0c2cb8c5429bf12": _mlp("lin1", "act", "lin2"),  # 8
    "83b1573613714e62": _mlp("fc1", "act", "fc2"),  # 5
    "91bb62074eedfd45": _mlp("dense_h_to_4h", "act", "dense_4h_to_h"),  # 2
    "3d023441fe5c13a4": _mlp("c_fc", "act", "c_proj", "dropout"),  # 6
    "44e21928dd57fa60": _mlp("fc_in", "act", "fc_out", "dropout"),  # 2
    "518aa615c3bb0793": _first_half,  # act(dense(x)): 64
    "c1d7b012f185ea51": _second_half,  # norm(dropout(dense(a)) + x): 87
    "76d7d0ebef74ab05": lambda m: "silu",
    "9e788f2ec3d611f9": lambda m: "relu2",
    "8229abe9e46320ab": _functional_gelu,  # act(x)
    # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    "fcd4139695c904f3": _gelu_of_powers,
}
_BY_CONTENT = KnownContents(_CONTENTS)
