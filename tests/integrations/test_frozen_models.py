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
