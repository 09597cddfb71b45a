"""convert(fuse=True): find the parts of a model that can run as one function, and make them."""

from __future__ import annotations

import operator
from collections import Counter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._originals import METHODS
from ._content import KnownContents
from ._fused import FusedBlock, FusedNorm, activation_of, norm_of, one_pass_class
from ._layer import Layer
from ._replaced import FEED_FORWARD, Fused, replace, replaced_of
from ._scope import (
    CONTAINERS,
    FusionScope,
    RotaryForward,
    calls_known_functions,
    layers_in,
    own_layers,
)
from .autocast import without_modes
from .blocks import ResidualSequential
from .known import FirstHalf, MLPSpec, SecondHalf, spec_of

_HALVES = (FirstHalf, SecondHalf)
# What these compute is known as long as their forward passes are these.
_FORWARDS = (METHODS[nn.Sequential]["forward"], ResidualSequential.forward)


class FusedSequential(Fused):
    """nn.Sequential, with parts of its modules that run as one function, by position."""

    def __init__(self, module: nn.Module, parts: dict[int, tuple[nn.Module, ...]]) -> None:
        super().__init__(module)
        self.parts = parts

    def run(self, *args: Any, **kwargs: Any) -> Any:
        x = self.only_argument(args, kwargs)
        if x is None or not self._is_known(nn.Sequential):
            return self.original(*args, **kwargs)
        return self._through(x, None)[0]

    def _is_known(self, kind: Any) -> bool:
        forwards = nn.Sequential.forward, ResidualSequential.forward
        return type(self.module) is kind and forwards == _FORWARDS

    def _through(self, x: Any, residual: Any) -> tuple[Any, Any]:
        """What the modules make of x + residual, and this sum."""
        modules = tuple(self.module._modules.values())
        first = self._part_at(0, modules)
        if residual is not None and not (first is not None and first.adds(x, residual)):
            x, residual = x + residual, None
        total, i = x, 0
        while i < len(modules):
            part = self._part_at(i, modules)
            if part is None or not (residual is not None or part.is_fused(x)):
                x = modules[i](x)  # type: ignore[misc]
                i += 1
                continue
            with without_modes():
                x, *sums = part.run(x, residual)
            total, residual = sums[0] if sums else total, None
            i += len(self.parts[i])
        return x, total

    def _part_at(self, i: int, modules: tuple[Any, ...]) -> FusedBlock | None:
        part = self.parts.get(i, ())
        block = modules[i : i + len(part)]
        # Another module may have taken a place since.
        same = len(block) == len(part) and all(map(operator.is_, block, part))
        return _part_of(part) if part and same else None


class FusedResidualSequential(FusedSequential):
    """ResidualSequential, likewise."""

    def run(self, x: Any, residual: Any = None) -> Any:
        if not self._is_known(ResidualSequential):
            return self.original(x, residual)
        return self._through(x, residual)


class FusedMLP(Fused):
    """The MLP of a transformer, whose layers and activation run as one function."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        x = self.only_argument(args, kwargs)
        spec = spec_of(self.module)
        part = _mlp(spec) if isinstance(spec, MLPSpec) else None
        if part is None or not part.is_fused(x):
            return self.original(*args, **kwargs)
        with without_modes():
            (y,) = part.run(x)
        return y if spec.after is None else spec.after(y)  # type: ignore[union-attr]


# The content of feed_forward_chunk(x) that is output(intermediate(x), x), of 40 classes of
# transformers 5.24.
_CONTENTS = KnownContents({"687b008a14f8402d"})


class FusedFeedForward(Fused):
    """The MLP of an encoder's layer that is two modules, called by a method of the layer."""

    method = FEED_FORWARD

    def run(self, *args: Any, **kwargs: Any) -> Any:
        x, mlp = self.only_argument(args, kwargs), feed_forward_of(self.module)
        if mlp is None or not mlp[0].is_fused(x):
            return self.original(*args, **kwargs)
        block, second = mlp
        with without_modes():
            (y,) = block.run(x)
        return second.norm(second.dropout(y) + x)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "layer" in state:  # of an earlier version
            state = vars(FusedFeedForward(state["layer"]))
        super().__setstate__(state)
        _CONTENTS.get(getattr(type(self.module), FEED_FORWARD))  # before the model is compiled


def feed_forward_of(layer: nn.Module) -> tuple[FusedBlock, SecondHalf] | None:
    """The MLP of such a layer, and what follows; None for any other module."""
    method: Any = getattr(type(layer), FEED_FORWARD, None)
    if not isinstance(method, FunctionType) or _CONTENTS.get(method) is None:
        return None
    fused = isinstance(replaced_of(layer, FEED_FORWARD), FusedFeedForward)
    if FEED_FORWARD in vars(layer) and not fused:
        return None
    halves: Any = layer.intermediate, layer.output
    first, second = map(spec_of, halves)
    if not (isinstance(first, FirstHalf) and isinstance(second, SecondHalf)):
        return None
    return FusedBlock([first.dense], act=first.act, last=second.dense, around=halves), second


class FusionReport(NamedTuple):
    """fused: what each fused module does, by path; left: why a candidate was not fused, by path;
    by class, how many modules share casts, and how many have forward passes that are not known."""

    fused: dict[str, str]
    left: dict[str, str]
    shares: Counter[str]
    unknown: Counter[str]

    def __str__(self) -> str:
        lines = "; ".join(f"{what} ({n})" for what, n in Counter(self.fused.values()).items())
        lines = f"fused {lines or 'nothing'}"
        if +self.shares:
            lines += f"; layers with one input share its cast in {_counts(+self.shares)}"
        left = "; ".join(
            f"{next(fqn for fqn, other in self.left.items() if other == why)}"
            f"{f' and {n - 1} more' if n > 1 else ''}, because of {why}"
            for why, n in Counter(self.left.values()).items()
        )
        lines += f"; not fused: {left}" if left else ""
        if self.unknown:
            lines += (
                f"; of other classes, whose forward passes are not known: {_counts(self.unknown)}"
            )
        return lines


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} ({n})" for kind, n in counts.items())


def fuse(model: nn.Module) -> FusionReport:
    """Fuse what is known in `model`, whose layers have been converted, in place."""
    report = FusionReport({}, {}, Counter(), Counter())
    in_parts: set[nn.Module] = set()  # of a Sequential, or the halves of an MLP
    for fqn, module in list(model.named_modules()):
        if isinstance(module, (Layer, torch.jit.ScriptModule)) or type(module) in CONTAINERS:
            continue
        around_layers = next(layers_in(module), None) is not None
        if "forward" in vars(module) or type(type(module).forward) is not FunctionType:
            if around_layers:
                report.left[fqn] = "a module with a forward pass of its own"
            continue
        spec, layers = spec_of(module), len([*own_layers(module)])
        if type(module) in (nn.Sequential, ResidualSequential):
            in_parts |= _fuse_sequential(module, fqn, report)
            continue
        if isinstance(spec, MLPSpec) and _fuse_mlp(module, spec, fqn, report):
            continue
        kind = one_pass_class(spec)
        if kind is not None and module not in in_parts:
            replace(kind(module))
            report.fused[fqn or "the model"] = "norm" if kind is FusedNorm else "activation"
        elif around_layers:
            rotates = calls_known_functions(type(module))
            replace((RotaryForward if rotates else FusionScope)(module))
            if rotates:
                report.fused[fqn] = "rotary positions"
            in_parts |= _fuse_feed_forward(module, fqn, report)
            report.shares[type(module).__name__] += layers > 1
        name = type(module).__name__
        torchs = type(module) is getattr(nn, name, None)
        is_known = spec is not None and (module in in_parts or not isinstance(spec, _HALVES))
        if not is_known and not torchs and (layers or not module._modules):
            report.unknown[name] += 1
    return report


def _part_of(modules: tuple[Any, ...]) -> FusedBlock:
    """[norm], linear, [activation, linear]."""
    norm, rest = (None, modules) if isinstance(modules[0], Layer) else (modules[0], modules[1:])
    act, last = rest[1:] if len(rest) == 3 else (None, None)
    return FusedBlock([rest[0]], norm=norm, act=act, last=last)


def _mlp(spec: MLPSpec) -> FusedBlock:
    return FusedBlock(spec.layers, act=spec.act, last=spec.last)


def _fuse_feed_forward(module: nn.Module, fqn: str, report: FusionReport) -> set[nn.Module]:
    """The halves of its MLP, if it is known."""
    feed_forward = feed_forward_of(module)
    if feed_forward is None:
        return set()
    part, _ = feed_forward
    if (why := part.why_not_fused()) is not None:
        report.left[fqn] = why
    else:
        replace(FusedFeedForward(module))
        report.fused[fqn] = "linear, activation, linear"
    return {*part.around}


def _fuse_mlp(module: nn.Module, spec: MLPSpec, fqn: str, report: FusionReport) -> bool:
    part = _mlp(spec)
    if (why := part.why_not_fused()) is not None:
        report.left[fqn] = why
        return False
    gated = "activation * linear" if len(part.first) == 2 else "activation"
    replace(FusedMLP(module))
    report.fused[fqn or "the model"] = f"linear, {gated}, linear"
    return True


def _fuse_sequential(module: nn.Module, fqn: str, report: FusionReport) -> set[nn.Module]:
    """norm, linear; norm, linear, activation, linear; linear, activation, linear. The modules."""
    children: list[Any] = list(module._modules.values())
    parts: dict[int, tuple[nn.Module, ...]] = {}
    names, i = [], 0
    while i < len(children):
        start = i
        i += norm_of(children[i]) is not None
        if i == len(children) or not isinstance(children[i], Layer):
            i = start + 1
            continue
        acts = i + 2 < len(children) and activation_of(children[i + 1]) is not None
        i += 3 if acts and isinstance(children[i + 2], Layer) else 1
        if i - start == 1:
            continue  # a linear layer without neighbours
        modules = tuple(children[start:i])
        part = _part_of(modules)
        why = part.why_not_fused()
        if why is not None:
            report.left[f"{fqn}.{start}".lstrip(".")] = why
            continue
        parts[start] = modules
        before = "" if part.norm is None else "norm, "
        names.append(before + "linear" + ("" if part.act is None else ", activation, linear"))
    if parts:
        kind = FusedSequential if type(module) is nn.Sequential else FusedResidualSequential
        replace(kind(module, parts))
        report.fused[fqn or "the model"] = " + ".join(names)
    return {child for part in parts.values() for child in part}
