"""freeze: a trained model for inference, with the weights of its linear layers in 8 bits."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from . import testing
from .formats import E4M3
from .nn import Linear
from .nn._region import is_for_onnx
from .nn.convert import ModuleFilter
from .nn.imported import adapted_layer, imported_class
from .nn.kinds import ADAPTER, Coverage, adapters, coverage
from .ops import dequantize, quantize
from .ops._dispatch import checks
from .ops.int8 import dequantize_int8, quantize_int8
from .quantized import Quantized

FORMATS = ("int8", "fp8")
TRAINED = "peft trains it as a whole"


class FrozenLinear(nn.Module):
    """y = x @ W^T + bias in 16 bits, with W ~ weight_codes * weight_scale_inv stored in 8.

    weight_codes: [N, K], int8 or E4M3, which `weight` returns too; weight_scale_inv: fp32 [N, 1],
    one scale per output row. The state dict has them under these names, so that loading it into
    nn.Linear reports a missing weight. The weight is decoded to x's dtype, or to `compute_dtype`
    where x is fp32; the output has x's dtype. x receives a gradient, the weight does not.
    """

    weight_codes: torch.Tensor
    weight_scale_inv: torch.Tensor
    bias: torch.Tensor | None
    source_dtype = torch.float32  # of the weight that the codes were made from

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        bias: torch.Tensor | None,
        compute_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.register_buffer("weight_codes", weight)
        self.register_buffer("weight_scale_inv", weight_scale_inv)
        self.register_buffer("bias", bias)
        self.compute_dtype = compute_dtype

    @property
    def weight(self) -> torch.Tensor:
        return self.weight_codes

    @property
    def fmt(self) -> str:
        return "int8" if self.weight.dtype == torch.int8 else "fp8"

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`."""
        if self.weight.dtype == torch.int8 or is_for_onnx():  # plain torch, right for FP8 codes too
            return dequantize_int8(self.weight, self.weight_scale_inv, dtype)
        scale_inv = self.weight_scale_inv
        q = Quantized(self.weight, scale_inv, scale_inv, None, None, E4M3, "row")
        return dequantize(q, dtype)

    @property
    def W_q(self) -> torch.Tensor:
        """The codes, under the name that tells peft to call `dequantize` (for DoRA's norms)."""
        return self.weight_codes

    def dequantize(self) -> torch.Tensor:
        """The weight [N, K] in FP32."""
        return self.decoded(torch.float32)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name, for calls by keyword
        x = input
        wide = x.dtype == torch.float32 and not is_for_onnx()
        dtype = self.compute_dtype if wide else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(x.to(dtype), self.decoded(dtype), bias).to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> FrozenLinear:
        """Move between devices; .half() and .to(dtype) do not change codes and scales."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if name == "bias" else moved.to(buffer.dtype)
        return self

    def extra_repr(self) -> str:
        n, k = self.weight.shape
        return f"in_features={k}, out_features={n}, bias={self.bias is not None}, {self.fmt}/row"


class FrozenLayer(NamedTuple):
    """One layer of the report: sizes in bytes, SQNR of the weight in dB."""

    name: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    sqnr: float


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
        lines = [f"{'layer':{width}}  {'N x K':>13}  {'before':>10}  {'after':>10}  {'SQNR':>8}"]
        for layer in self.layers:
            n, k = layer.shape
            sizes = f"{n} x {k}".rjust(13)
            before, after = f"{layer.bytes_before:10,}", f"{layer.bytes_after:10,}"
            lines.append(f"{layer.name:{width}}  {sizes}  {before}  {after}  {layer.sqnr:5.1f} dB")
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


def _frozen(linear: nn.Linear, fmt: str, compute_dtype: torch.dtype) -> FrozenLinear:
    weight = linear.weight.detach()
    if weight.is_meta:  # no values yet: for load_state_dict(..., assign=True)
        code = torch.int8 if fmt == "int8" else E4M3.dtype
        data = torch.empty_like(weight, dtype=code, memory_format=torch.contiguous_format)
        scale_inv = weight.new_empty((len(weight), 1), dtype=torch.float32)
    elif fmt == "int8":
        data, scale_inv = quantize_int8(weight)
    else:
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("freeze: the weight must be finite, got Inf or NaN")
        q = quantize(weight, E4M3, granularity="row", power_of_two_scale=False)
        data, scale_inv = q.data, q.scale_inv
    bias = None if linear.bias is None else linear.bias.detach()
    frozen = FrozenLinear(data, scale_inv, bias, compute_dtype).train(linear.training)
    frozen.source_dtype = weight.dtype
    return frozen


def _merge(adapted: Any, *args: Any, **kwargs: Any) -> None:
    """`merge` of a layer of peft with a frozen base. Nothing can be added to codes, so that the
    base becomes an nn.Linear again, with the decoded weight."""
    frozen = adapted.base_layer
    n, k = frozen.weight_codes.shape
    base = nn.Linear(k, n, bias=frozen.bias is not None, device="meta")
    base.weight = nn.Parameter(frozen.decoded(frozen.source_dtype), requires_grad=False)
    if frozen.bias is not None:
        base.bias = nn.Parameter(frozen.bias, requires_grad=False)
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

    fmt: "int8" (scale 127 / amax of each output row) or "fp8" (E4M3, scale 448 / amax). nn.Linear,
    mixprec.nn.Linear and their subclasses without a forward pass of their own are replaced if
    module_filter_fn(module, fqn) is true. Not replaced are the adapters of peft and its
    modules_to_save, which stay trainable, and a layer whose weight is shared with another module:
    that one would keep its copy, and no memory would be saved. compute_dtype: dtype of the matrix
    product if the input is fp32.

    Add adapters before freezing. Merging them later decodes the weights of the layers that they
    adapt, which are nn.Linear from then on, in the dtype that they had.

    The report names them, and the share of the weights that is frozen; a warning says if more than
    5% is in modules that are not linear layers.

    The state_dict of the result holds the plain tensors `weight_codes`, `weight_scale_inv` and
    `bias`: save it with torch.save or mixprec.save_checkpoint. To load it, build the model
    (possibly on the meta device), call `freeze` on it and then load_state_dict (with assign=True
    for meta tensors). Raises ValueError for an unknown fmt, or for a weight that is not finite,
    naming the layer, before anything is changed.
    """
    if fmt not in FORMATS:
        raise ValueError(f"freeze: fmt must be one of {FORMATS}, got {fmt!r}")
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
        elif owners[module.weight] > 1:
            left[fqn] = "its weight is shared with another module"
        else:
            try:
                frozen = _frozen(module, fmt, compute)
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
    return model, FrozenReport(fmt, layers, left, found, before, _size(model))


def _is_plain_linear(module: nn.Module) -> bool:
    """Computes as nn.Linear does. (The output projection of attention is read, not called.)"""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    plain = (nn.Linear.forward, Linear.forward)
    return isinstance(module, nn.Linear) and type(module).forward in plain


def _line(fqn: str, linear: nn.Linear, frozen: FrozenLinear) -> FrozenLayer:
    before, after = linear.weight, frozen.weight
    sqnr = float("nan")
    if not before.is_meta:
        sqnr = testing.sqnr(before.detach(), frozen.decoded(torch.float32))
    n, k = after.shape
    sizes = [t.numel() * t.element_size() for t in (before, after, frozen.weight_scale_inv)]
    return FrozenLayer(fqn, (n, k), sizes[0], sizes[1] + sizes[2], sqnr)
