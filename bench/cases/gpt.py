"""Training steps of the GPT of examples/ by every recipe, against torch's four ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import mixprec

from .. import verify
from .registry import Workload, case, example, times_faster, times_faster_than, times_the_time

BATCH = 4
SIZES = {"4x512": (4, 512, 256), "3x256": (3, 256, 128)}  # layers, width, context
FP32, FP32_COMPILED = "torch fp32", "torch fp32, compiled"
Step = Callable[[], float]
# A model, and the loss of one batch by something that is called like it.
Model = tuple[torch.nn.Module, Callable[[Any], torch.Tensor]]
Make = Callable[[], Model]


def layer_norm(m: Any) -> mixprec.nn.NormSpec:
    """Of a user's own class with the attributes of torch's."""
    return mixprec.nn.NormSpec(m.normalized_shape[0], m.eps, m.weight, m.bias, subtract_mean=True)


def rotate(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> tuple[torch.Tensor, ...]:
    """mixprec.functional.rotary_qkv in torch; q, k and v are FP32 on a CPU, where torch's attention
    in 16 bits is slower."""
    q, k, v = (x.transpose(1, 2) for x in qkv.float().unflatten(2, (3, heads, -1)).unbind(2))
    core = torch.float32 if qkv.device.type == "cpu" else qkv.dtype

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(core)

    return turned(q), turned(k), v.to(core)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_torch(model: torch.nn.Module) -> torch.nn.Module:
    """The examples' GPT with functions of torch alone."""
    for module in model.modules():
        if hasattr(module, "rotate"):
            module.rotate, module.attend = rotate, attend
    return model


def gpt(size: str) -> Model:
    layers, width, context = SIZES[size]
    examples = example("gpt_model")
    mixprec.nn.register_fusion(examples.Norm, layer_norm)
    model = examples.GPT(examples.GPTConfig(layers, width, width // 64, context))
    text = torch.randint(0, 256, (BATCH, context + 1))
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return model, lambda run: run(inputs, targets)


def _step(
    forward: Callable[[], torch.Tensor], model: torch.nn.Module, optimizer: Any, scaler: Any = None
) -> Step:
    """zero_grad, forward, backward, clip to norm 1, update."""

    def step() -> float:
        optimizer.zero_grad()
        loss = forward()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.item()
        loss.backward()
        if isinstance(optimizer, torch.optim.AdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def torchs(make: Make, *, autocast: bool = False, compile: Any = None) -> Step:
    """compile: torch.compile with its settings, or None."""
    torch.manual_seed(0)
    model, loss = make()
    in_torch(model)
    run = model if compile is None else compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return _step(_forward(loss, run, autocast), model, optimizer)


def _forward(loss: Callable[[Any], torch.Tensor], run: Any, autocast: bool) -> Any:
    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(run)

    return forward


def ours(
    make: Make,
    recipe: str,
    *,
    fuse: bool = False,
    compiled: bool = False,
    autocast: bool = False,
    params: torch.dtype = torch.float32,
    saved: str | None = None,
) -> Step:
    torch.manual_seed(0)
    model, loss = make()
    mixprec.convert(mixprec.cast_parameters(model, params), recipe, fuse=fuse, saved=saved)
    run = torch.compile(model) if compiled else model
    scaler = mixprec.GradScaler("cpu") if recipe == "fp16" else None
    optimizer = mixprec.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    return _step(_forward(loss, run, autocast), model, optimizer, scaler)


def check(ours: Callable[[], Step], theirs: Callable[[], Step], share: float) -> str | None:
    """Four steps of both end within this share of the first loss of each other, and ours falls."""
    got, expected = ([step() for _ in range(4)] for step in (ours(), theirs()))
    if not got[-1] < got[0]:
        return f"the loss does not fall: {got[0]:.4f}, then {got[-1]:.4f}"
    ends = torch.tensor(got[-1:]), torch.tensor(expected[-1:])
    return verify.close("loss", [ends[0]], [ends[1]], rtol=0.0, atol=share * expected[0])


def workload(
    make: Make, recipe: str, fuse: bool, compiled: bool, autocast: bool = False
) -> Workload:
    ways: dict[str, tuple[bool, Any]] = {FP32: (False, None), FP32_COMPILED: (False, torch.compile)}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # else torch's bf16 takes ten times as long
        ways["torch autocast"] = True, None
        ways["torch autocast, compiled"] = True, torch.compile
    baselines = {name: torchs(make, autocast=a, compile=c) for name, (a, c) in ways.items()}
    step = partial(ours, make, recipe, fuse=fuse, autocast=autocast)
    same = partial(check, step, partial(torchs, make), 0.03)
    return Workload(step(compiled=compiled), baselines, same)


_FP16 = times_faster_than(FP32_COMPILED, 1.05)
_WAYS = ("bf16", "bf16-fuse", "bf16-compiled", "fp8-fuse", "fp8-compiled", "fp8-block-fuse")
for _size, _bars in (("4x512", (1.2, 1.33, 1.15, 1.25)), ("3x256", (1.2, 1.5, 1.15, 1.35))):
    _layers, _width, _context = SIZES[_size]
    _targets = [None, *map(times_faster, _bars), times_faster(1.0), _FP16]
    for _name, _target in zip((*_WAYS, "fp16-fuse"), _targets, strict=True):
        _recipe = _name.removesuffix("-fuse").removesuffix("-compiled")
        _how = ", fuse" * (_name != "bf16") + ", compiled" * _name.endswith("-compiled")
        case(
            f"training/gpt/{_size}/{_name}",
            f"training step of the GPT of {_layers} blocks of width {_width}, "
            f"{BATCH * _context} tokens, {_recipe}{_how}",
            _target,
            partial(workload, partial(gpt, _size), _recipe, "fuse" in _how, "compiled" in _how),
        )


def _saved(saved: str) -> Workload:
    as_saved = partial(ours, partial(gpt, "4x512"), "bf16", params=torch.bfloat16)
    step = partial(as_saved, saved=saved)
    return Workload(step(), {"as saved": as_saved()}, partial(check, step, as_saved, 0.01))


for _name in ("int8", "int4"):
    case(
        f"training/saved/{_name}",
        f"training step of 4 blocks, width 512, 1,024 tokens, bf16, compress_saved {_name}",
        times_the_time(1.08),
        partial(_saved, _name),
    )
