"""The ops that audit lists, their FLOPs, and a call of one.

A multiplication and an addition are 2 FLOPs; only those of products count. Causal attention counts
as attention without a mask, as in torch.utils.flop_counter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ...ops._dispatch import op as registry
from ...ops.attention import attention_backward_op, attention_op
from ...ops.cross_entropy import cross_entropy_op
from ...ops.gemm import gemm_accumulate_op, gemm_op, gemm_simulated_op
from ...ops.gemm_grouped import gemm_grouped_accumulate_op, gemm_grouped_op
from ...ops.norm_quantize import norm_quantize_op

Arguments = dict[str, Any]  # of a call, by the names of the op's schema
Count = Callable[..., int]  # FLOPs, from the arguments, the result and the operands
aten = torch.ops.aten


class Listed(NamedTuple):
    """kind: "product", "convolution", "attention", "rnn" or "reduction"; operands: the arguments
    whose dtypes are the op's precision."""

    kind: str
    operands: tuple[str, ...]
    count: Count


def _product(_: Arguments, out: Any, a: torch.Tensor, b: torch.Tensor) -> int:
    """a [..., M, K] or [K], b [..., K, N] or [K]."""
    return 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)


def _grouped(_: Arguments, out: Any, a: torch.Tensor, b: torch.Tensor) -> int:
    """a [M, K] and b [G, K, N], a [G, M, K] and b [K, N], or both of 2 or of 3 dimensions."""
    rows = a.shape[0] * a.shape[1] if a.dim() == 3 and b.dim() == 3 else a.shape[-2]
    return 2 * rows * a.shape[-1] * b.shape[-1]


def _linear(_: Arguments, out: Any, x: torch.Tensor, weight: torch.Tensor) -> int:
    return 2 * x.numel() * weight.shape[0]


def _convolution(args: Arguments, out: Any, x: torch.Tensor, weight: torch.Tensor) -> int:
    """Each element of the result (of a transposed one, of x) is a sum over a weight's part."""
    points = x.shape[2:] if args.get("transposed") else out.shape[2:]
    return 2 * x.shape[0] * prod(points) * weight.numel()


def _convolution_backward(
    args: Arguments, out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> int:
    """As many for each of the two gradients that is computed."""
    image = x if args.get("transposed") else g
    once = 2 * image.shape[0] * prod(image.shape[2:]) * weight.numel()
    return once * sum(map(bool, args["output_mask"][:2]))


def _attention(_: Arguments, out: Any, *qkv: torch.Tensor, times: tuple[int, int] = (1, 1)) -> int:
    """times: the products over the features of q and k, and those over the features of v."""
    q, k, v = qkv[-3:]
    *heads, rows, d = q.shape
    features = times[0] * d + times[1] * v.shape[-1]
    return 2 * prod(heads) * rows * k.shape[-2] * features


_attention_backward = functools.partial(_attention, times=(3, 2))


def _rnn(args: Arguments, out: Any, x: torch.Tensor, *weights: Any, times: int = 2) -> int:
    """Of oneDNN, one layer and direction: x [T, B, I], weights [G * H, I] and [G * H, H]; of cuDNN,
    for each layer and direction two such matrices, and biases."""
    tokens = x.shape[0] if args["batch_sizes"] else x.shape[0] * x.shape[1]
    return times * tokens * sum(w.numel() for w in tensors(weights) if w.dim() > 1)


_rnn_backward = functools.partial(_rnn, times=4)


def shape(t: torch.Tensor) -> tuple[int, ...]:
    """-1 where the tensors of a nested one differ."""
    return (t.size(0), -1, t.size(-1)) if t.is_nested else tuple(t.shape)


def _encoder_layer(args: Arguments, out: Any, src: torch.Tensor, _: torch.Tensor) -> int:
    """A whole TransformerEncoderLayer in one op: four linear layers and attention. Of sequences
    without their padding if src is nested."""
    d, tokens = src.size(-1), src.numel() // src.size(-1)
    lengths = [part.shape[0] for part in src.unbind()] if src.is_nested else []
    scores = sum(n**2 for n in lengths) if src.is_nested else tokens * src.shape[-2]
    names = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    return 2 * tokens * sum(args[name].numel() for name in names) + 4 * scores * d


def _multi_head_attention(args: Arguments, out: Any, q: torch.Tensor, qkv: torch.Tensor) -> int:
    d, s = q.shape[-1], args["key"].shape[-2]
    return 2 * (q.numel() // d) * (qkv.numel() + args["proj_weight"].numel() + 2 * s * d)


def _trilinear(args: Arguments, out: Any, *factors: torch.Tensor) -> int:
    """sum over sumdim of i1 * i2 * i3, which are expanded: two multiplications an addition."""
    shapes = []
    for i, t in enumerate(factors, 1):
        shape = list(t.shape)
        for dim in sorted(args[f"expand{i}"]):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * prod(map(max, *shapes))


def _sparse(_: Arguments, out: Any, a: torch.Tensor, b: torch.Tensor) -> int:
    stored = a._nnz() if a.layout == torch.sparse_coo else a.values().numel()
    return int(2 * stored * b.shape[-1])


def _none(*_: Any) -> int:
    return 0


# kind, names, operands
_TABLE: tuple[tuple[str, str, str, Count], ...] = (
    ("product", "mm bmm _scaled_mm _scaled_mm_v2 _int_mm", "self mat2", _product),
    ("product", "addmm", "mat1 mat2", _product),
    ("product", "baddbmm addbmm", "batch1 batch2", _product),
    ("product", "mv", "self vec", _product),
    ("product", "addmv", "mat vec", _product),
    ("product", "dot", "self tensor", _product),
    ("product", "vdot", "self other", _product),
    ("product", "_grouped_mm _scaled_grouped_mm", "self mat2", _grouped),
    ("product", "linear", "input weight", _linear),
    ("product", "_trilinear", "i1 i2 i3", _trilinear),
    ("product", "_sparse_addmm", "mat1 mat2", _sparse),
    ("convolution", "convolution convolution_overrideable _convolution", "input weight",
     _convolution),
    ("convolution", "mkldnn_convolution cudnn_convolution miopen_convolution _slow_conv2d_forward",
     "self weight", _convolution),
    ("convolution", "convolution_backward", "grad_output input weight", _convolution_backward),
    *(("attention", f"_scaled_dot_product_{name}{backward}", "query key value", count)
      for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention",
                   "cudnn_attention", "fused_attention_overrideable")
      for backward, count in (("", _attention), ("_backward", _attention_backward))),
    ("attention", "_native_multi_head_attention", "query qkv_weight", _multi_head_attention),
    ("attention", "_transformer_encoder_layer_fwd", "src qkv_weight", _encoder_layer),
    ("rnn", "mkldnn_rnn_layer", "input weight0 weight1", _rnn),
    ("rnn", "mkldnn_rnn_layer_backward", "input weight1 weight2", _rnn_backward),
    ("rnn", "_cudnn_rnn", "input weight", _rnn),
    ("rnn", "_cudnn_rnn_backward", "input weight", _rnn_backward),
    ("reduction", "_softmax _log_softmax sum mean logsumexp cumsum var_mean linalg_vector_norm "
     "nll_loss_forward mse_loss", "self", _none),
    ("reduction", "native_layer_norm native_group_norm native_batch_norm _fused_rms_norm", "input",
     _none),
)  # fmt: skip
_OURS: dict[registry.Op, Listed] = {
    **dict.fromkeys((gemm_op, gemm_simulated_op, gemm_accumulate_op),
                    Listed("product", ("a", "b"), _product)),
    **dict.fromkeys((gemm_grouped_op, gemm_grouped_accumulate_op),
                    Listed("product", ("a", "b"), _grouped)),
    attention_op: Listed("attention", ("q", "k", "v"), _attention),
    attention_backward_op: Listed("attention", ("g", "q", "k", "v"), _attention_backward),
    cross_entropy_op: Listed("reduction", ("logits",), _none),
    norm_quantize_op: Listed("reduction", ("x",), _none),
}  # fmt: skip


@functools.cache
def _torchs() -> dict[Any, Listed]:
    """By torch's op."""
    return {
        getattr(aten, name): Listed(kind, (*operands.split(),), count)
        for kind, names, operands, count in _TABLE
        for name in names.split()
        if hasattr(aten, name)  # an older torch lacks some
    }


@functools.cache
def _variants() -> dict[str, registry.Op]:
    """By the names that we give them: variants are registered when they are first used."""
    kinds = ("cpp", "reference", "triton", "vendor")
    every = registry.OPS.values()
    return {f"mixprec::{op.variant_name(variant)}": op for op in every for variant in kinds}


def ours(func: Any) -> registry.Op | None:
    """The op of mixprec of which func is a variant."""
    return _variants().get(func.name()) if func.namespace == "mixprec" else None


def _listed(func: Any) -> Listed | None:
    if func.namespace == "mixprec":
        is_blocks = func.name() == "mixprec::gemm_blocks_vendor"
        return _OURS.get(gemm_op if is_blocks else ours(func))  # type: ignore[arg-type]
    return _torchs().get(func.overloadpacket)


def calls_others(func: Any) -> bool:
    """Whether the kernel of a listed op calls ops that torch.autocast casts for."""
    callers = (aten._trilinear, aten._sparse_addmm, aten._native_multi_head_attention)
    return func.overloadpacket in (*callers, aten._transformer_encoder_layer_fwd)


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether torch has nothing but its parts for an op: no kernel of a backend."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    kernels = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return has(name, "CompositeImplicitAutograd") and not any(has(name, k) for k in kernels)


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


class Call:
    """A call of an op that torch dispatches. inputs and results: its tensors; listed: what audit
    knows of the op, None if it is not listed."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.listed = _listed(func)
        self.inputs = tensors((args, kwargs))
        self.result: Any = None
        self.results: list[torch.Tensor] = []

    def run(self) -> None:
        self.result = self.func(*self.args, **self.kwargs)
        self.results = tensors(self.result)

    @functools.cached_property
    def given(self) -> Arguments:
        """The arguments by the names of the schema, with the defaults."""
        names = self.func._schema.arguments
        defaults = {a.name: a.default_value for a in names if a.has_default_value()}
        return defaults | dict(zip((a.name for a in names), self.args, strict=False)) | self.kwargs

    @property
    def flops(self) -> int:
        assert self.listed is not None
        operands = (self.given[name] for name in self.listed.operands)
        return int(self.listed.count(self.given, self.result, *operands))

    @property
    def op(self) -> str:
        """torch's name."""
        name: str = self.func.name()
        return name.split("::")[-1].split(".")[0]
