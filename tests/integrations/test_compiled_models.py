"""torch.compile of fused models of transformers runs the kernels that run in eager mode."""

from __future__ import annotations

from collections import Counter
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
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "own_gpt": [{}],
    "vit": [{}],
    "bert": [{}, {"attention_mask": ONES}],
    "gpt2": [{}, {"attention_mask": ONES}],
    "llama": [{}, {"attention_mask": ONES}, {"use_cache": False}, {"attention_mask": CAUSAL}],
}
# Those that are called as often. (Each product is a call of `gemm`, where an eager layer is one of
# linear_forward and linear_backward; rotary positions are a loop of Inductor.)
KERNELS = (
    *("attention", "norm_quantize", "act_quantize", "cross_entropy"),
    *("attention_backward", "norm_backward", "act_backward", "cross_entropy_backward"),
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


def _loss(options: dict[str, Any], run: Any) -> torch.Tensor:
    return run(input_ids=TOKENS, labels=TOKENS, **options).loss


def ran(kind: str, options: dict[str, Any], autocast: bool, compiled: bool) -> Any:
    """The loss, and how many calls there were of each kernel."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, loss = models.MODELS[kind]()
    mixprec.cast_parameters(mixprec.convert(model, "bf16", fuse=True), torch.bfloat16)
    if options:
        loss = partial(_loss, options)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(2):  # the second call may compile again, after a warning that is given once
        step(call, loss, autocast)
    with profile() as p:
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
            ran(kind, options, autocast, each) for each in (False, True)
        )
        assert eager["mixprec::attention"] == eager["mixprec::attention_backward"] == 2
        assert compiled == eager, [*options]
        assert abs(loss - other) < 0.02 * loss
