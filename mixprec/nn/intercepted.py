"""Layers of other libraries whose forward pass is their own and calls torch's products."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._ops import HigherOrderOperator
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from .. import _originals, functional
from .._local_gradients import PLAIN
from .._modes import not_compiled
from ..ops._dispatch import checks
from ..recipes import Recipe
from ._layer import Layer
from .autocast import recipe_here

Product = Callable[..., torch.Tensor | None]


class ProductMode(TorchFunctionMode):
    """Runs torch's products of a layer by its recipe: linear, convolutions and grouped_mm of
    torch.nn.functional, and matrix products with a parameter of the layer, or a view of it.

    code: of the layer's forward pass, to find out what calls torch inside of it. has_run: whether
    there was one.
    """

    def __init__(self, layer: Layer, recipe: Recipe, code: Any) -> None:
        super().__init__()
        self.layer, self.recipe, self.code, self.has_run = layer, recipe, code, False
        self.grad = torch.is_grad_enabled()

    @not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # of compiled code: a checkpoint, a branch
            self._refuse(str(func))
        y = None
        if (run := _FUNCTIONS.get(func)) is not None:
            y = run(self.product, *args, **kwargs)
        elif func in _MATRIX_PRODUCTS:
            y = _MATRIX_PRODUCTS[func](self, *args, **kwargs)
        if y is None:
            return func(*args, **kwargs)
        self.has_run = True
        return y

    def product(self, function: Product, x: Any, w: Any, *rest: Any) -> torch.Tensor | None:
        """None for operands that stay torch's: sparse or nested ones, and dtypes without a
        recipe."""
        for t in (x, w):
            if not isinstance(t, torch.Tensor) or t.dtype not in checks.FLOATS:
                return None
            if t.layout is not torch.strided or t.is_nested:
                return None
        if self.grad and not torch.is_grad_enabled():
            self._refuse_reentrant()
        state = self.layer._state(x.dtype, x.device, self.recipe)._asdict()
        del state["quantized_weight"]  # there is none of a weight that is computed anew
        return function(x, w, *rest, recipe=self.recipe, name=self.layer._path, **state)

    def _refuse_reentrant(self) -> None:
        """Backward runs a piece of a forward pass again outside of this mode. Where torch compares
        nothing (use_reentrant=True), its gradients would be those of torch's products."""
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code is not self.code:
            if frame.f_code is CheckpointFunction.forward.__code__:
                self._refuse("torch.utils.checkpoint")
            frame = frame.f_back

    def _refuse(self, function: str) -> None:
        raise RuntimeError(
            f"{self.layer._path or 'a layer'}: {function} inside of its forward pass would compute "
            f"without the recipe {self.recipe.name}: put it around the whole module instead"
        )

    def is_own(self, t: torch.Tensor) -> bool:
        """Whether t is a matrix, or several, of the layer's parameters, or of what parametrizations
        have made of them where torch keeps that (parametrize.cached)."""
        if t.dim() not in (2, 3):
            return False
        is_computed = parametrize.is_parametrized(self.layer)
        computed: Any = self.layer.parametrizations if is_computed else ()
        kept = (parametrize._cache.get((id(self.layer), name)) for name in computed)
        kept_too = (*self.layer.parameters(recurse=False), *kept)
        return any(p is not None and p.dim() > 1 and _is_of(t, p) for p in kept_too)

    def multiply(self, a: Any, b: Any) -> torch.Tensor | None:
        """a @ b where b is own, or else a; None: torch's."""
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return None
        if self.is_own(b):
            return self._by(a, b)
        if a.dim() > 1 and b.dim() > 1 and self.is_own(a):
            y = self._by(b.transpose(-1, -2), a.transpose(-1, -2))
            return None if y is None else y.transpose(-1, -2).contiguous()
        return None

    def _by(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        """x [..., K] @ w [K, N], or x [..., E, M, K] @ w [E, K, N], broadcast."""
        w = w.resolve_neg()
        if w.dim() == 2:
            return self.product(functional.linear, x, base_parameter(w.t()), None)
        if x.dim() == 1:
            y = self._by(x.unsqueeze(0), w)
            return None if y is None else y.squeeze(-2)
        (e, k, n), (*batch, m, _) = w.shape, x.shape
        if (batch or [1])[-1] not in (1, e) or x.shape[-1] != k:
            return None  # of one matrix for all, or an error that torch explains
        rows = x.expand(*batch[:-1], e, m, k).movedim(-3, 0)
        count = rows[0].numel() // max(k, 1)
        ends = count * torch.arange(1, e + 1, device=x.device, dtype=torch.int32)
        weight = base_parameter(w.transpose(1, 2))
        y = self.product(functional.grouped_linear, rows.reshape(e * count, k), weight, ends)
        return None if y is None else y.view(*rows.shape[:-1], n).movedim(0, -3)


def _unwrapped(t: torch.Tensor) -> torch.Tensor:
    """The tensor inside of a transform of torch.func."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def _is_of(t: torch.Tensor, p: torch.Tensor) -> bool:
    """Whether t is p or shows a part of its memory."""
    t, p = _unwrapped(t), _unwrapped(p)
    if t is p or t._base is p:
        return True
    if t.dtype != p.dtype or type(t) not in PLAIN or type(p) not in PLAIN:
        return False
    return t.untyped_storage()._cdata == p.untyped_storage()._cdata


@cache
def _views() -> frozenset[type]:
    """The nodes of autograd that transpositions make."""
    with torch.inference_mode(False), torch.enable_grad():
        w = torch.empty(1, 1, requires_grad=True)
        views = (w.t(), w.T, w.mT, w.transpose(0, 1), w.permute(1, 0))
        return frozenset(type(each.grad_fn) for each in views)


def base_parameter(weight: torch.Tensor) -> torch.Tensor:
    """The parameter with a main_grad that `weight` is a view of, if its gradient is that of the
    view: all of it, by transpositions that no hook sees. Else `weight`."""
    base: torch.Tensor | None = weight._base
    node: Any = weight.grad_fn
    if base is None or getattr(base, "main_grad", None) is None or node is None:
        return weight
    if (base.shape, base.stride(), base.dtype) != (weight.shape, weight.stride(), weight.dtype):
        return weight
    if weight.retains_grad or weight._backward_hooks:
        return weight
    while type(node) in _views():
        node = node.next_functions[0][0]
    is_base: bool = getattr(node, "variable", None) is base
    return base if is_base else weight


# --- functions of torch.nn.functional, whichever weight they are given -------------------------


def _linear(product: Product, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    return product(functional.linear, input, weight, bias)


def _convolution(
    transposed: bool, product: Product, input: Any, weight: Any, *args: Any, **kwargs: Any
) -> torch.Tensor | None:
    names = ["bias", "stride", "padding", "dilation", "groups"]
    if transposed:
        names = ["bias", "stride", "padding", "output_padding", "groups", "dilation"]
    given = dict(zip(names, args, strict=False)) | kwargs
    bias, stride = given.get("bias"), given.get("stride", 1)
    padding, dilation = given.get("padding", 0), given.get("dilation", 1)
    rest = given.get("output_padding", 0), given.get("groups", 1)
    settings = (bias, stride, padding, dilation, transposed, *rest)
    return product(functional.convolution, input, weight, *settings)


def _grouped_mm(
    product: Product,
    input: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """input [S, K], of which the rows up to offs[e] are those of expert e, and mat2 [E, K, N];
    others stay torch's."""
    if input.dim() != 2 or mat2.dim() != 3 or offs is None or bias is not None:
        return None
    y = product(functional.grouped_linear, input, base_parameter(mat2.transpose(1, 2)), offs)
    return None if y is None else y.to(out_dtype or input.dtype)


_F = _originals.functional
_FUNCTIONS: dict[Any, Callable[..., torch.Tensor | None]] = {
    _F.linear: _linear,
    _originals.GROUPED_MM: _grouped_mm,
    **dict.fromkeys((_F.conv1d, _F.conv2d, _F.conv3d), partial(_convolution, False)),
    **dict.fromkeys(
        (_F.conv_transpose1d, _F.conv_transpose2d, _F.conv_transpose3d), partial(_convolution, True)
    ),
}

# --- matrix products, with a parameter of the layer --------------------------------------------


def _multiply(self: ProductMode, input: Any, other: Any, **options: Any) -> torch.Tensor | None:
    return None if options else self.multiply(input, other)


def _reflected(self: ProductMode, input: Any, other: Any) -> torch.Tensor | None:
    return self.multiply(other, input)


def _matmul(self: ProductMode, input: Any, *args: Any, **options: Any) -> torch.Tensor | None:
    """By whichever name the second operand is given."""
    names = {"other", "mat2", "tensor2"}
    named = [options.pop(name) for name in names & {*options}]
    return None if len(args) + len(named) != 1 or options else self.multiply(input, *args, *named)


def _added(
    self: ProductMode, input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1, **options: Any
) -> torch.Tensor | None:
    """beta * input + alpha * a @ b, without input where beta is 0."""
    if options or not isinstance(input, torch.Tensor):
        return None
    y = self.multiply(a, b)
    if y is None:
        return None
    y = y if alpha == 1 else alpha * y
    return y if beta == 0 else (y + (input if beta == 1 else beta * input)).to(y.dtype)


_PLACES = (torch, torch.Tensor)
_MATRIX_PRODUCTS: dict[Any, Callable[..., torch.Tensor | None]] = {
    **{getattr(p, name): _matmul for p in _PLACES for name in ("matmul", "mm", "bmm")},
    **{getattr(p, name): _added for p in _PLACES for name in ("addmm", "baddbmm")},
    torch.Tensor.__matmul__: _multiply,
    torch.Tensor.__rmatmul__: _reflected,
}


class Intercepted(Layer):
    """A layer in whose forward pass torch's products compute with `recipe`; all else in it runs as
    before.

    These are linear, the convolutions and grouped_mm of torch.nn.functional, and matrix products
    (`@`, matmul, mm, bmm, addmm, baddbmm) with a parameter of the module or a view of it, but not
    with a copy (an index, another dtype), with `out=`, by einsum or in an autograd.Function. Only
    `mixprec.convert` makes it, of subclasses of nn.Linear and of torch's convolutions that define
    forward, such as convolutions with standardized weights. Delayed scales are shared by all
    products of the layer; `mixprec.reuse_weights` does nothing here, because the weight may be
    computed anew in each pass. torch.compile leaves the layer out of its graph.
    """

    __module__ = "mixprec.nn"
    _one_product = False
    _warned = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = recipe_here(self._recipe)
        if torch.compiler.is_dynamo_compiling() and recipe is not None:
            # Which shows to no mode grouped_mm, and whether an operand is a view of a weight.
            return _uncompiled(self, *args, **kwargs)
        self._watch_main_grads()
        if recipe is None:
            return super().forward(*args, **kwargs)
        products = ProductMode(self, recipe, Intercepted.forward.__code__)
        with products:
            result = self._run(recipe, products, args, kwargs)
        if not (products.has_run or self._warned):
            self._warned = True
            warnings.warn(
                f"{self._path or 'a layer'} does not use the recipe {recipe.name}: its forward "
                "pass called no linear, convolution or grouped_mm of torch.nn.functional, and no "
                "matrix product with a parameter of its own",
                stacklevel=2,
            )
        return result

    def _run(self, recipe: Recipe, products: ProductMode, args: Any, kwargs: Any) -> Any:
        """The forward pass of the module."""
        return super().forward(*args, **kwargs)

    def _leave(self) -> None:
        super()._leave()
        vars(self).pop("_warned", None)

    __repr__ = nn.Module.__repr__

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return f"{text}, {self.recipe}" if text else str(self.recipe)


@_disable_dynamo
def _uncompiled(layer: Intercepted, *args: Any, **kwargs: Any) -> Any:
    return Intercepted.forward(layer, *args, **kwargs)
