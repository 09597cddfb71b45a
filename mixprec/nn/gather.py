"""gather_in_fp8: FSDP2 gathers the weights of FP8 layers as codes of 8 bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from .. import _said
from .._local_gradients import has_run, is_fully_sharded, is_sharded
from .._steps import after_steps
from ..functional._gathered import Gathered
from ..functional.operands import Matrix, OperandCast, largest_of_all
from ..ops._dispatch import checks
from ..ops._dispatch.casts import Cast
from ..ops.quantize import quantize_op
from ..ops.scale import amax_op, new_scales
from ..recipes import Recipe
from ._layer import Layer

_BLOCK = 128  # rows of a block of "block128x128"
_steps = 0  # that any optimizer has taken


def _after_step(*_: Any) -> None:
    global _steps
    _steps += 1


@dataclass
class _Amax:
    """The largest value of a weight, fp32 [], of all ranks."""

    value: torch.Tensor
    version: int  # of this rank's part, when it was found
    step: int
    is_used: bool = False  # by a forward pass
    scale: torch.Tensor | None = None


@dataclass
class _Weight:
    param: Any  # the DTensor
    cast: Cast

    @property
    def part(self) -> torch.Tensor:
        part: torch.Tensor = self.param._local_tensor
        return part.as_subclass(torch.Tensor)

    @property
    def version(self) -> int:
        """A write to the DTensor is none to its part, and the other way round."""
        return self.param._version + self.param._local_tensor._version


class Gathers:
    """The weights of one call of `gather_in_fp8`, and what is known of them."""

    def __init__(self) -> None:
        self.weights: dict[int, _Weight] = {}
        self._amaxes: dict[int, _Amax] = {}

    def __reduce__(self) -> tuple[type[Gathers], tuple[()]]:
        return Gathers, ()  # a copy of a layer belongs to none, and holds no other weights

    def add(self, layer: Layer, cast: Cast) -> None:
        self.weights[id(layer)] = _Weight(layer.weight, cast)
        layer._gathers = self
        self.mark(layer)

    def mark(self, layer: Layer) -> None:
        """Also where other code has put another parameter or part in their place."""
        if is_sharded(layer.weight):
            weight = self.weights[id(layer)]
            weight.param = layer.weight
            weight.param._local_tensor.__class__ = Shard

    def scale(self, key: int, dtype: torch.dtype) -> torch.Tensor:
        """That of the whole weight, whose parts are gathered in `dtype` otherwise: fp32 [].

        Every rank comes here for the same weights in the same order, and so to the same decisions.
        """
        known, weight = self._amaxes.get(key), self.weights[key]
        # A backward pass gathers what its forward pass did.
        is_forward = torch._C._current_graph_task_id() == -1
        if known is None or (
            is_forward
            and (known.is_used or known.step != _steps or known.version != weight.version)
        ):
            self._find(weight.param.device_mesh)
            known = self._amaxes[key]
        known.is_used |= is_forward
        if known.scale is None:
            # Rounding is monotonic: the largest of the rounded values is the largest one rounded.
            cast, amax = weight.cast, known.value.to(dtype).float()
            known.scale = new_scales(amax, cast.dtype, cast.power_of_two_scale)[0]
        return known.scale

    def _find(self, mesh: Any) -> None:
        """The amax of all weights on this mesh, in one all-reduce."""
        its = {
            key: weight
            for key, weight in self.weights.items()
            if weight.param.device_mesh == mesh and weight.cast.granularity == "tensor"
        }
        mine = torch.stack([amax_op(weight.part) for weight in its.values()])
        values = largest_of_all(mine, [(mesh, mesh.ndim - 1)])
        for (key, weight), value in zip(its.items(), values.unbind(), strict=True):
            self._amaxes[key] = _Amax(value, weight.version, _steps)


class Shard(torch.Tensor):
    """The part of a weight on a rank, in a DTensor, with what FSDP2 calls before and after it
    gathers. Tensors made of it are plain ones, but for those that FSDP2 puts in its place."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if func in _IN_ITS_PLACE and type(out) is torch.Tensor:
            out.__class__ = cls
        return out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The tensors to gather, and what `fsdp_post_all_gather` is to know."""
        gathers, recipe = getattr(module, "_gathers", None), getattr(module, "recipe", None)
        key = id(module)
        if gathers is None or _cast_of(recipe) != (cast := gathers.weights[key].cast):
            raise RuntimeError(
                f"{getattr(module, '_path', '') or type(module).__name__}: the recipe of a layer "
                "must stay as it was when gather_in_fp8 was called: set it before"
            )
        dtype = mp_policy.param_dtype or self.dtype
        part = self.as_subclass(torch.Tensor).to(dtype)
        if cast.granularity == "tensor":
            cast = cast._replace(scale=gathers.scale(key, dtype))
        codes, _, scale_inv, *_ = quantize_op(part, *cast)
        codes = codes.view(torch.uint8)
        rows = -(-outer_size[0] // mesh.size())
        if len(codes) < rows:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, rows - len(codes)))
        if cast.granularity == "tensor":
            return (codes,), (recipe, outer_size, scale_inv)
        return (codes, scale_inv), (recipe, outer_size, None)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The weight and no tensors that FSDP2 is to free beside `outputs`; or None, after
        changing `out`."""
        recipe, (n, _), scale_inv = metadata
        codes = outputs[0][:n].view(recipe.w.dtype)
        # On this stream: the other's memory may be written again by that of the gather.
        matrix = Matrix(codes, outputs[1] if scale_inv is None else scale_inv.clone())
        if out is None:
            return Gathered.make(matrix, recipe, "w", codes.shape, param_dtype), ()
        out.matrix, out.recipe = matrix, recipe
        return None


_IN_ITS_PLACE = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "cpu", "pin_memory", "new_zeros", "narrow")
)


def _cast_of(recipe: Recipe | None) -> Cast | None:
    """How a weight is cast for both products that read it; None if not in 8 bits, or twice."""
    if recipe is None:
        return None
    first, second = recipe.casts("w")
    if first != second or first.is_block or first.w.bits != 8 or recipe.has_outliers:
        return None
    cast = OperandCast.make("w", first, None, torch.device("cpu"), False).cast
    return cast if cast.granularity in ("tensor", "block128x128") else None


def _why_not(layer: Layer, weight: Any, uses: int) -> str | None:
    """Why FSDP2 is to gather this weight as it does without `gather_in_fp8`."""
    cast = _cast_of(layer.recipe)
    if not isinstance(layer, torch.nn.Linear):
        return "no linear layer"
    if uses > 1 or is_parametrized(layer):
        return "a weight that other modules read"
    if cast is None:
        return f"recipe {layer.recipe.name}, which casts a weight to 16 bits or twice"
    *others, last = weight.placements
    if not last.is_shard(0) or not all(place.is_replicate() for place in others):
        return "a weight that is sharded otherwise, too"
    rows = _BLOCK * weight.device_mesh.size(len(others))
    if cast.granularity != "tensor" and weight.shape[0] % rows:
        return f"blocks of {_BLOCK} rows that the shards cut"
    return None


def gather_in_fp8(model: torch.nn.Module) -> torch.nn.Module:
    """Let FSDP2 gather the weights of FP8 layers in 8 bits; return the model, changed in place.

        model = mixprec.convert(model, "fp8")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        mixprec.gather_in_fp8(model)  # before the first forward pass

    Each rank casts its part of a weight before it is gathered, with the scale of the whole weight,
    and nothing is cast after: the products are to the last bit those of weights that are gathered
    in 16 bits (or FP32, or the param_dtype of MixedPrecisionPolicy) and then cast. The largest
    values of all weights take one all-reduce in each forward pass, and none in backward.

    Parameters, gradients, optimizers, clipping and state dicts are as without. While it runs, a
    layer has its weight as codes alone: code that reads it there gets a RuntimeError.

    These are linear layers whose recipe casts a weight once to FP8, with one scale ("fp8",
    "fp8-delayed") or in blocks of 128 x 128 ("fp8-block") that no shard cuts. All else is gathered
    as before, and one line says what and why: recipes with rows or blocks of 32 cast a weight twice
    for their products, and two codes are as long as 16 bits.

    Not inside torch.compile, and not with a number for reshard_after_forward. TypeError if `model`
    is not a module; ValueError if fully_shard has sharded none of its layers, or if it has run
    already.
    """
    op = "gather_in_fp8"
    checks.is_module(op, model)
    if any(map(has_run, model.modules())):
        raise ValueError(f"{op}: model must not have run yet: call it before the first forward")
    states = [m._get_fsdp_state() for m in model.modules() if is_fully_sharded(m)]  # type: ignore[operator]
    groups = (g for state in states for g in getattr(state, "_fsdp_param_groups", ()))
    if any(group._use_post_forward_mesh for group in groups):
        raise ValueError(
            f"{op}: reshard_after_forward must be True, False or None, with which all ranks gather "
            "again or none does, got a number of ranks"
        )
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Layer)}
    named: dict[str, Any] = {n: m._parameters.get("weight") for n, m in layers.items()}
    sharded = {n: w for n, w in named.items() if w is not None and is_sharded(w)}
    if not sharded or not states:
        raise ValueError(
            f"{op}: model must have layers of mixprec.convert that fully_shard has sharded, got "
            f"{len(layers)} layers, none of them sharded: call convert, fully_shard, then {op}"
        )
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    gathers, left = Gathers(), Counter[str]()
    for name, weight in sharded.items():
        layer = layers[name]
        if reason := _why_not(layer, weight, uses[id(weight)]):
            left[reason] += 1
            continue
        cast = _cast_of(layer.recipe)
        assert cast is not None, "_why_not"
        gathers.add(layer, cast)
    after_steps(_after_step)
    rest = "".join(f"; {count} not: {reason}" for reason, count in left.items())
    _said.say(f"{op}: {len(gathers.weights)} of {len(layers)} weights in 8 bits{rest}")
    return model
