"""Models of transformers after freeze, in every format."""

from __future__ import annotations

import copy

import pytest
import torch

import mixprec
from mixprec.frozen import FORMATS, FrozenLinear

transformers = pytest.importorskip(
    "transformers", reason="the package transformers is not installed"
)
TOKENS = torch.arange(16).view(2, 8)


@pytest.mark.parametrize("fmt", FORMATS)
def test_generation(fmt: str) -> None:
    """generate of a Llama after freeze, loaded into one made on the meta device"""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    want = model(TOKENS).logits
    frozen, _ = mixprec.freeze(copy.deepcopy(model), fmt)
    assert isinstance(frozen.model.layers[1].mlp.up_proj, FrozenLinear)
    assert mixprec.testing.sqnr(want, frozen(TOKENS).logits) > 14
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    generated = frozen.generate(TOKENS, **options)
    assert generated.shape == (2, 14)
    loaded, _ = mixprec.freeze(copy.deepcopy(model).to("meta"), fmt)
    buffers = {name: b for name, b in frozen.named_buffers() if "inv_freq" in name}
    loaded.load_state_dict(frozen.state_dict(), assign=True)
    for name, buffer in buffers.items():  # which a state dict has not
        owner, _, last = name.rpartition(".")
        setattr(loaded.get_submodule(owner), last, buffer)
    assert torch.equal(loaded.generate(TOKENS, **options), generated)


@pytest.mark.parametrize("fmt", ["int8", "fp8", "nvfp4", "mxfp4"])
def test_a_model_that_casts_to_the_dtype_of_a_weight(fmt: str) -> None:
    """T5 casts hidden states to the dtype of the weight, unless it is int8"""
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, vocab_size=128))
    model = model.bfloat16().eval()
    want = model(input_ids=TOKENS, decoder_input_ids=TOKENS).logits
    frozen, _ = mixprec.freeze(model, fmt)
    got = frozen(input_ids=TOKENS, decoder_input_ids=TOKENS).logits
    assert mixprec.testing.sqnr(want, got) > 14


# plan


SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MODELS = {
    "Llama": (SIZES, 2 * 7 + 1),
    "GPT2": (GPT2, 2 * 4 + 1),  # its layers are Conv1D, and its head has the embedding's weight
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_planned(name: str) -> None:
    settings, count = MODELS[name]
    torch.manual_seed(0)
    kind = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}[name]
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**settings))
    tokens = torch.randint(3, 96, (4, 2, 24))
    batches = [{"input_ids": t, "labels": t} for t in tokens]
    plan = mixprec.plan(model, batches, budget={"time": 0.5})
    assert len(plan.recipes) == count
    assert plan.left_out == {}
    assert all(len(row["harm"]) == 3 for row in plan.measured.values())
    exact = float(model(**batches[0]).loss)
    plan.apply(model)
    with mixprec.audit(model) as audit:
        loss = model(**batches[0]).loss
        loss.backward()
    assert abs(float(loss) - exact) < 0.1
    named = {op.module: op.decided for op in audit.ops if op.phase == "forward" and op.flops}
    for layer, recipe in plan.recipes.items():
        assert named[layer].split()[-1] == recipe
