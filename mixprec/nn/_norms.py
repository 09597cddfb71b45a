"""What the forward pass of a module computes, where it is one of a few known forms."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, NamedTuple

import torch
from torch import nn

from .._local_gradients import LOW_PRECISION

__all__ = ["NormParts", "Swapped", "as_input", "forward_of", "norm_of"]

# A norm whose weight may be FP32 beside inputs of 16 bits.
_WITH_CAST = (
    "return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), None, self.eps)"
)
# The RMSNorm of Llama, Mistral, Qwen and others in transformers.
_IN_STEPS = """\
input_dtype = x.dtype
x = x.to(torch.float32)
variance = x.pow(2).mean(-1, keepdim=True)
x = x * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * x.to(input_dtype)"""


class Swapped(nn.Module):
    """A module whose class `convert(fuse=True)` has replaced by one derived from it."""

    def alone(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module's own class."""
        return super().forward(*args, **kwargs)


class NormParts(NamedTuple):
    eps: float
    subtract_mean: bool
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    promotes: bool  # an input of 16 bits to the dtype of the weight


_read: dict[type, str] = {}


def forward_of(kind: Any) -> str:
    """The statements of the forward pass of a class, with x for its argument; "" without source,
    or with further arguments. What is assigned only to be returned is returned."""
    kind = kind.__bases__[1] if issubclass(kind, Swapped) else kind
    if kind not in _read and not torch.compiler.is_compiling():  # which cannot trace the reading
        _read[kind] = _statements(kind)
    return _read.get(kind, "")


def _statements(kind: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
        (function,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) != 2:
        return ""
    given = function.args.args[1].arg
    body = function.body[ast.get_docstring(function) is not None :]
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Name) and node.id == given:
            node.id = "x"
    lines = [ast.unparse(statement) for statement in body]
    if len(lines) > 1 and lines[-1].startswith("return "):
        name, _, value = lines[-2].partition(" = ")
        if lines[-1] == f"return {name}":
            lines[-2:] = [f"return {value}"]
    return "\n".join(lines)


def norm_of(module: nn.Module) -> NormParts | None:
    """The settings of a LayerNorm or RMSNorm over the last dimension; None for anything else."""
    kind: Any = type(module).__bases__[1] if isinstance(module, Swapped) else type(module)
    if forward_of(kind) == _IN_STEPS:
        return NormParts(module.variance_epsilon, False, module.weight, None, True)  # type: ignore[arg-type]
    known = kind.forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)
    if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or len(module.normalized_shape) != 1:
        return None
    if not known and forward_of(kind) != _WITH_CAST:
        return None
    bias = getattr(module, "bias", None)
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return NormParts(eps, isinstance(module, nn.LayerNorm), module.weight, bias, False)


def as_input(module: nn.Module, inputs: tuple[object, ...], output: object) -> object:
    """A forward hook: the output in the dtype of the input, where that has 16 bits."""
    x = next((i for i in inputs if isinstance(i, torch.Tensor)), None)
    if x is None or x.dtype not in LOW_PRECISION or not isinstance(output, torch.Tensor):
        return output
    return output.to(x.dtype)
