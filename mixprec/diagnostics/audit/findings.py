"""What is wrong with the precisions of a step and with its numbers, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...nn._layer import Layer
from ..writers import SHORT, joined
from . import provenance
from .records import (
    BARS,
    FORWARD,
    PRODUCTS,
    SUSPECT,
    WORDS,
    Lost,
    Op,
    bits,
    flops_by,
    product_name,
    unexplained,
)
from .trace import Recorder

# Of the FLOPs of a step: what is less has nothing to lose.
_WORTH_SAYING = 0.005
_NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"}
_LOSSES = {"_log_softmax", "nll_loss_forward", "mse_loss", "logsumexp", "cross_entropy"}
_UNDERFLOW, _OVERFLOW = 0.1, 1e-3  # shares of elements that are worth a sentence


def collect(ops: list[Op], model: nn.Module, scaler: Any, recorder: Recorder) -> list[str]:
    """The worst first: what makes results wrong, what loses precision, what wastes time."""
    return [
        *_of_scaler(ops, scaler, recorder),
        *_sums_in_16_bits(ops, model),
        *_summed_gradients(model, recorder),
        *_lost_updates(recorder),
        *_regions(ops, recorder),
        *_wide_products(ops, model, recorder),
        *_frozen(ops, model),
        *_casts_back(recorder),
    ]


def notes(model: nn.Module, recorder: Recorder) -> list[str]:
    """What is not seen of this model."""
    has_script = any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
    sentences = {
        "What torch.compile compiles ran uncompiled in the audit: rounding in the compiled code "
        "can differ.": recorder.has_compiled,
        "Code compiled before the block ran a backward pass in it: only what it calls of torch was "
        "seen, and not what set its dtypes.": recorder.has_compiled_backward,
        "TorchScript has no frames: its ops are those of the module that called it.": has_script,
        "max_pool1d of what needs no gradient has other strides in an audit: a dropout behind it "
        "draws its mask in another order.": recorder.calls.pools,
    }
    return [sentence for sentence, is_so in sentences.items() if is_so]


def _of_scaler(ops: list[Op], scaler: Any, recorder: Recorder) -> list[str]:
    """Of torch.amp.GradScaler or ours, if the block was given one."""
    has_fp16 = any("fp16" in op.precision for op in ops)
    if scaler is None:
        is_step = recorder.steps and recorder.has_backward and has_fp16
        said = "fp16 gradients are not scaled, or audit was not given the scaler"
        return [said] if is_step else []
    if not scaler.is_enabled():
        return ["GradScaler is disabled: fp16 gradients are not scaled"] if has_fp16 else []
    findings = []
    called = [*recorder.owners.called]
    if recorder.has_backward and not {"scale", "get_scale"}.intersection(called):
        findings.append(
            "scaler.scale(loss) was not called before backward(): gradients are not scaled"
        )
    elif recorder.steps and "step" not in called:
        findings.append("optimizer.step() ran in place of scaler.step(), which skips Inf and NaN")
    elif "step" in called and recorder.skips_all:
        findings.append(
            "GradScaler has skipped every step: gradients are Inf or NaN (as is usual in the first "
            "steps, until the scale has fallen)"
        )
    # step() unscales what is not yet unscaled, which is too late for the limit of a norm. Gradients
    # of a loss that was not scaled, and those that the program divides itself, may be clipped.
    before = called[: called.index("clip")] if "clip" in called else []
    if "scale" in before and not {"unscale_", "get_scale"}.intersection(before):
        findings.append(
            "gradients were clipped before scaler.unscale_(optimizer): the limit is compared with "
            "a norm that has the loss scale in it"
        )
    # torch raises in the next step; ours goes on.
    if "step" in called and "update" not in called:
        findings.append("scaler.step() was called, and scaler.update() was not: the scale stays")
    if not has_fp16 and recorder.has_backward:
        findings.append("GradScaler scales the loss, and no op computes in fp16: it is not needed")
    if "scale" in called and (scale := float(scaler.get_scale())) < 1:
        findings.append(f"the loss scale has fallen to {scale:g}: gradients overflow, or are NaN")
    return findings


def _sums_in_16_bits(every: list[Op], model: nn.Module) -> list[str]:
    """Losses in 16 bits, softmax in fp16, and norms whose weight is in fp16: under autocast on a
    CPU, the input of a norm with FP32 weights is fp16 too, which is no fault of the program."""
    losses: dict[tuple[str, str], list[str]] = defaultdict(list)
    softmax: list[str] = []
    norms: list[str] = []
    for op in every:
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
    params: dict[tuple[str, int], list[str]] = defaultdict(list)
    for p, (dtype, times) in recorder.gradients.summed.items():
        if dtype in ("bfloat16", "float16"):
            params[SHORT.get(dtype, dtype), times + 1].append(names.get(id(p), "another parameter"))
    return [
        f"gradients are summed in {dtype} over {times} backward passes, of "
        f"{joined(reversed(group), 3)}: give the optimizer grad_dtype=torch.float32"
        for (dtype, times), group in params.items()
    ] + [
        f"{where}: {times} products are summed in {SHORT[dtype]}, in a tensor of the shape of a "
        f"weight, {list(shape)}: sum the chunks of a gradient in FP32"
        for (where, dtype, shape), times in recorder.sums.items()
    ]


def _lost_updates(recorder: Recorder) -> list[str]:
    """As measured: with a large learning rate none is lost. Of more than half of the elements: a
    few have a gradient near 0 in any step."""
    updates = recorder.updates
    if updates is None or (lost := updates.lost()) <= 0.5:
        return []
    return [
        f"{lost:.0%} of the {SHORT[updates.dtype]} weights with a gradient did not change in "
        "optimizer.step(): the update is lost to rounding, which FP32 masters would keep"
    ]


def _regions(every: list[Op], recorder: Recorder) -> list[str]:
    """Regions in which no layer can use the recipe. Where some can, the others are left out."""
    regions = recorder.owners.regions
    if not regions or any(op.decided.startswith(provenance.OURS) for op in every):
        return []
    return [
        f"mixprec.autocast {joined(sorted(regions))} is on, and no product uses it: only "
        "layers of mixprec.convert do"
    ]


def _wide_products(every: list[Op], model: nn.Module, recorder: Recorder) -> list[str]:
    """Layers that compute in more bits than others of the step."""
    findings = []
    kinds = recorder.calls.autocast_on, recorder.devices
    if all(kinds) and kinds[0].isdisjoint(kinds[1]):
        on, there = (joined(sorted(some)) for some in kinds)
        findings.append(f"torch.autocast is on for {on}, and the products run on {there}")
    shares = flops_by(lambda op: op.precision, every)
    total = sum(shares.values())
    in_recipes = [op for op in every if op.flops and op.decided.startswith(provenance.OURS)]
    has_recipes = bool(in_recipes)
    # Of what convert has reached, however little: the less it is, the more is left out.
    low = {name for name, flops in shares.items() if flops > total / 20}
    least = min(map(bits, low | {op.precision for op in in_recipes}), default=32)
    layers: dict[str, list[Op]] = defaultdict(list)
    others: dict[tuple[str, str, str], list[Op]] = defaultdict(list)
    for op in every:
        if op.flops and bits(op.precision) > least:
            layer = None if op.module is None else model.get_submodule(op.module)
            # Beside recipes, attention is in the dtype of its input, and no layer is at fault.
            if layer is None:
                is_at_fault = False
            elif _is_attention(op, layer):
                is_at_fault = op.decided == provenance.CAST
            else:
                is_at_fault = any(True for _ in layer.parameters(recurse=False))
            if is_at_fault:
                layers[op.module or ""].append(op)
            elif op.weight and not op.decided.startswith(provenance.OURS):
                others[op.where, op.weight, op.precision].append(op)
    for (where, weight, precision), ops in others.items():
        if (flops := sum(op.flops for op in ops)) >= _WORTH_SAYING * total:
            reason = f"set by: {ops[0].decided}"
            if has_recipes and ops[0].decided != provenance.CAST:
                reason = (
                    "which mixprec.convert does not reach: call an nn.Linear with this weight, or "
                    "mixprec.functional.linear"
                )
            findings.append(
                f"{where}: {precision} in the product with {weight}, {reason}; {flops / total:.1%} "
                "of the FLOPs"
            )
    groups: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
    for name, ops in layers.items():
        layer = model.get_submodule(name)
        if ops[0].decided.startswith(provenance.OURS):
            continue
        if ops[0].decided == provenance.CAST:
            reason = "to which the program casts its operands"
        elif has_recipes and not isinstance(layer, Layer):
            reason = "because mixprec.convert has left it out"
        else:
            reason = f"set by: {ops[0].decided}"
        group = groups[type(layer).__name__, ops[0].precision, reason]
        group[name or type(model).__name__] = sum(op.flops for op in ops)
    for (kind, precision, reason), names in groups.items():
        if (flops := sum(names.values())) >= _WORTH_SAYING * total:
            findings.append(
                f"{joined(names, 3)} ({kind}): {precision}, {reason}; {flops / total:.1%} of the "
                "FLOPs"
            )
    return findings


def _is_attention(op: Op, layer: nn.Module) -> bool:
    """Where torch has no kernel for it, attention is two products of stacked matrices."""
    is_parts = isinstance(layer, nn.MultiheadAttention) and op.op in ("bmm", "baddbmm")
    return op.kind == "attention" or is_parts


def _frozen(every: list[Op], model: nn.Module) -> list[str]:
    """Layers that cast a frozen weight in each pass."""
    run = {op.module for op in every}
    layers: dict[str, list[str]] = defaultdict(list)
    for name, layer in model.named_modules():
        if name not in run or not isinstance(layer, Layer):
            continue
        weight = layer._parameters.get("weight")  # not of a parametrization, which computes it
        if weight is None or weight.requires_grad:
            continue
        if layer.recipe.is_scaled:
            layers[layer.recipe.name].append(name or type(model).__name__)
    return [
        f"{joined(names, 3)}: a frozen weight is cast to {recipe} in each pass: mixprec.freeze "
        "casts it once"
        for recipe, names in layers.items()
    ]


def _casts_back(recorder: Recorder) -> list[str]:
    return [
        f"{where}: a tensor is cast from {SHORT.get(wide, wide)} to "
        f"{SHORT.get(narrow, narrow)} and back at once, {times}x"
        for (where, wide, narrow), times in recorder.cast_back.items()
    ]


def of_losses(ops: Iterable[Op]) -> list[str]:
    """The worst first."""
    every = [(op, *item) for op in ops if op.kind in PRODUCTS for item in op.lost.items()]
    return [*_beyond(every), *_cut(every, "overflow", _OVERFLOW), *_below_bar(every),
            *_cut(every, "underflow", _UNDERFLOW)]  # fmt: skip


def _beyond(ops: list[tuple[Op, str, Lost]]) -> list[str]:
    factors: dict[str, float] = {}
    for op, name, lost in ops:
        said = f"{op.where}, {product_name(op, name)}"
        factors[unexplained(said, lost.beyond)] = lost.beyond
        for role, operand in lost.operands.items():
            said = f"{op.where}: the cast of its {WORDS[role]}s to {op.precision}"
            if not operand.infinite:  # that has a sentence with their share
                factors[unexplained(said, operand.beyond, "the format")] = operand.beyond
    return sorted(filter(None, factors), key=lambda sentence: -factors[sentence])


def _cut(ops: list[tuple[Op, str, Lost]], what: str, least: float) -> list[str]:
    """Elements that become 0, or Inf or the largest value."""
    shares: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for op, _, lost in ops:
        for role, operand in lost.operands.items():
            share = getattr(operand, what) / max(operand.elements, 1)
            if share >= least or (what == "overflow" and operand.infinite):
                group = shares[role, op.precision]
                group[op.where] = max(group.get(op.where, 0.0), share)
    findings = []
    for (role, precision), names in shares.items():
        ranked = sorted(names, key=lambda name: -names[name])
        most = 100 * max(names.values())
        share = f"{most:.1f}%" if most >= 0.1 else f"{most:.2g}%"
        findings.append(f"{joined(ranked, 3)}: {share} of the {WORDS[role]}s {what} in {precision}")
    return findings


def _below_bar(ops: list[tuple[Op, str, Lost]]) -> list[str]:
    groups: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for op, name, lost in ops:
        bar, own = BARS.get(name), lost.own
        if bar is not None and own is not None and lost.beyond <= SUSPECT and own < bar:
            groups[name, op.precision][op.where] = own
    return [
        f"{joined(sorted(names, key=lambda n: names[n]), 3)}: {name} in {precision} has an SQNR "
        f"of {min(names.values()):.1f} dB, below {BARS[name]:g}"
        for (name, precision), names in groups.items()
    ]
