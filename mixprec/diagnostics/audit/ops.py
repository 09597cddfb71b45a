"""The ops that audit lists, their FLOPs, and a call of one.

A multiplication and an addition are 2 FLOPs; only those of products count. Causal attention counts
as attention without a mask, as in torch.utils.flop_counter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
Count = Callable[[Arguments, Any], int]  # FLOPs, from the arguments and the result
aten = torch.ops.aten


class Listed(NamedTuple):
    """kind: "product", "convolution", "attention", "rnn" or "reduction"; operands: the arguments
    whose dtypes are the op's precision."""

    kind: str
    operands: tuple[str, ...]
    flops: Count


def _product(a: str, b: str) -> Count:
    """a [..., M, K] or [K], b [..., K, N] or [K]."""

    def flops(args: Arguments, _: Any) -> int:
        columns = args[b].shape[-1] if args[b].dim() > 1 else 1
        return int(2 * args[a].numel() * columns)

    return flops


def _grouped(a: str, b: str) -> Count:
    """a [M, K] and b [G, K, N], a [G, M, K] and b [K, N], or both of 2 or of 3 dimensions."""

    def flops(args: Arguments, _: Any) -> int:
        x, y = args[a], args[b]
        rows = x.shape[0] * x.shape[1] if x.dim() == 3 and y.dim() == 3 else x.shape[-2]
        return 2 * rows * x.shape[-1] * y.shape[-1]

    return flops


def _linear(args: Arguments, _: Any) -> int:
    return 2 * args["input"].numel() * args["weight"].shape[0]


def _convolution(x: str) -> Count:
    """Each element of the result (of a transposed one, of x) is a sum over a weight's part."""

    def flops(args: Arguments, out: Any) -> int:
        points = args[x].shape[2:] if args.get("transposed") else out.shape[2:]
        return int(2 * args[x].shape[0] * prod(points) * args["weight"].numel())

    return flops


def _convolution_backward(args: Arguments, _: Any) -> int:
    """As many for each of the two gradients that is computed."""
    image = args["input"] if args.get("transposed") else args["grad_output"]
    once = 2 * image.shape[0] * prod(image.shape[2:]) * args["weight"].numel()
    return once * sum(map(bool, args["output_mask"][:2]))


def _attention(
    products: Sequence[str], q: str = "query", k: str = "key", v: str = "value"
) -> Count:
    """products: "k" for one over the features of q and k, "v" over those of v."""

    def flops(args: Arguments, _: Any) -> int:
        *heads, rows, d = args[q].shape
        columns, d_v = args[k].shape[-2], args[v].shape[-1]
        return sum(2 * prod(heads) * rows * columns * (d if p == "k" else d_v) for p in products)

    return flops


def _rnn(times: int, *weights: str) -> Count:
    """Of oneDNN, one layer and direction: x [T, B, I], weights [G * H, I] and [G * H, H]; of cuDNN,
    for each layer and direction two such matrices, and biases."""

    def flops(args: Arguments, _: Any) -> int:
        x, matrices = args["input"], tensors([args[name] for name in weights])
        tokens = x.shape[0] if args["batch_sizes"] else x.shape[0] * x.shape[1]
        return times * tokens * sum(w.numel() for w in matrices if w.dim() > 1)

    return flops


def shape(t: torch.Tensor) -> tuple[int, ...]:
    """-1 where the tensors of a nested one differ."""
    return (t.size(0), -1, t.size(-1)) if t.is_nested else tuple(t.shape)


def _encoder_layer(args: Arguments, _: Any) -> int:
    """A whole TransformerEncoderLayer in one op: four linear layers and attention. Of sequences
    without their padding if src is nested."""
    src = args["src"]
    d, tokens = src.size(-1), src.numel() // src.size(-1)
    scores = (
        tokens * src.shape[-2]
        if not src.is_nested
        else sum(part.shape[0] ** 2 for part in src.unbind())
    )
    names = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    return 2 * tokens * sum(args[name].numel() for name in names) + 4 * scores * d


def _multi_head_attention(args: Arguments, _: Any) -> int:
    d, s = args["query"].shape[-1], args["key"].shape[-2]
    tokens = args["query"].numel() // d
    return 2 * tokens * (args["qkv_weight"].numel() + args["proj_weight"].numel() + 2 * s * d)


def _trilinear(args: Arguments, _: Any) -> int:
    """sum over sumdim of i1 * i2 * i3, which are expanded: two multiplications an addition."""
    shapes = []
    for name, at in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        shape = list(args[name].shape)
        for dim in sorted(args[at]):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * prod(map(max, *shapes))


def _sparse(args: Arguments, _: Any) -> int:
    mat1 = args["mat1"]
    stored = mat1._nnz() if mat1.layout == torch.sparse_coo else mat1.values().numel()
    return int(2 * stored * args["mat2"].shape[-1])


def _none(*_: Any) -> int:
    return 0


_TABLE: dict[str, list[tuple[str, tuple[str, ...], Count]]] = {
    "product": [
        *((names, (a, b), _product(a, b)) for names, a, b in (
            ("mm bmm _scaled_mm _scaled_mm_v2 _int_mm", "self", "mat2"),
            ("addmm", "mat1", "mat2"), ("baddbmm addbmm", "batch1", "batch2"),
            ("mv", "self", "vec"), ("addmv", "mat", "vec"),
            ("dot", "self", "tensor"), ("vdot", "self", "other"),
        )),
        ("_grouped_mm _scaled_grouped_mm", ("self", "mat2"), _grouped("self", "mat2")),
        ("linear", ("input", "weight"), _linear),
        ("_trilinear", ("i1", "i2", "i3"), _trilinear),
        ("_sparse_addmm", ("mat1", "mat2"), _sparse),
    ],
    "convolution": [
        ("convolution convolution_overrideable _convolution", ("input", "weight"),
         _convolution("input")),
        ("mkldnn_convolution cudnn_convolution miopen_convolution _slow_conv2d_forward",
         ("self", "weight"), _convolution("self")),
        ("convolution_backward", ("grad_output", "input", "weight"), _convolution_backward),
    ],
    "attention": [
        *((f"_scaled_dot_product_{name}{backward}", ("query", "key", "value"), _attention(products))
          for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention",
                       "cudnn_attention", "fused_attention_overrideable")
          for backward, products in (("", "kv"), ("_backward", "kvkvk"))),
        ("_native_multi_head_attention", ("query", "qkv_weight"), _multi_head_attention),
        ("_transformer_encoder_layer_fwd", ("src", "qkv_weight"), _encoder_layer),
    ],
    "rnn": [
        ("mkldnn_rnn_layer", ("input", "weight0", "weight1"), _rnn(2, "weight0", "weight1")),
        ("mkldnn_rnn_layer_backward", ("input", "weight1", "weight2"),
         _rnn(4, "weight1", "weight2")),
        ("_cudnn_rnn", ("input", "weight"), _rnn(2, "weight")),
        ("_cudnn_rnn_backward", ("input", "weight"), _rnn(4, "weight")),
    ],
    "reduction": [
        ("_softmax _log_softmax sum mean logsumexp cumsum var_mean linalg_vector_norm "
         "nll_loss_forward mse_loss", ("self",), _none),
        ("native_layer_norm native_group_norm native_batch_norm _fused_rms_norm", ("input",),
         _none),
    ],
}  # fmt: skip
_OURS: dict[registry.Op, Listed] = {
    **dict.fromkeys((gemm_op, gemm_simulated_op, gemm_accumulate_op),
                    Listed("product", ("a", "b"), _product("a", "b"))),
    **dict.fromkeys((gemm_grouped_op, gemm_grouped_accumulate_op),
                    Listed("product", ("a", "b"), _grouped("a", "b"))),
    attention_op: Listed("attention", ("q", "k", "v"), _attention("kv", "q", "k", "v")),
    attention_backward_op: Listed(
        "attention", ("g", "q", "k", "v"), _attention("kvkvk", "q", "k", "v")
    ),
    cross_entropy_op: Listed("reduction", ("logits",), _none),
    norm_quantize_op: Listed("reduction", ("x",), _none),
}  # fmt: skip


@functools.cache
def _torchs() -> dict[Any, Listed]:
    """By torch's op."""
    return {
        getattr(aten, name): Listed(kind, operands, flops)
        for kind, rows in _TABLE.items()
        for names, operands, flops in rows
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
    def op(self) -> str:
        """torch's name."""
        name: str = self.func.name()
        return name.split("::")[-1].split(".")[0]
