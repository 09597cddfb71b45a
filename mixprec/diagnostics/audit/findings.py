"""What is wrong with the precisions of a step, in sentences."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...nn._layer import Layer
from . import casts, step_findings
from .op import FORWARD, SHORT, Op, bits, joined

if TYPE_CHECKING:
    from .recorder import Recorder
    from .report import Audit

# Of the FLOPs of a step: what is less has nothing to lose.
_WORTH_SAYING = 0.005
_NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"}
_LOSSES = {"_log_softmax", "nll_loss_forward", "mse_loss", "logsumexp", "cross_entropy"}


def collect(audit: Audit, model: nn.Module, scaler: Any, recorder: Recorder) -> list[str]:
    """The worst first: what makes results wrong, what loses precision, what wastes time."""
    found: list[str] = []
    found += step_findings.of_scaler(audit, scaler, recorder)
    found += _sums_in_16_bits(audit, model)
    found += _summed_gradients(model, recorder)
    found += step_findings.lost_updates(recorder)
    found += _regions(audit, recorder)
    found += _wide_products(audit, model, recorder)
    found += _frozen(audit, model)
    found += _casts_back(recorder)
    return found


def notes(model: nn.Module, recorder: Recorder) -> list[str]:
    """What is not seen of this model."""
    found = []
    if recorder.has_compiled:
        found.append(
            "What torch.compile compiles ran uncompiled in the audit: rounding in the compiled "
            "code can differ."
        )
    if recorder.has_compiled_backward:
        found.append(
            "Code compiled before the block ran a backward pass in it: only what it calls of torch "
            "was seen, and nothing of who decided."
        )
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        found.append("TorchScript has no frames: its ops are those of the module that called it.")
    return found


def _sums_in_16_bits(audit: Audit, model: nn.Module) -> list[str]:
    """Losses in 16 bits, softmax in fp16, and norms whose weight is in fp16: under autocast on a
    CPU, the input of a norm with FP32 weights is fp16 too, which is no fault of the program."""
    losses: dict[tuple[str, str], list[str]] = defaultdict(list)
    softmax: list[str] = []
    norms: list[str] = []
    for op in audit.ops:
        if op.kind != "reduction" or op.phase != FORWARD:
            continue
        if op.op in _LOSSES and op.precision in ("bf16", "fp16"):
            losses[op.where, op.precision].append(op.op.strip("_"))
        elif op.op == "_softmax" and op.precision == "fp16":
            softmax.append(op.where)
        elif op.op in _NORMS and op.precision == "fp16" and op.module is not None:
            weight = getattr(model.get_submodule(op.module), "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dtype == torch.float16:
                norms.append(op.where)
    return [
        *(f"{where}: the loss is computed in {precision} ({joined(names)})"
          for (where, precision), names in losses.items()),
        *([f"softmax runs in fp16: {joined(softmax, 3)}"] if softmax else []),
        *([f"norms run in fp16, with their weights: {joined(norms, 3)}"] if norms else []),
    ]  # fmt: skip


def _summed_gradients(model: nn.Module, recorder: Recorder) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for p, (dtype, times) in recorder.summed.items():
        if dtype in ("bfloat16", "float16"):
            found[SHORT.get(dtype, dtype), times + 1].append(names.get(id(p), "another parameter"))
    return [
        f"gradients are summed in {dtype} over {times} backward passes, of "
        f"{joined(reversed(params), 3)}: give the optimizer grad_dtype=torch.float32"
        for (dtype, times), params in found.items()
    ] + [
        f"{where}: {times} products are summed in {SHORT[dtype]}, in a tensor of the shape of a "
        f"weight, {list(shape)}: sum the chunks of a gradient in FP32"
        for (where, dtype, shape), times in recorder.sums.items()
    ]


def _regions(audit: Audit, recorder: Recorder) -> list[str]:
    """Regions in which no layer can use the recipe. Where some can, the others are left out."""
    if not recorder.regions or any(op.decided.startswith(casts.OURS) for op in audit.ops):
        return []
    return [
        f"mixprec.autocast {joined(sorted(recorder.regions))} is on, and no product uses it: only "
        "layers of mixprec.convert do"
    ]


def _wide_products(audit: Audit, model: nn.Module, recorder: Recorder) -> list[str]:
    """Layers that compute in more bits than others of the step."""
    found = []
    if recorder.autocast_on and recorder.devices and not recorder.autocast_on & recorder.devices:
        on, there = (joined(sorted(kinds)) for kinds in (recorder.autocast_on, recorder.devices))
        found.append(f"torch.autocast is on for {on}, and the products run on {there}")
    total = sum(audit.flops.values())
    in_recipes = [op for op in audit.ops if op.flops and op.decided.startswith(casts.OURS)]
    has_recipes = bool(in_recipes)
    # Of what convert has reached, however little: the less it is, the more is left out.
    low = {name for name, flops in audit.flops.items() if flops > total / 20}
    least = min(map(bits, low | {op.precision for op in in_recipes}), default=32)
    layers: dict[str, list[Op]] = defaultdict(list)
    others: dict[tuple[str, str, str], list[Op]] = defaultdict(list)
    for op in audit.ops:
        if op.flops and bits(op.precision) > least:
            layer = None if op.module is None else model.get_submodule(op.module)
            # Beside recipes, attention is in the dtype of its input, and no layer is at fault.
            is_found = layer is not None and (
                op.decided == casts.CAST if _is_attention(op, layer) else _has_weights(layer)
            )
            if is_found and op.module is not None:
                layers[op.module].append(op)
            elif op.weight and not op.decided.startswith(casts.OURS):
                others[op.where, op.weight, op.precision].append(op)
    for (where, weight, precision), ops in others.items():
        if (flops := sum(op.flops for op in ops)) >= _WORTH_SAYING * total:
            reason = f"decided by: {ops[0].decided}"
            if has_recipes and ops[0].decided != casts.CAST:
                reason = (
                    "which mixprec.convert does not reach: call an nn.Linear with this weight, or "
                    "mixprec.functional.linear"
                )
            found.append(
                f"{where}: {precision} in the product with {weight}, {reason}; {flops / total:.1%} "
                "of the FLOPs"
            )
    groups: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
    for name, ops in layers.items():
        layer = model.get_submodule(name)
        if ops[0].decided.startswith(casts.OURS):
            continue
        if ops[0].decided == casts.CAST:
            reason = "to which the program casts its operands"
        elif has_recipes and not isinstance(layer, Layer):
            reason = "because mixprec.convert has left it out"
        else:
            reason = f"decided by: {ops[0].decided}"
        group = groups[type(layer).__name__, ops[0].precision, reason]
        group[name or type(model).__name__] = sum(op.flops for op in ops)
    for (kind, precision, reason), names in groups.items():
        if (flops := sum(names.values())) >= _WORTH_SAYING * total:
            found.append(
                f"{joined(names, 3)} ({kind}): {precision}, {reason}; {flops / total:.1%} of the "
                "FLOPs"
            )
    return found


def _has_weights(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters(recurse=False))


def _is_attention(op: Op, layer: nn.Module) -> bool:
    """Where torch has no kernel for it, attention is two products of stacked matrices."""
    is_parts = isinstance(layer, nn.MultiheadAttention) and op.op in ("bmm", "baddbmm")
    return op.kind == "attention" or is_parts


def _frozen(audit: Audit, model: nn.Module) -> list[str]:
    """Layers that cast a frozen weight in each pass."""
    run = {op.module for op in audit.ops}
    found: dict[str, list[str]] = defaultdict(list)
    for name, layer in model.named_modules():
        if name not in run or not isinstance(layer, Layer):
            continue
        weight = layer._parameters.get("weight")  # not of a parametrization, which computes it
        if weight is None or weight.requires_grad:
            continue
        if layer.recipe.is_scaled:
            found[layer.recipe.name].append(name or type(model).__name__)
    return [
        f"{joined(names, 3)}: a frozen weight is cast to {recipe} in each pass: mixprec.freeze "
        "casts it once"
        for recipe, names in found.items()
    ]


def _casts_back(recorder: Recorder) -> list[str]:
    return [
        f"{where}: a tensor is cast from {SHORT.get(wide, wide)} to "
        f"{SHORT.get(narrow, narrow)} and back at once, {times}x"
        for (where, wide, narrow), times in recorder.cast_back.items()
    ]
