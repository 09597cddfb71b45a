"""norm_linear and mlp: parts of transformer blocks without passes of their own for the casts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops._dispatch import checks
from ..ops.act_quantize import KINDS
from ..recipes import Recipe
from ._arguments import check_output, main_grad_of, no_outliers
from ._fused import Norm, run_fused
from ._linear import check_input
from ._products import Product


def _layers(
    op: str, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], recipe: Recipe
) -> tuple[list[Product], list[torch.Tensor | None]]:
    """The products and their tensors, after the checks of `linear` that do not depend on x."""
    no_outliers(op, recipe)
    if recipe.is_delayed or recipe.clip_activations:
        raise ValueError(
            f"{op}: recipe {recipe.name} keeps state: use the modules of mixprec.nn, or, for "
            "clip_activations, layers that are not fused"
        )
    products: list[Product] = []
    tensors: list[torch.Tensor | None] = []
    for weight, bias in zip(weights, biases, strict=True):
        checks.is_tensor(op, "weight", weight)
        if weight.dim() != 2:
            raise ValueError(f"{op}: weight must be [N, K], got shape {tuple(weight.shape)}")
        check_output(op, weight, bias, torch.float32, "[N]")
        products.append(Product(main_grad_of(op, weight)))
        tensors += [weight, bias]
    return products, tensors


def _norm(op: str, norm: str | None, eps: float) -> Norm | None:
    if norm not in (None, "rms", "layer"):
        raise ValueError(f'{op}: norm must be "rms", "layer" or None, got {norm!r}')
    return None if norm is None else Norm(eps, norm == "layer")


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    norm: str = "rms",
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    recipe: Recipe | str = "fp8",
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return q(norm(x + residual)) @ q(weight)^T + bias, for one or more weights.

    x, residual: [..., K]; weight: [N, K], or several that share the operand, with as many biases
    [N]. norm: "rms", y = x / sqrt(mean(x^2) + eps) * norm_weight, or "layer",
    y = (x - mean(x)) / sqrt(var(x) + eps) * norm_weight + norm_bias, over the last dimension.

    The norm writes the operand of the GEMMs: its output exists in the recipe's format only, rounded
    once from FP32. Backward keeps x + residual in its dtype, the operand and two statistics a row.
    The result is a tuple of the outputs [..., N] in out_dtype (None: x's), followed by x + residual
    in x's dtype if a residual was given.

    Differs from `norm` followed by `linear` in two roundings that are left out or moved: the norm's
    output is not rounded to x's dtype before the cast, and its gradient is rounded to the recipe's
    16-bit dtype (bf16 in FP8), or, for several weights, summed in FP32.
    """
    op, recipe = "norm_linear", Recipe.parse(recipe)
    weights = (weight,) if isinstance(weight, torch.Tensor) else tuple(weight)
    if bias is None:
        biases: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
    else:
        biases = (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
    products, tensors = _layers(op, weights, biases, recipe)
    for w in weights:
        check_input(x, w, op)
    kind = _norm(op, norm, eps)
    return run_fused(
        op, x, products, tensors, recipe, out_dtype or x.dtype, kind, norm_weight, norm_bias,
        residual,
    )  # fmt: skip


def mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    gate: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    act: str = "gelu",
    norm: str | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    recipe: Recipe | str = "fp8",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return act(z @ up^T) @ down^T, or (act(z @ gate^T) * (z @ up^T)) @ down^T, with z = norm(x).

    x: [..., K]; up, gate: [H, K]; down: [N, H]; biases are added to the products. act: "silu",
    "gelu", "gelu_tanh" or "relu2" (relu(h)^2). norm, norm_*: as in `norm_linear`; None: z = x.
    residual, with a norm: z = norm(x + residual), and the result is a pair with x + residual.

    The norm and the activation write the operands of the GEMMs, and the backward pass of the
    activation those of its GEMMs. Backward keeps the two operands, the hidden products and, with a
    norm, x.

    Differs from the separate functions in these roundings: the hidden products and the gradients of
    the hidden values are in the recipe's 16-bit dtype (bf16 in FP8), the activation is not rounded
    to it before the cast, nor is, in FP8 without biases, the gradient behind it; those of
    `norm_linear`.

    Sources: GLU Variants Improve Transformer (Shazeer, 2020) for the gate.
    """
    op, recipe = "mlp", Recipe.parse(recipe)
    if act not in KINDS:
        raise ValueError(f"{op}: act must be one of {', '.join(KINDS)}, got {act!r}")
    weights = (up, down) if gate is None else (gate, up, down)
    biases = (up_bias, down_bias) if gate is None else (gate_bias, up_bias, down_bias)
    products, tensors = _layers(op, weights, biases, recipe)
    for w in weights[:-1]:
        check_input(x, w, op)
        if w.shape != up.shape or down.shape[1] != w.shape[0]:
            raise ValueError(
                f"{op}: up and gate must be [H, K] and down [N, H], got "
                f"{', '.join(str(tuple(w.shape)) for w in weights)}"
            )
    for used, name, tensor in (
        (norm, "norm_weight", norm_weight), (norm, "norm_bias", norm_bias),
        (norm, "residual", residual), (gate, "gate_bias", gate_bias),
    ):  # fmt: skip
        if used is None and tensor is not None:
            needed = "gate" if name == "gate_bias" else "norm"
            raise ValueError(f"{op}: {name} must be None without {needed}")
    kind = _norm(op, norm, eps)
    y, *total = run_fused(
        op, x, products, tensors, recipe, out_dtype or x.dtype, kind, norm_weight, norm_bias,
        residual, act,
    )  # fmt: skip
    return (y, total[0]) if total else y
