"""convert(invariant=True): what torch computes between layers, by kernels whose rows have the same
bits whatever is beside them, as those of layers have on a CPU; or an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch._compile import _disable_dynamo

from .. import _originals
from .._context import context
from .._modes import Block, not_compiled
from ..functional._exact_rows import matmul
from ..functional._one_pass import Activation
from ..ops._dispatch import autocast, checks, library
from ..ops._reference import block_formats
from ..recipes import Recipe
from ._layer import Layer
from ._replaced import Wrapped
from ._scope import attend, attention_operands
from .attention import MultiheadAttention
from .autocast import current_region, without_modes
from .experts import Experts
from .intercepted import Intercepted
from .linear import Conv1D, Linear

_KINDS = (Linear, Conv1D, MultiheadAttention, Experts, Intercepted)
# Rows of softmax below a vector of the processor are summed in another order than the first
# elements of a longer row.
_LEAST = 32


def why_not(recipe: Recipe) -> str | None:
    """Why rows of its forward product depend on other rows, or calls on other calls; None: they do
    not."""
    if recipe.is_delayed:
        return "delayed scales are those of earlier steps, and change between sampling and training"
    forward = recipe.product("forward")
    drawn = {*"xw"} & {*forward.stochastic_rounding}
    if drawn:
        return f"stochastic_rounding of {', '.join(sorted(drawn))} draws at random in each call"
    shared = {"tensor": "all of x", "block128x128": "128 rows of x"}
    if forward.is_block:
        cast = block_formats.parse("convert", forward.block_cast("x"))
        if cast.outer == "tensor":
            return "x has an FP32 scale of all its rows"
        if cast.rows > 1:
            return f"{cast.rows} rows of x share a scale"
    if forward.is_scaled and forward.x_granularity in shared:
        return f"x has a scale of {shared[forward.x_granularity]}: use one of rows or blocks"
    return None


def check_model(model: nn.Module) -> None:
    """ValueError for parts of a converted model that cannot be invariant."""
    wrong: dict[str, str] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, Layer):
            if (reason := why_not(module.recipe)) is not None:
                wrong.setdefault(f"recipe {module.recipe.name}: {reason}", fqn)
            if not isinstance(module, _KINDS):
                wrong.setdefault(f"{type(module).__name__}: its kernel depends on the sizes", fqn)
        elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            wrong.setdefault(f"{type(module).__name__}: its products are torch's", fqn)
    if wrong:
        listed = "; ".join(f"{fqn or 'the model'}, {why}" for why, fqn in wrong.items())
        raise ValueError(f"convert: invariant=True is not possible: {listed}")


class InvariantMode(Block):
    """Runs functions of torch whose bits depend on other rows by ours, or raises RuntimeError."""

    in_order = True

    @not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return super().__torch_function__(func, types, args, kwargs)
        return handler(func, *args, **(kwargs or {}))


class Invariant(Wrapped):
    """A forward pass inside of InvariantMode."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncompiled(*args, **kwargs)

    @_disable_dynamo
    def _uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        with InvariantMode():
            return self.forward(*args, **kwargs)

    def _check(self) -> None:
        """What has been set since convert."""
        region = current_region()
        recipe = region.inside if region is not None else None
        reason = why_not(recipe) if isinstance(recipe, Recipe) else None
        if any(not p.is_cpu and not p.is_meta for p in self.module.parameters()):
            reason = "on a GPU torch's products, and the tiles of ours, are chosen by the sizes"
        elif context.backend not in (None, "cpp"):
            reason = f"the backend {context.backend} has torch's products"
        elif library.C is not None and library.C.products_are_torchs():
            reason = "products are torch's on this processor: set MIXPREC_PRODUCTS=mixprec"
        if reason is not None:
            _refuse("the forward pass", reason)


def _refuse(what: str, reason: str) -> NoReturn:
    raise RuntimeError(
        f"convert(invariant=True): {what} is not invariant: {reason}. "
        "mixprec.invariance(model, batch) reports what varies without invariant=True"
    )


def _is_low(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in checks.FLOATS and x.is_cpu


def _matmul(func: Any, input: Any, other: Any, **options: Any) -> Any:
    if options or not (_is_low(input) and _is_low(other)):
        return _torchs(func, input, other, **options)
    a, b = (autocast.operand(x) for x in (input, other))
    right = b.unsqueeze(-1) if b.dim() == 1 else b
    if a.dtype != b.dtype or a.dim() < 2 or b.dim() == 0 or a.shape[-1] != right.shape[-2]:
        return _torchs(func, input, other)
    with without_modes():
        y = matmul(a, right)
    return y.squeeze(-1) if b.dim() == 1 else y


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    y = _matmul(torch.matmul, input, weight.mT)
    return y if bias is None else y + bias.to(y.dtype)


def _refused(reason: str) -> Callable[..., Any]:
    """Of integers and FP64 nothing is said; other floating-point numbers are refused."""

    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_low, (*args, *kwargs.values()))):
            _refuse(getattr(func, "__name__", str(func)), reason)
        return func(*args, **kwargs)

    return run


_torchs = _refused("torch chooses its kernel by the sizes")
_tail = _refused("torch computes the last elements of a tensor by another formula")
_across = _refused("only along the last dimension rows are apart")


def _activation(kind: str) -> Callable[..., Any]:
    def run(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        tanh = kwargs.get("approximate") == "tanh"
        if not _is_low(input):
            return func(input, *args, **kwargs)
        in_place = kwargs.get("inplace", args[0] if args else False)
        with without_modes():
            x = input.clone() if in_place else input
            y = Activation.apply(x, f"{kind}_tanh" if tanh else kind)
            return input.copy_(y) if in_place else y

    return run


def _rsqrt(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    return func(input.float(), *args, **kwargs).to(input.dtype) if _is_low(input) else func(input)


def _pow(func: Any, input: Any, exponent: Any, **options: Any) -> Any:
    is_number = isinstance(exponent, (int, float))  # else a table, as slopes of heads are
    is_exact = not is_number or exponent == 0.5 or exponent % 1 == 0
    return (func if is_exact else functools.partial(_tail, func))(input, exponent, **options)


def _new_pow(func: Any, input: Any, exponent: Any, **options: Any) -> Any:
    if isinstance(exponent, float) and exponent == -0.5 and not options:
        return _rsqrt(torch.rsqrt, input)
    return _pow(func, input, exponent, **options)


def _softmax(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    dim = kwargs.get("dim", args[0] if args else None)
    if dim not in (-1, input.dim() - 1):
        return _across(func, input, *args, **kwargs)
    rest = _LEAST - input.shape[-1] if _is_low(input) else 0
    if rest <= 0:
        return func(input, *args, **kwargs)
    padded = nn.functional.pad(input, (0, rest), value=-torch.inf)
    return func(padded, *args, **kwargs)[..., :-rest]


def _attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    operands = attention_operands(*args, **kwargs)
    if operands is None:
        reason = (
            "torch computes it, with dropout, with a mask and is_causal, in FP64, with a mask that "
            "needs a gradient, or inside of sdpa_kernel"
        )
        _refuse("scaled_dot_product_attention", reason)
    return attend(operands[0].dtype, True, *operands)


def _dropout(
    func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if p > 0 and training:
        _refuse("dropout", f"it draws at random; set its p, {p}, to 0")
    return func(input, p, training, inplace)


def _batch_norm(func: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("training", args[5] if len(args) > 5 else False):
        _refuse("batch_norm", "it has the mean and the variance of the batch")
    return func(*args, **kwargs)


_PRODUCTS = """
addmm addmv addbmm baddbmm addr mv dot vdot inner tensordot einsum chain_matmul bilinear conv1d
conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d multi_head_attention_forward lstm
gru rnn_tanh rnn_relu cdist grouped_mm _grouped_mm scaled_mm
"""
_TAILS = """
sigmoid softplus logsigmoid mish elu celu selu expm1 log1p erfinv logaddexp sinc glu expit
exp2 sinh cosh atanh atan2 logaddexp2 i0e float_power
"""
_IN_PLACE = " ".join(f"{name}_" for name in ("rsqrt", *_TAILS.split()))
_PLACES = (*_originals.PLACES, _originals.LINALG, _originals.C_NN)


def _named(names: str) -> list[Any]:
    """The functions of torch with these names."""
    return [getattr(p, name) for p in _PLACES for name in names.split() if hasattr(p, name)]


_HANDLERS: dict[Any, Callable[..., Any]] = {
    function: handler
    for names, handler in (
        (_PRODUCTS, _torchs),
        (f"{_TAILS} {_IN_PLACE}", _tail),
        ("matmul mm bmm __matmul__", _matmul),
        ("__rmatmul__", lambda func, input, other: _matmul(torch.matmul, other, input)),
        ("linear", _linear),
        ("silu", _activation("silu")),
        ("gelu", _activation("gelu")),
        ("rsqrt", _rsqrt),
        ("pow __pow__", _new_pow),
        ("pow_ __ipow__", _pow),
        ("softmax", _softmax),
        ("scaled_dot_product_attention", _attention),
        ("dropout", _dropout),
        ("batch_norm", _batch_norm),
    )
    for function in _named(names)
}
