"""Training steps of other people's models, 4 x 512, 1,024 tokens, against torch's ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from mixprec.env import machine

from .gpt import FP32, FP32_COMPILED, Make, Model, gpt, torchs, workload
from .registry import NotMeasured, Workload, case, example, times_faster

LAYERS, WIDTH, HEADS, BATCH, CONTEXT, VOCABULARY = 4, 512, 8, 4, 256, 512


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise NotMeasured("transformers is not installed (pip install transformers)") from None
    return transformers


def _text(model: nn.Module) -> Model:
    tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT))
    return model, lambda run: run(input_ids=tokens, labels=tokens).loss


def llama() -> Model:
    t = _transformers()
    size = {"hidden_size": WIDTH, "intermediate_size": 1408, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    return _text(t.LlamaForCausalLM(t.LlamaConfig(vocab_size=VOCABULARY, **size, **heads)))


def gpt2() -> Model:
    t, dropout = _transformers(), dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    return _text(t.GPT2LMHeadModel(t.GPT2Config(**size, **dropout)))


def _encoder() -> dict[str, Any]:
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    size = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH}
    return {"intermediate_size": 4 * WIDTH, **size, **dropout}


def bert() -> Model:
    t = _transformers()
    return _text(t.BertForMaskedLM(t.BertConfig(vocab_size=VOCABULARY, **_encoder())))


def vit() -> Model:
    """256 patches of 14 x 14, and the class token."""
    t = _transformers()
    config = t.ViTConfig(image_size=224, patch_size=14, num_labels=1000, **_encoder())
    images, labels = torch.randn(BATCH, 3, 224, 224), torch.randint(0, 1000, (BATCH,))
    return t.ViTForImageClassification(config), lambda run: run(images, labels=labels).loss


def own_gpt() -> Model:
    """The GPT of examples/ with norms of a class that nobody has described: what fuses is what its
    modules have of torch's."""
    model, loss = gpt("4x512")
    norm = example("gpt_model").Norm
    unknown = type("OwnNorm", (norm,), {})
    for module in model.modules():
        if type(module) is norm:
            module.__class__ = unknown
    return model, loss


def _workload(make: Make, recipe: str, autocast: bool, compiled: bool) -> Workload:
    """Against torch's autocast, eager and compiled, also with max-autotune, and FP32 where the
    processor multiplies bf16 no faster."""
    found = workload(make, recipe, fuse=True, compiled=compiled, autocast=autocast)
    autotuned = partial(torch.compile, mode="max-autotune")
    found.baselines["torch autocast, max-autotune"] = torchs(make, autocast=True, compile=autotuned)
    if machine()["isa"] == "avx512_bf16":
        for name in (FP32, FP32_COMPILED):
            del found.baselines[name]
    return found


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit, "own_gpt": own_gpt}
for _name, _make in MODELS.items():
    for _recipe, _times in (("bf16", 1.3), ("fp8", 1.25)):
        # Inside torch.autocast the activations between layers are bf16, as those of the baselines.
        for _how in ("", "-autocast", "-autocast-compiled"):
            case(
                f"training/{_name}/{_recipe}{_how}",
                f"training step of a {_name} of {LAYERS} blocks of width {WIDTH}, "
                f"{BATCH * CONTEXT} tokens, {_recipe}, fuse{_how.replace('-', ', ')}",
                times_faster(_times),
                partial(_workload, _make, _recipe, "autocast" in _how, "compiled" in _how),
            )
