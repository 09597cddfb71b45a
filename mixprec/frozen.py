"""freeze: a trained model for inference, with the weights of its linear layers in 8 or 4 bits."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from . import testing
from ._local_gradients import is_sharded
from .frozen_linear import STORAGES, FrozenLinear
from .nn._content import adapted_layer, imported_class
from .nn.convert import ModuleFilter
from .nn.kinds import ADAPTER, Coverage, adapters, computes_linear, coverage, leave_fast_paths
from .ops._dispatch import checks

FORMATS = tuple(STORAGES)
TRAINED = "peft trains it as a whole"


class FrozenLayer(NamedTuple):
    """One layer of the report: sizes of the weight in bytes, its SQNR in dB."""

    name: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    sqnr: float

    @property
    def bits(self) -> float:
        """Bits that an element of the weight takes, scales included."""
        return 8 * self.bytes_after / max(1, self.shape[0] * self.shape[1])


class FrozenReport(NamedTuple):
    """What `freeze` changed: per layer, and in total for all parameters and buffers."""

    fmt: str
    layers: list[FrozenLayer]
    left: dict[str, str]  # layers that are not changed, and why
    coverage: Coverage
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        width = max([5, *(len(layer.name) for layer in self.layers)])
        header = f"{'N x K':>13}  {'before':>10}  {'after':>10}  {'bits':>6}  {'SQNR':>8}"
        lines = [f"{'layer':{width}}  {header}"]
        for layer in self.layers:
            n, k = layer.shape
            sizes = f"{n} x {k}".rjust(13)
            before, after = f"{layer.bytes_before:10,}", f"{layer.bytes_after:10,}"
            row = f"{sizes}  {before}  {after}  {layer.bits:6.3f}  {layer.sqnr:5.1f} dB"
            lines.append(f"{layer.name:{width}}  {row}")
        lines += [f"{name} is not changed: {reason}" for name, reason in self.left.items()]
        lines.append(f"in {self.fmt}: {self.coverage}")
        lines.append(
            f"the whole model: {self.bytes_before:,} -> {self.bytes_after:,} bytes "
            f"({self.bytes_after / max(1, self.bytes_before):.0%}), {self.fmt}"
        )
        return "\n".join(lines)


def _size(model: nn.Module) -> int:
    tensors = {*model.parameters(), *model.buffers()}
    return sum(t.numel() * t.element_size() for t in tensors)


def _merge(adapted: Any, *args: Any, **kwargs: Any) -> None:
    """`merge` of a layer of peft with a frozen base. Nothing can be added to codes, so that the
    base becomes an nn.Linear again, with the decoded weight."""
    frozen = adapted.base_layer
    n, k = frozen.out_features, frozen.in_features
    base = nn.Linear(k, n, bias=frozen.bias is not None, device="meta")
    base.weight = nn.Parameter(frozen.decoded(frozen.source_dtype), requires_grad=False)
    if frozen.bias is not None:
        bias = frozen.bias
        base.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, False)
    adapted.base_layer = base.train(frozen.training)
    del adapted.merge  # from here on it is the method again
    adapted.merge(*args, **kwargs)


def freeze(
    model: nn.Module,
    fmt: str = "int8",
    *,
    module_filter_fn: ModuleFilter | None = None,
    compute_dtype: torch.dtype | str = torch.bfloat16,
) -> tuple[nn.Module, FrozenReport]:
    """Replace every linear layer of `model`, in place, by a FrozenLinear; return model and report.

    fmt: how weights are stored, with the bits that an element takes, scales included:

        "int8"   8 bits and those of the row's scale, 127 / amax
        "fp8"    the same in E4M3, scale 448 / amax
        "nvfp4"  4.5, E2M1 in blocks of 16 along K, with scales in E4M3
        "mxfp4"  4.25, E2M1 in blocks of 32 along K, with powers of two as scales, to even

    nn.Linear, mixprec.nn.Linear and their subclasses without a forward pass of their own are
    replaced if module_filter_fn(module, fqn) is true. Not replaced are the adapters of peft and its
    modules_to_save, which stay trainable, and a layer whose weight is shared with another module:
    that one would keep its copy, and no memory would be saved. Hooks and attributes of a layer
    stay; one whose forward pass was replaced is left. compute_dtype: dtype of the matrix product if
    the input is fp32.

    Add adapters before freezing. Merging them later decodes the weights of the layers that they
    adapt, which are nn.Linear from then on, in the dtype that they had.

    The report names them, and the share of the weights that is frozen; a warning says if more than
    5% is in modules that are not linear layers.

    The state_dict of the result holds plain tensors: `bias`, `weight_codes` and its scales, which
    the docstring of mixprec.frozen_linear.FrozenLinear lists. Save it with torch.save or
    mixprec.save_checkpoint. To load it, build the model (possibly on the meta device), call
    `freeze` on it and then load_state_dict (with assign=True for meta tensors).

    Raises ValueError for an unknown fmt, or for a weight that is not finite, naming the layer,
    before anything is changed. Sources: those of `mixprec.quantize`.
    """
    if fmt not in FORMATS:
        hint = "; load a model in NF4 with bitsandbytes" if fmt == "nf4" else ""
        raise ValueError(f"freeze: fmt must be one of {FORMATS}, got {fmt!r}{hint}")
    compute = checks.as_dtype(compute_dtype)
    if compute not in (torch.bfloat16, torch.float16):
        raise ValueError(f"freeze: compute_dtype must be bfloat16 or float16, got {compute_dtype}")
    checks.is_module("freeze", model)
    before = _size(model)
    owners = Counter(
        param for module in model.modules() for param in module.parameters(recurse=False)
    )
    added = adapters(model)
    wrapper = imported_class("peft.utils.other", "ModulesToSaveWrapper")
    trained = {
        module
        for parent in model.modules()
        if wrapper is not None and isinstance(parent, wrapper)
        for module in parent.get_submodule("modules_to_save").modules()
    }
    replacement: dict[nn.Module, nn.Module] = {}
    layers: list[FrozenLayer] = []
    left: dict[str, str] = {}
    for fqn, module in model.named_modules():
        if not _is_plain_linear(module):
            continue
        if module in added:
            left[fqn] = ADAPTER
        elif module in trained:
            left[fqn] = TRAINED
        elif module_filter_fn is not None and not module_filter_fn(module, fqn):
            left[fqn] = "excluded by module_filter_fn"
        elif "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
            left[fqn] = "its forward pass was replaced"
        elif is_sharded(module.weight):
            left[fqn] = "its weight is sharded over ranks"
        elif owners[module.weight] > 1:
            left[fqn] = "its weight is shared with another module"
        else:
            try:
                frozen = FrozenLinear.from_linear(module, fmt, compute)
            except ValueError as error:
                raise ValueError(f"freeze: {fqn or 'the model'}: {error}") from None
            replacement[module] = frozen
            layers.append(_line(fqn, module, frozen))
    why_left = {model.get_submodule(fqn): reason for fqn, reason in left.items()}
    found = coverage(model, why_left, list(replacement), "only linear layers are frozen")
    if found.is_low:
        warnings.warn(f"freeze: {fmt} was asked for and reaches {found}", stacklevel=2)
    adapted = adapted_layer()
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacement:
                setattr(parent, name, replacement[child])
                if name == "base_layer" and adapted is not None and isinstance(parent, adapted):
                    vars(parent)["merge"] = partial(_merge, parent)
    model = replacement.get(model, model)
    leave_fast_paths(model)
    return model, FrozenReport(fmt, layers, left, found, before, _size(model))


def _is_plain_linear(module: nn.Module) -> bool:
    """Computes as nn.Linear does. (The output projection of attention is read, not called.)"""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    return isinstance(module, nn.Linear) and computes_linear(type(module))


def _line(fqn: str, linear: nn.Linear, frozen: FrozenLinear) -> FrozenLayer:
    before = linear.weight
    sqnr = float("nan")
    if not before.is_meta:
        sqnr = testing.sqnr(before.detach(), frozen.decoded(torch.float32))
    after = sum(tensor.nbytes for tensor in frozen.stored)
    n, k = before.shape
    return FrozenLayer(fqn, (n, k), before.nbytes, after, sqnr)
