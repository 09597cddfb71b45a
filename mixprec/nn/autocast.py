"""autocast: a region in which modules use a recipe, or none, and sensitive ops use FP32."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack

from .. import _modes, _originals
from .._context import context, replaced
from .._modes import Block, Mode, follow_checkpoints, nor_below, not_compiled
from .._originals import functional
from ..recipes import Recipe

OWN = object()
_SDPA = functional.scaled_dot_product_attention
follow_checkpoints()


class RegionAware(Mode):
    """A mode that has to know of regions that began after it, which torch hides from it."""

    region: Region | None = None  # the innermost of these, while it passes a function on

    @not_compiled
    def inside_of(self, region: Region, func: Any, *args: Any, **kwargs: Any) -> Any:
        self.region = region
        try:
            return func(*args, **kwargs)
        finally:
            self.region = None


class Region(Block):
    """inside: what layers use; OWN: their own recipe; None: they compute as torch's modules."""

    def __init__(self, inside: Recipe | object | None) -> None:
        super().__init__()
        self.inside = inside

    def in_backward(self) -> Region:
        return Region(self.inside)

    @not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = traceable(func), kwargs or {}
        if func is _SDPA:
            for mode in reversed(_get_current_function_mode_stack()):
                if isinstance(mode, RegionAware) and mode.region is None:
                    return mode.inside_of(self, func, *args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def is_for_onnx() -> bool:
    """Whether torch.onnx.export is running, whose format has none of our ops."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


@nor_below
def current_region() -> Region | None:
    """The innermost region of this thread."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode for mode in modes if isinstance(mode, Region)), None)


@nor_below
def recipe_here(own: Recipe, region: Region | None = None) -> Recipe | None:
    """The recipe of a module with recipe `own` in `region`, or else the current one; None: compute
    as torch's module."""
    if is_for_onnx():
        return None
    if region is None and torch._C._len_torch_function_stack():
        region = current_region()
    if region is None or region.inside is OWN:
        return own
    return region.inside  # type: ignore[return-value]


@nor_below
def traceable(func: Any) -> Any:
    """func; in compiled code torch.unflatten for Tensor.unflatten, at whose `super()` torch.compile
    stops inside of a mode. Eager code keeps it: subclasses and other modes see which one it is."""
    compiling = torch.compiler.is_compiling()
    return torch.unflatten if compiling and func is torch.Tensor.unflatten else func


def without_modes() -> AbstractContextManager[Any]:
    """For the code of a layer between the modules that it was called with: a torch function mode,
    such as that of `compress_saved`, sees each attribute of a tensor that is read.
    """
    return nullcontext() if torch.compiler.is_compiling() else torch._C.DisableTorchFunction()


Function = TypeVar("Function", bound=Callable[..., Any])

# The ops that lose too much precision in 16 bits, with their names in torch. The list is that of
# torch.autocast on CUDA plus mean, RMSNorm and batch norm; on a CPU torch.autocast runs all of them
# in 16 bits.
FP32_OPS: dict[str, tuple[str, ...]] = {
    "exponentials": (
        *("exp", "expm1", "log", "log10", "log1p", "log2", "pow", "__pow__", "__rpow__"),
        *("logsumexp", "cosh", "sinh", "tan", "acos", "asin", "erfinv", "rsqrt", "reciprocal"),
    ),
    "softmax": ("softmax", "log_softmax", "softmin", "gumbel_softmax"),
    "norms": (
        *("layer_norm", "group_norm", "rms_norm", "batch_norm", "instance_norm", "norm"),
        *("local_response_norm", "normalize", "renorm", "vector_norm", "matrix_norm"),
    ),
    "losses": (
        *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("kl_div", "poisson_nll_loss", "gaussian_nll_loss", "cosine_embedding_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss"),
        *("margin_ranking_loss", "multi_margin_loss", "multilabel_margin_loss", "soft_margin_loss"),
        *("multilabel_soft_margin_loss", "triplet_margin_loss", "ctc_loss"),
        *("cosine_similarity", "pdist", "cdist", "dist"),
    ),
    "reductions": ("sum", "mean", "prod", "cumsum", "cumprod", "var", "std", "var_mean"),
}
_LOW = (torch.float16, torch.bfloat16)


# Every callable of torch named in FP32_OPS.
_FP32_FUNCTIONS: frozenset[Any] = frozenset(
    getattr(place, name)
    for place in (*_originals.PLACES, _originals.LINALG)
    for names in FP32_OPS.values()
    for name in names
    if hasattr(place, name)
)
# Those in Python that are methods: Dynamo does not find what it makes of them in a set.
_FP32_METHODS = tuple(
    f for f in _FP32_FUNCTIONS if isinstance(f, FunctionType) and f in vars(torch.Tensor).values()
)


@_modes.nor_below
def _to_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _LOW else value
    if type(value) in (list, tuple):
        return type(value)(_to_fp32(item) for item in value)
    return value


class autocast(Region):
    """A region in which converted modules compute with `recipe`; also a decorator.

        with mixprec.autocast("bf16"): ...      # modules of mixprec.convert use bf16 here
        with mixprec.autocast(enabled=False):   # and compute as torch.nn modules here
            ...
        with mixprec.autocast(): ...            # each with its own recipe

    Inside, exponentials, softmax, norms, losses and reductions of 16-bit tensors run in FP32 and
    return FP32, on every device, as torch.autocast does on CUDA only (`FP32_OPS` lists them; a
    dtype= argument takes precedence). torch.autocast is not affected and can be combined with it.
    Regions nest: the innermost one applies; leaving one, also by an exception, restores the
    previous setting. With enabled=False modules compute as if `convert` had not been called, and no
    op is moved to FP32. A region holds for the thread that entered it. What torch.utils.checkpoint
    computes again is in the regions of its forward pass, wherever backward() is called; inside of
    the checkpoints of other libraries, layers follow the region around backward(). In compiled code
    a checkpoint inside of a region runs those ops in 16 bits in both passes.

    recipe: a name, a Recipe, or None for each module's own. ValueError for an unknown one, and for
    delayed scaling and outliers, which belong to the modules that `convert` made for them.
    """

    def __init__(self, recipe: Recipe | str | None = None, *, enabled: bool = True) -> None:
        self.recipe = None if recipe is None else Recipe.parse(recipe)
        if self.recipe is not None and self.recipe.is_delayed:
            raise ValueError(
                f"autocast: recipe must not be delayed, got {self.recipe.name!r}, whose scales "
                "live in the modules: convert with it"
            )
        if self.recipe is not None and self.recipe.outliers:
            raise ValueError(
                f"autocast: recipe must have no outliers, got {self.recipe.name!r}, whose indices "
                "are those of a layer: convert with it"
            )
        super().__init__((self.recipe or OWN) if enabled else None)
        self.enabled = enabled

    @_modes.not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.enabled and func not in _originals.BACKWARD:
            # Regions around this one leave the op alone too.
            with replaced("plain", True):
                return super().__torch_function__(func, types, args, kwargs)
        is_fp32 = any(func is method for method in _FP32_METHODS) or func in _FP32_FUNCTIONS
        if is_fp32 and kwargs.get("dtype") is None and not context.plain:
            args = tuple(_to_fp32(arg) for arg in args)
            kwargs = {name: _to_fp32(value) for name, value in kwargs.items()}
        return super().__torch_function__(func, types, args, kwargs)

    def __call__(self, function: Function) -> Function:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"autocast: {function.__qualname__} is a generator function or a coroutine, whose "
                "body runs after the call and is not decorated: enter the region inside of it"
            )

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with autocast(self.recipe, enabled=self.enabled):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]
