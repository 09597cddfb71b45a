"""cast_parameters: the parameters of a model in 16 bits, but for those of its norms."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from fnmatch import fnmatchcase

import torch
from torch import nn

from .. import _masters, _said
from .._local_gradients import LOW_PRECISION, has_run, set_data, sharded_groups
from ..ops._dispatch import checks
from ._content import imported_class
from ._layer import Layer, buffers_of
from .known_casts import input_in_fp32, is_rotary, is_weighted_loss, known_casts
from .known_norms import as_input, known_norms

logger = logging.getLogger("mixprec")

NORMS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _vectors_only(model: nn.Module, kept: Collection[nn.Parameter]) -> str:
    """How many modules of which classes have parameters to cast, all of them vectors."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        params = [p for p in module.parameters(recurse=False) if p.dtype in _CASTABLE]
        if any(p not in kept for p in params) and all(p.dim() == 1 for p in params):
            counts[type(module).__name__] += 1
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def _matching(op: str, what: str, patterns: Collection[str], names: Collection[str]) -> set[str]:
    """The names that a pattern matches. ValueError for a pattern that matches none."""
    if isinstance(patterns, str):
        raise TypeError(f"{op}: {what} must be a list of patterns, got the string {patterns!r}")
    all_matched: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            listed = ", ".join(list(names)[:8]) or "none"
            raise ValueError(f"{op}: {what} has {pattern!r}, which matches none of {listed}, ...")
        all_matched |= matched
    return all_matched


def _stay_fp32(
    model: nn.Module, floats: dict[str, torch.Tensor], norms: tuple[type[nn.Module], ...]
) -> list[str]:
    """The names and shapes of FP32 buffers that may make activations FP32: not of classes that are
    known to leave these alone, and not without dimensions."""
    frozen, listed = imported_class("mixprec.frozen_linear", "FrozenLinear"), []
    for name, buffer in floats.items():
        parent, _, attribute = name.rpartition(".")
        module = model.get_submodule(parent)
        known = isinstance(module, norms) or type(module) is frozen
        known |= isinstance(module, Layer) and attribute in buffers_of(module.recipe)
        known |= is_rotary(module) or is_weighted_loss(module)
        if buffer.dtype not in LOW_PRECISION and buffer.dim() and not known:
            listed.append(f"{name} {list(buffer.shape)}")
    return listed


def _of_one_dtype(
    op: str, model: nn.Module, kept: set[nn.Parameter], named: Collection[nn.Parameter]
) -> None:
    """Take from `kept` what fully_shard gathers with parameters that are cast: it wants one dtype,
    as MixedPrecisionPolicy would make of them. ValueError for those in `named`."""
    together: list[str] = []
    for group in sharded_groups(model):
        if kept.isdisjoint(group.values()) or kept.issuperset(group.values()):
            continue
        for name, p in group.items():
            if p in named:
                raise ValueError(
                    f"{op}: keep_fp32 must not name parameters that fully_shard gathers with "
                    f"others of 16 bits, got {name}: call fully_shard on its module first, for a "
                    "group of its own"
                )
            if p in kept:
                kept.remove(p)
                together.append(name)
    if together:
        _said.say(
            f"{op}: {len(together)} parameters of norms, the first {together[0]}, are cast too, "
            "because fully_shard gathers them with others of 16 bits; their masters are FP32"
        )


def cast_parameters(
    model: nn.Module,
    dtype: torch.dtype | str,
    *,
    keep_fp32: Collection[str] = (),
    buffers: Collection[str] = (),
    keep_masters: bool = True,
) -> nn.Module:
    """Cast the floating-point parameters of `model` to `dtype`, in place; return the model.

    dtype: torch.bfloat16, torch.float16 or torch.float32, or a word for it: "bfloat16", "bf16",
    "float16", "fp16", "half", "float32", "fp32". The parameters of normalization layers become or
    stay FP32: they are few, and their updates are small next to their values. These are torch's
    (`NORMS`), those of transformers (`known_norms`, such as LlamaRMSNorm) and others with the same
    forward pass, and their subclasses; all but torch's own get a hook that returns 16 bits for
    16-bit input. Cast are the norms whose block casts its input to the dtype of their weight, such
    as MambaBlock (`known_casts`). Of norms that are not known, one INFO line on the logger
    "mixprec" lists the modules with nothing but vectors that were cast. keep_fp32: patterns of the
    names of further parameters to keep in FP32, such as ["*.router.weight", "*.my_norm.*"].
    Parameters keep their identity: optimizers, ties and requires_grad are unaffected; existing
    gradients are cast too. Back in FP32, a parameter has the values that were kept.

    buffers: patterns of the names of floating-point buffers to cast to `dtype`, such as
    ["*.attn_mask"]. The others are left as they are, because running statistics and the frequencies
    of rotary embeddings lose too much in 16 bits, but for those without which known classes fail
    (`known_casts`): of spectral norm and pruning, of adapters of peft, a few of transformers. (Not
    those that keep_fp32 matches.) What is computed from an FP32 buffer and 16-bit activations is
    FP32: where `convert` reports, a line names the buffers for which that may happen. Frozen batch
    norms of transformers and torchvision return the dtype of their input; torch's CrossEntropyLoss
    and NLLLoss with class weights compute in FP32.

    keep_masters: keep the FP32 values of parameters that require gradients, 4 bytes each, which
    optimizers of mixprec update as their masters, so that nothing is lost to rounding; of the
    others the 16 bits that BF16 lacks, if there are any (of FP16 the FP32 values). They belong to
    the parameter's place in the module: `to`, `float`, `copy.deepcopy`, pickling, DDP,
    `fully_shard` and another optimizer keep them, `load_state_dict` of FP32 values sets them, and
    `save_checkpoint` saves them. False frees them now, for inference or another optimizer.

    ValueError for another dtype, a pattern that matches nothing, or a model that fully_shard has
    wrapped and that has run, TypeError if `model` is not a module, before anything is changed.

    With FSDP2 cast after `fully_shard`, which wants one dtype for all that it gathers together:
    the norms in a block with 16-bit weights are then cast too, and have masters. (Without a cast,
    FSDP2 gathers FP32 parameters in 16 bits with MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    and its shards are the masters.) Norms that fully_shard wraps by themselves stay FP32.

    A norm with FP32 parameters takes 16-bit input and returns 16-bit output on the CPU (torch
    computes in FP32 inside). On CUDA, torch's layer_norm raises RuntimeError for this combination:
    run the model under torch.autocast there.
    """
    op = "cast_parameters"
    checks.is_module(op, model)
    dtype = checks.param_dtype(op, "dtype", dtype)
    if any(map(has_run, model.modules())):
        raise ValueError(
            f"{op}: model must not have run yet where fully_shard has wrapped it, which fixes the "
            "dtypes: cast after fully_shard and before the first forward pass"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    named = model.named_buffers(remove_duplicate=False)
    floats = {n: b for n, b in named if b.dtype in _CASTABLE}
    named_fp32 = {parameters[name] for name in _matching(op, "keep_fp32", keep_fp32, parameters)}
    kept = set(named_fp32)
    cast_too = _matching(op, "buffers", buffers, floats)
    further = known_norms(model)
    norms = (m for m in model.modules() if isinstance(m, (*NORMS, *further)))
    known, known_buffers = known_casts(model)
    kept.update(p for m in norms for p in m.parameters(recurse=False) if p not in known)
    if dtype in LOW_PRECISION:
        _of_one_dtype(op, model, kept, named_fp32)
    kept_too = (n for n in known_buffers for pattern in keep_fp32 if fnmatchcase(n, pattern))
    cast_too |= (known_buffers & floats.keys()).difference(kept_too)
    for module in model.modules():
        if isinstance(module, (*NORMS, *further)):
            # A weight in FP32 times x in 16 bits is FP32, which the next layer may not take. (Those
            # of torch return the dtype of x.)
            keeps = type(module) in NORMS or as_input in module._forward_hooks.values()
            if dtype in LOW_PRECISION and not keeps:
                module.register_forward_hook(as_input, with_kwargs=True)
        elif is_weighted_loss(module) and input_in_fp32 not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(input_in_fp32, with_kwargs=True)
    if dtype in LOW_PRECISION and (cast := _vectors_only(model, kept | known)):
        logger.info(
            "%s: modules with nothing but vectors are cast to %s: %s; norms that are not known "
            "can stay in FP32 by keep_fp32=",
            *(op, str(dtype).removeprefix("torch."), cast),
        )
    places: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                places.setdefault(p, []).append((module, name))
    _masters.attach()
    _masters.models.add(model)
    for param in model.parameters():
        target = torch.float32 if param in kept else dtype
        is_done = param.dtype == target and target in LOW_PRECISION
        has_master = bool(_masters.known(param))
        if is_done and has_master and not keep_masters:
            _masters.forget(param)
            has_master = False
        is_done |= param.dtype == target and not has_master  # else float() has left it rounded
        if is_done or param.dtype not in _CASTABLE:
            if keep_masters and is_done and dtype in LOW_PRECISION:
                _masters.follow(param, places[param])  # also of FP32, which `to` may cast later
            continue
        grad, param.grad = param.grad, None  # a gradient of another dtype cannot be attached
        exact = _masters.values_of(param) if has_master else param.data
        set_data(param, exact.to(target))
        if keep_masters and target in LOW_PRECISION:
            _masters.keep(param, exact, places[param])
        elif has_master:
            _masters.forget(param)
        if grad is not None:
            param.grad = grad.to(target)
    for name in cast_too:
        floats[name].data = floats[name].data.to(dtype)  # wherever else it is a buffer
    if dtype in LOW_PRECISION and (stay := _stay_fp32(model, floats, (*NORMS, *further))):
        others = f" and {len(stay) - 4} more" if len(stay) > 4 else ""
        _said.say(
            f"{op}: buffers that stay in FP32: {', '.join(stay[:4])}{others}; activations that "
            "meet them become FP32 unless the model casts these; buffers= casts the buffers"
        )
    return model
