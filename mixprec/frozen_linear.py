"""FrozenLinear: a linear layer whose weight is stored in 8 or 4 bits and does not change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from .formats import E2M1, E4M3, Format
from .nn.autocast import is_for_onnx
from .ops import dequantize, quantize
from .ops._dispatch import checks
from .ops.quantize import dequantize_int8, quantize_int8
from .quantized import Quantized

Tensors = dict[str, torch.Tensor]  # buffers of a FrozenLinear
# What a layer keeps from the one that it replaces, which handles of hooks refer to.
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


class Storage(NamedTuple):
    """How a weight [N, K] is stored: as `mixprec.quantize` casts it; fmt None: `quantize_int8`."""

    fmt: Format | None
    granularity: str
    scales: str  # which elements share a scale, for repr
    options: dict[str, Any]

    def quantize(self, weight: torch.Tensor) -> Tensors:
        """The buffers of a layer. ValueError where the weight is not finite."""
        if self.fmt is None:
            return self._in_int8(weight)
        if not weight.is_meta and not bool(torch.isfinite(weight).all()):
            raise ValueError("freeze: the weight must be finite, got Inf or NaN")
        q = quantize(weight, self.fmt, granularity=self.granularity, **self.options)
        tensors = {"weight_codes": q.data, "weight_scale_inv": q.scale_inv}
        if q.tensor_scale_inv is not None:
            tensors["weight_tensor_scale_inv"] = q.tensor_scale_inv
        return tensors

    @staticmethod
    def _in_int8(weight: torch.Tensor) -> Tensors:
        if not weight.is_meta:
            data, scale_inv = quantize_int8(weight)
        else:  # its amax is not known
            data = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
            scale_inv = weight.new_empty((len(weight), 1), dtype=torch.float32)
        return {"weight_codes": data, "weight_scale_inv": scale_inv}

    def dequantize(self, layer: FrozenLinear, dtype: torch.dtype) -> torch.Tensor:
        """The weight of a layer in fp32, bf16 or fp16."""
        codes, scale_inv = layer.weight_codes, layer.weight_scale_inv
        is_row = self.granularity == "row"
        if self.fmt is None or (is_row and is_for_onnx()):  # plain torch, right for FP8 codes too
            return dequantize_int8(codes, scale_inv, dtype)
        fixed = self.fmt, self.granularity, layer._buffers.get("weight_tensor_scale_inv")
        columns = None if is_row else layer.in_features
        q = Quantized(codes, scale_inv, scale_inv, None, None, *fixed, columns)
        return _blocks_for_onnx(q, dtype) if is_for_onnx() else dequantize(q, dtype)


def _blocks_for_onnx(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize` by tables: what the bits of a number mean cannot be said in ONNX."""
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    elements = torch.tensor((*positive, *(-x for x in positive)))
    codes = torch.stack([q.data & 15, q.data >> 4], -1).flatten(-2)[:, : q.columns]
    if q.tensor_scale_inv is None:
        powers = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), torch.nan])
        scale, block = powers[q.scale_inv.long()], 32
    else:
        scale, block = q.scale_inv.float() * q.tensor_scale_inv, 16
    scale = scale.repeat_interleave(block, 1)[:, : q.columns]
    return (elements[codes.long()] * scale).to(dtype)


STORAGES = {
    "int8": Storage(None, "row", "/row", {}),
    "fp8": Storage(E4M3, "row", "/row", {"power_of_two_scale": False}),
    "mxfp4": Storage(E2M1, "mx", "/32", {"scale_mode": "even"}),  # the smallest error in E2M1
    "nvfp4": Storage(E2M1, "nvfp4", "/16", {}),
}


class FrozenLinear(nn.Module):
    """y = x @ W^T + bias in 16 bits, with W [N, K] stored in 8 or 4.

    The buffers, which `state_dict` has under these names, so that loading them into nn.Linear
    reports a missing weight:

        int8, fp8  weight_codes [N, K], int8 or E4M3; weight_scale_inv fp32 [N, 1]
        mxfp4      weight_codes uint8 [N, ceil(K / 2)]; weight_scale_inv uint8 [N, ceil(K / 32)]
        nvfp4      as mxfp4, weight_scale_inv E4M3 [N, ceil(K / 16)]; weight_tensor_scale_inv fp32

    `mixprec.quantize` describes the codes and scales of fp8, mxfp4 (scale_mode "even") and nvfp4.
    The weight is decoded to x's dtype, or to `compute_dtype` where x is fp32; the output has x's
    dtype. x receives a gradient, the weight does not.
    """

    weight_codes: torch.Tensor
    weight_scale_inv: torch.Tensor
    bias: torch.Tensor | None
    source_dtype = torch.float32  # of the weight that the codes were made from, or of a cast
    _reads_no_weight = True  # a parent that reads it would take the codes

    def __init__(
        self,
        fmt: str,
        tensors: Tensors,
        shape: Iterable[int],
        bias: torch.Tensor | None,
        compute_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.fmt = fmt
        self.out_features, self.in_features = shape
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        if isinstance(bias, nn.Parameter):
            self.bias = bias
        else:
            self.register_buffer("bias", bias)
        self.compute_dtype = compute_dtype

    @classmethod
    def from_linear(cls, linear: nn.Linear, fmt: str, compute_dtype: torch.dtype) -> FrozenLinear:
        """The layer for `linear`, with its hooks and public attributes; with a weight on the meta
        device, for a state dict to be assigned. A bias stays a parameter where it is trained and
        the weight is not, as by peft. ValueError where the weight is not finite."""
        weight = linear.weight.detach()
        tensors = STORAGES[fmt].quantize(weight)
        bias = linear.bias
        if bias is not None and (linear.weight.requires_grad or not bias.requires_grad):
            bias = bias.detach().clone()  # type: ignore[assignment]
        frozen = cls(fmt, tensors, weight.shape, bias, compute_dtype).train(linear.training)
        frozen.source_dtype = weight.dtype
        vars(frozen).update({name: vars(linear)[name] for name in _HOOKS})
        public = {n: x for n, x in vars(linear).items() if not n.startswith("_")}
        vars(frozen).update({n: x for n, x in public.items() if n not in vars(frozen)})
        return frozen

    @property
    def weight(self) -> torch.Tensor:
        """The codes, as int8: models of transformers that cast the input of a layer to the dtype of
        its weight leave it as it is for int8."""
        codes = self.weight_codes
        return codes if codes.dtype == torch.int8 else codes.view(torch.int8)

    @property
    def stored(self) -> list[torch.Tensor]:
        """What the weight is stored in: codes and all scales."""
        return [self._buffers[name] for name in self._stored]  # type: ignore[misc]

    @property
    def _stored(self) -> list[str]:
        return [name for name, t in self._buffers.items() if name != "bias" and t is not None]

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`."""
        return STORAGES[self.fmt].dequantize(self, dtype)

    @property
    def W_q(self) -> torch.Tensor:
        """The codes, under the name that tells peft to call `dequantize` (for DoRA's norms)."""
        return self.weight_codes

    def dequantize(self) -> torch.Tensor:
        """The weight [N, K] in FP32."""
        return self.decoded(torch.float32)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name, for calls by keyword
        x = input
        if x.dtype not in checks.FLOATS:
            raise TypeError(f"FrozenLinear: input must be fp32, bf16 or fp16, got {x.dtype}")
        wide = x.dtype == torch.float32 and not is_for_onnx()
        dtype = self.compute_dtype if wide else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(x.to(dtype), self.decoded(dtype), bias).to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> FrozenLinear:
        """Move between devices; .half() and .to(dtype) do not change codes and scales."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                kept = name == "bias" or moved.dtype == buffer.dtype
                self._buffers[name] = moved if kept else buffer.to(moved.device)
        if isinstance(self.bias, nn.Parameter):
            with torch.no_grad():
                self.bias.data = fn(self.bias.data)
        cast = fn(self.weight_codes.new_empty(0, dtype=self.source_dtype)).dtype
        self.source_dtype = cast if cast.is_floating_point else self.source_dtype
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Codes and scales of another format are an error, and none of them is loaded: they would
        be cast."""
        errors, stored = args[-1], {prefix + name: self._buffers[name] for name in self._stored}
        for key, buffer in stored.items():
            loaded: Any = state_dict.get(key)
            if buffer is None or getattr(loaded, "dtype", buffer.dtype) == buffer.dtype:
                continue
            errors.append(
                f"{key} must be {buffer.dtype}, as {self.fmt} stores it, got {loaded.dtype}: "
                "freeze the model in the format of the state dict"
            )
            state_dict = {**state_dict, **stored}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        scales = f"{self.fmt}{STORAGES[self.fmt].scales}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {scales}"
        )
