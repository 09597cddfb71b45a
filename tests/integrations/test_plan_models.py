"""plan of models of transformers."""

from __future__ import annotations

import pytest
import torch

import mixprec

transformers = pytest.importorskip("transformers")
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
