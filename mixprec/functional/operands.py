"""The operands of a layer's GEMMs: x, weight and gradient in the formats of a recipe."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack

from .._context import context
from ..ops._dispatch import simulation
from ..ops._dispatch.casts import Cast
from ..ops._dispatch.library import capability
from ..ops._dispatch.scaled_mm import reads_swizzled
from ..ops._reference import block_formats, scale_layout
from ..ops._reference.block_formats import DEFAULT_SCALE_MODE, hadamard
from ..ops.dequantize import dequantize_mx_op, dequantize_op
from ..ops.quantize import quantize_op
from ..ops.quantize_mx import quantize_mx_op
from ..ops.scale import amax_op, new_scales
from ..recipes import DELAYED_ROLES, READ_BY, Recipe

_UNCAST = Cast(torch.float32)  # of an op that computes values and casts them
_SEPARATE_TRANSPOSE_SCALES = ("row", "block1x128", "mx")  # the transpose has other scales


class Matrix(NamedTuple):
    """A cast matrix: what a GEMM reads, and what a layer saves for backward.

    data: codes [R, C], with E2M1 [R, ceil(C / 2)]. scale_inv: fp32, of a shape that gemm takes for
    an a [M, K], None in 16 bits; of block formats, as `quantize_mx` returns it, [R, blocks of C],
    or 4-dimensional in the layout of `scale_layout.swizzle`. tensor_scale_inv: fp32 [], [R, 1] or
    [R, ceil(C / 128)], of "nvfp4" only. Three times None where no GEMM reads it.
    """

    data: Any
    scale_inv: torch.Tensor | None = None
    tensor_scale_inv: torch.Tensor | None = None

    def t(self) -> Matrix:
        """The transpose, with the scales of the matrix; of each of several [E, R, C]."""
        data, inv = self.data, self.scale_inv
        if inv is not None and inv.dim() > 1:
            inv = inv.transpose(-1, -2)
        return Matrix(data.transpose(-1, -2), inv, self.tensor_scale_inv)


NOTHING = Matrix(None)


class Operand(NamedTuple):
    """A tensor cast as a matrix [R, C], and its transpose [C, R].

    own_t: the transpose, if it was cast as well: with other scales, or for a GPU that reads it in
    another order of memory.
    """

    matrix: Matrix
    own_t: Matrix | None = None

    @property
    def matrix_t(self) -> Matrix:
        return self.matrix.t() if self.own_t is None else self.own_t

    @property
    def for_backward(self) -> Matrix:
        """What a layer saves, for `transposed`."""
        return self.matrix if self.own_t is None else self.own_t


def check_transpose(op: str, weight: Operand, recipe: Recipe) -> None:
    """ValueError for a quantized_weight without the transpose that grad_input reads."""
    separate = recipe.w_granularity in _SEPARATE_TRANSPOSE_SCALES or recipe.block_format("w")
    if weight.own_t is None and (separate or recipe.backward):
        raise ValueError(
            f"{op}: quantized_weight must have been cast with use_t=True: in {recipe.name} the "
            "transpose, which the gradient of x reads, has scales of its own"
        )


def transposed(saved: Matrix, is_own: bool) -> Matrix:
    """The transpose, of `Operand.for_backward`; is_own: whether it had one of its own."""
    return saved if is_own or saved.data is None else saved.t()


class Delayed(NamedTuple):
    """The state of delayed scaling that a step reads and writes. See `mixprec.scaling`.

    scale: fp32 [2], of x and g, for the next cast; 0 means not initialized. amax: fp32 [], of x,
    the largest since the scales were last updated; grad_amax: fp32 [], of g.
    """

    scale: torch.Tensor
    amax: torch.Tensor
    grad_amax: torch.Tensor


def cast(
    x: torch.Tensor,
    role: str,
    recipe: Recipe,
    delayed: Delayed | None,
    *,
    use_t: bool,
    record: bool = True,
    groups: Sequence[Any] = (),
    amax: torch.Tensor | None = None,
) -> Operand:
    """Cast x [..., C] with the recipe's settings for `role`: "x", "w" or "g".

    use_t: whether a GEMM will read the transpose; record: whether delayed scaling records the amax;
    groups: the dimensions of a mesh, (mesh, dimension), over which x is sharded, for one scale;
    amax: that of the parts of all ranks, if it is known.
    """
    if x.dim() == 1:
        x = x.unsqueeze(0)
    first, second = recipe.casts(role)
    if not use_t or _is_one_cast(role, recipe):
        return _cast(x, role, first, delayed, use_t, record, groups, amax)
    plain = _cast(x, role, first, delayed, False, record, groups, amax)
    if recipe.backward and role != "g":
        x = decoded(plain.matrix, x.shape[-1], first.block_format(role), x.dtype)
    own_t = _cast(x, role, second, delayed, True, record, groups, amax).matrix_t
    return Operand(plain.matrix, own_t)


def _is_one_cast(role: str, recipe: Recipe) -> bool:
    """Whether both products that read it cast the same tensor in the same way."""
    first, second = recipe.casts(role)
    return second == first and not (recipe.backward and role != "g")


def decoded(
    cast: Matrix, columns: int, block_format: str | None, dtype: torch.dtype
) -> torch.Tensor:
    """The values [R, columns] of a cast that is not of 16 bits; those of 16 as they are."""
    if cast.scale_inv is None:
        return cast.data
    if block_format is None:
        return dequantize_op(cast.data, cast.scale_inv, dtype)
    blocks = block_formats.sizes(block_format, columns)[1]
    scale_inv = scale_layout.unswizzle(cast.scale_inv, cast.data.shape[0], blocks)
    return dequantize_mx_op(
        cast.data, scale_inv, cast.tensor_scale_inv, block_format, columns, dtype
    )


def _cast(
    x: torch.Tensor,
    role: str,
    recipe: Recipe,
    delayed: Delayed | None,
    use_t: bool,
    record: bool,
    groups: Sequence[Any],
    amax: torch.Tensor | None,
) -> Operand:
    """x [..., C] with a recipe that is the same for both products that read it."""
    fmt = getattr(recipe, role)
    if fmt.bits == 16:
        return Operand(Matrix(x.to(fmt.dtype).flatten(0, -2)))  # no copy if x has this dtype
    if recipe.is_block:
        return _in_blocks(x, role, recipe, use_t)
    how = OperandCast.make(role, recipe, delayed, x.device, use_t, record)
    shared = amax is not None or groups
    if shared and how.cast.granularity == "tensor" and how.cast.scale is None:
        amax = largest_of_all(amax_op(x), groups) if amax is None else amax
        scale = new_scales(amax, how.cast.dtype, how.cast.power_of_two_scale)[0]
        how = how._replace(cast=how.cast._replace(scale=scale))
    return how.operand(quantize_op(x, *how.cast))


def largest_of_all(amax: torch.Tensor, groups: Sequence[Any]) -> torch.Tensor:
    """fp32: each amax of this rank's part and of the parts that the other ranks have."""
    if groups:
        from torch.distributed._functional_collectives import all_reduce, wait_tensor

        amax = torch.where(amax.isnan(), torch.inf, amax)  # MAX would lose it
        for group in groups:
            amax = wait_tensor(all_reduce(amax, "max", group))
    return amax


class OperandCast(NamedTuple):
    """How `quantize`, or an op that computes x and casts it in one pass, is to cast an operand.

    Of the block formats, ops that compute x have granularity "mx" for FP8 with the default
    settings; for the others, and for two recipes, they leave x in FP32, which `operand` then casts.
    largest: what delayed scaling raises to the amax, which the op does, or, in compiled code,
    `operand`.
    """

    role: str
    recipe: Recipe
    use_t: bool
    cast: Cast
    delayed: Delayed | None = None
    record: bool = True
    largest: torch.Tensor | None = None

    @staticmethod
    def make(
        role: str,
        recipe: Recipe,
        delayed: Delayed | None,
        device: torch.device,
        use_t: bool,
        record: bool = True,
    ) -> OperandCast:
        first, _ = recipe.casts(role)
        if use_t and not _is_one_cast(role, recipe):
            return OperandCast(role, recipe, use_t, _UNCAST, delayed, record)
        recipe = first
        fmt, granularity = getattr(recipe, role), getattr(recipe, f"{role}_granularity")
        if fmt.bits == 16:
            return OperandCast(role, recipe, use_t, Cast(fmt.dtype))
        if recipe.is_block:
            fused = (
                granularity == "mx"
                and fmt.bits == 8
                and recipe.scale_mode == DEFAULT_SCALE_MODE
                and role not in recipe.stochastic_rounding
                and not any(_rotations(role, recipe, use_t))
            )
            mx = Cast(fmt.dtype, None, use_t, "mx")
            return OperandCast(role, recipe, use_t, mx if fused else _UNCAST)
        scale = largest = None
        if delayed is not None and recipe.is_delayed and role in DELAYED_ROLES:
            scale = delayed.scale[DELAYED_ROLES.index(role)]
            if record:
                largest = delayed.grad_amax if role == "g" else delayed.amax
        transpose = use_t and (
            granularity in _SEPARATE_TRANSPOSE_SCALES or wants_k_major(device, granularity)
        )
        # Compiled, an op that may write is another one to the compiler than an op that does not.
        raised = None if torch.compiler.is_compiling() else largest
        cast = fmt.dtype, scale, transpose, granularity, recipe.power_of_two_scale, raised
        return OperandCast(role, recipe, use_t, Cast(*cast), delayed, record, largest)

    def operand(self, results: Sequence[torch.Tensor]) -> Operand:
        """The operand of quantize's results."""
        if self.cast.dtype == torch.float32:  # _UNCAST
            x, role, recipe, use_t, _, delayed, record, _ = results[0], *self
            return cast(x, role, recipe, delayed, use_t=use_t, record=record)
        data, data_t, scale_inv, scale_inv_t, amax = results[:5]
        dtype, _, transpose, granularity, _, raised = self.cast
        data = data.flatten(0, -2)
        if dtype.itemsize == 2:
            return Operand(Matrix(data))
        # A recomputed forward and a second call in one step change nothing or raise the maximum;
        # NaN stays, and keeps the step out of the history.
        if self.largest is not None and raised is None:
            # An exported program runs this outside of the autograd function, where x has a
            # gradient.
            seen = amax.detach() if torch.compiler.is_exporting() else amax
            self.largest.clamp_min_(seen)
        matrix = Matrix(data, scale_inv)
        if not transpose:
            return Operand(matrix)
        if granularity not in (*_SEPARATE_TRANSPOSE_SCALES, "block128x128"):
            scale_inv_t = scale_inv.t()
        return Operand(matrix, Matrix(data_t, scale_inv_t))


def _in_blocks(x: torch.Tensor, role: str, recipe: Recipe, use_t: bool) -> Operand:
    """x [..., C] in the block format of `role`."""
    text = recipe.block_cast(role)
    block = block_formats.parse("linear", text)
    mode = recipe.scale_mode if not block.nvfp4 else DEFAULT_SCALE_MODE
    swizzled = reads_swizzled(block.name, x.device)
    x = x.flatten(0, -2)

    def matrices(
        rows: torch.Tensor, size: int, seed: torch.Tensor | None, transpose: bool
    ) -> tuple[Matrix, Matrix]:
        rows = hadamard(rows, size) if size else rows
        data, data_t, scale_inv, scale_inv_t, tensor_inv, _ = quantize_mx_op(
            rows, text, mode, transpose, seed, swizzled, False
        )
        outer = None if block.outer is None else tensor_inv
        return Matrix(data, scale_inv, outer), Matrix(data_t, scale_inv_t, outer)

    sizes = _rotations(role, recipe, use_t)
    at_once = use_t and not any(sizes) and block.casts_transpose
    seed = None
    if role in recipe.stochastic_rounding:  # from torch's generator, whose state determines it
        seed = seed_of(x.device)
    matrix, own_t = matrices(x, sizes[0], seed, at_once)
    if use_t and not at_once:
        # Not a second draw: compiled code leaves out a cast that no product reads, with its draw.
        another = None if seed is None else seed + 1
        own_t, _ = matrices(x.t(), sizes[1], another, False)
    return Operand(matrix, own_t if use_t else None)


def seed_of(device: torch.device, casts: int = 1) -> torch.Tensor:
    """Of casts that round at random, one number each, from torch's generator."""
    return torch.randint(2**63 - 1, (casts,), dtype=torch.int64, device=device)


def _rotations(role: str, recipe: Recipe, use_t: bool) -> list[int]:
    """The size of `Recipe.hadamard` for each product that reads it."""
    return [recipe.rotation(product) for product in READ_BY[role][: 1 + use_t]]


def wants_k_major(device: torch.device, granularity: str) -> bool:
    """Whether the FP8 GEMM requires operands with K contiguous in memory.

    FP8 tensor cores before Blackwell do, and K is another dimension in the backward GEMMs than in
    the forward one: there `quantize` writes the transposed copy in the same pass. A CPU kernel
    reads any strides, and so does torch's on compute capability 10, with scales of tensors.
    """
    if device.type != "cuda":
        return False
    blackwell = (capability(device.index or 0) or (0, 0))[0] == 10
    return not (blackwell and granularity == "tensor" and context.backend in (None, "vendor"))


# As many tensors as a layer's neighbours take in turn, such as a decoder's and an encoder's. More
# would keep memory that nothing reads.
_LIMIT = 2


@contextlib.contextmanager
def share_casts() -> Iterator[None]:
    """For the forward pass of a module: its layers cast a tensor that several of them take once."""
    context.casts.append([])
    try:
        yield
    finally:
        context.casts.pop()


def cast_input(
    x: torch.Tensor,
    recipe: Recipe,
    delayed: Delayed | None,
    *,
    use_t: bool,
    grad_enabled: bool,
    groups: Sequence[Any] = (),
) -> Operand:
    """`operands.cast` of a layer's input, or the operand that another layer has made of it.

    grad_enabled: the caller's grad mode (an autograd.Function runs without).
    """
    if groups:
        return cast(x, "x", recipe, delayed, use_t=use_t, record=grad_enabled, groups=groups)
    operand, keep = shared_cast(x, recipe, delayed, use_t, grad_enabled)
    if operand is None:
        operand = cast(x, "x", recipe, delayed, use_t=use_t, record=grad_enabled)
        keep(operand)
    return operand


def shared_cast(
    x: torch.Tensor, recipe: Recipe, delayed: Delayed | None, use_t: bool, grad_enabled: bool
) -> tuple[Operand | None, Callable[[Operand], None]]:
    """The operand that another layer has made of x, if any, and what to call with a new one.

    Only the cast is shared, which depends on nothing but the key, and never beyond `share_casts`.
    """
    if not _shareable(x, recipe, delayed):
        return None, lambda _: None
    known, key = context.casts[-1], _key(x, recipe, use_t, grad_enabled)
    for tensor, known_key, operand in known:
        if tensor() is x and known_key == key:
            return operand, lambda _: None

    def keep(operand: Operand) -> None:
        known[:] = [*known[1 - _LIMIT :], (weakref.ref(x), key, operand)]

    return None, keep


def saved_tensors_hooks() -> object:
    """The innermost hooks on saved tensors, such as those of torch.utils.checkpoint; or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _shareable(x: torch.Tensor, recipe: Recipe, delayed: Delayed | None) -> bool:
    """Whether the cast of x depends on its values alone, and a write to x can be seen."""
    if torch.compiler.is_compiling() or not context.casts:
        return False
    if delayed is not None or any("x" in one.stochastic_rounding for one in recipe.casts("x")):
        return False
    return (
        (recipe.is_scaled or x.dtype != recipe.x.dtype)  # else there is nothing to cast
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not x.is_inference()  # which have no version
        # Selective checkpointing, counters and fake tensors see each op: none may be missing.
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _key(x: torch.Tensor, recipe: Recipe, use_t: bool, grad_enabled: bool) -> tuple[Any, ...]:
    # The weak reference keeps the address of a storage that is gone from another one.
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    memory = StorageWeakRef(x.untyped_storage()), x._version, x.data_ptr(), x.device, stream
    layout = x.dtype, x.shape, x.stride()
    settings = recipe, use_t, simulation.current(), context.backend
    # Nothing is shared across the beginning or end of these.
    blocks = grad_enabled, saved_tensors_hooks(), tuple(_get_current_function_mode_stack())
    return *memory, *layout, *settings, *blocks
