"""torch.compile of fused models of transformers, or of their blocks, runs the kernels that run in
eager mode."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import profile

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mixprec  # noqa: E402
from mixprec.bench.cases import gpt, models  # noqa: E402

pytestmark = pytest.mark.slow
BATCH, CONTEXT = 2, 48
TOKENS = torch.randint(3, 64, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(TOKENS)
CAUSAL = torch.ones(BATCH, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril()
ALONE = ("gpt", "own_gpt", "mistral", "qwen2", "gemma")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    **{kind: [{}] for kind in ALONE},
    "vit": [{}],
    "bert": [{}, {"attention_mask": ONES}],
    "gpt2": [{}, {"attention_mask": ONES}],
    "llama": [{}, {"attention_mask": ONES}, {"use_cache": False}, {"attention_mask": CAUSAL}],
}
# Those that are called as often. (Rotary positions are a loop of Inductor.)
KERNELS = (
    *("attention", "norm_quantize", "act_quantize", "cross_entropy", "gemm", "gemm_accumulate_"),
    *("attention_backward", "norm_backward", "act_backward", "cross_entropy_backward"),
    *("quantize", "amax", "dequantize", "grad_stats_", "linear_forward", "linear_backward"),
)
TORCHS = (
    *("_scaled_dot_product_flash_attention_for_cpu", "_softmax", "mm", "addmm", "bmm"),
    *("native_layer_norm", "gelu", "convolution", "_log_softmax", "embedding"),
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the benchmark, with two layers of width 64."""
    sizes = {"LAYERS": 2, "WIDTH": 64, "HEADS": 4, "VOCABULARY": 64}
    for name, value in (sizes | {"BATCH": BATCH, "CONTEXT": CONTEXT}).items():
        monkeypatch.setattr(models, name, value)
    monkeypatch.setitem(gpt.SIZES, "4x512", (2, 64, CONTEXT))
    monkeypatch.setattr(gpt, "BATCH", BATCH)


def step(call: Any, loss: Any, autocast: bool) -> float:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(call)
    value.backward()
    return value.item()


def _decoder(kind: str, **more: Any) -> Any:
    model = getattr(transformers, f"{kind}ForCausalLM")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 64}
    config = model.config_class(**sizes, **layers, pad_token_id=0, **more)
    return model(config), partial(_loss, {})


MODELS = models.MODELS | {
    "gpt": lambda: gpt.gpt("4x512"),
    "mistral": partial(_decoder, "Mistral"),
    "qwen2": partial(_decoder, "Qwen2"),
    "gemma": partial(_decoder, "Gemma", head_dim=16),
}


def _loss(options: dict[str, Any], run: Any) -> torch.Tensor:
    return run(input_ids=TOKENS, labels=TOKENS, **options).loss


def ran(kind: str, options: dict[str, Any], autocast: bool, how: str, recipe: str = "bf16") -> Any:
    """The loss, and how many calls there were of each kernel, op by op. how: "eager", "compiled" or
    "blocks", which are compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, loss = MODELS[kind]()
    mixprec.cast_parameters(mixprec.convert(model, recipe, fuse=True), torch.bfloat16)
    if options:
        loss = partial(_loss, options)
    call = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    if how == "blocks":
        blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        for block in blocks:
            block.compile(backend="aot_eager")
    for _ in range(2):  # the second call may compile again, after a warning that is given once
        step(call, loss, autocast)
    with profile() as p, mixprec.use_backend("cpp") if how == "eager" else nullcontext():
        value = step(call, loss, autocast)
    counts = Counter(event.name for event in p.events())
    wanted = (*(f"mixprec::{k}" for k in KERNELS), *(f"aten::{k}" for k in TORCHS))
    return value, {name: counts[name] for name in wanted}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_compiled_models_run_the_kernels_of_eager_ones(kind: str, autocast: bool) -> None:
    """Kernels of compiled models, by what they are called with."""
    for options in OPTIONS[kind]:
        (loss, eager), (other, compiled) = (
            ran(kind, options, autocast, how) for how in ("eager", "compiled")
        )
        assert eager["mixprec::attention"] == eager["mixprec::attention_backward"] == 2
        assert compiled == eager, [*options]
        assert abs(loss - other) < 0.02 * loss


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "bert", "gpt"])
def test_compiled_blocks_run_the_kernels_of_eager_ones(kind: str, recipe: str) -> None:
    """What lies outside of the blocks, the head for one, is eager: its passes are one call each."""
    (loss, eager), (other, blocks) = (
        ran(kind, {}, False, how, recipe) for how in ("eager", "blocks")
    )
    for counts in (eager, blocks):
        for name in ("gemm", "quantize", "linear_forward", "linear_backward"):
            counts.pop(f"mixprec::{name}")
    assert blocks == eager
    assert abs(loss - other) < 0.02 * loss
