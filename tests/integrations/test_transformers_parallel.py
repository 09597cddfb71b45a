"""Models that transformers has split over two ranks: the losses of one process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from transformers.distributed import DistributedConfig

import mixprec

VOCAB, STEPS = 96, 10
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Of each family, what its config needs beside the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},  # norms of heads, whose gradients transformers sums
    "mistral": {},
    "gemma": {"head_dim": 8},  # a head that is the embedding
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "phi": {},  # biases
    "granite": {},
    "gpt_neox": {},  # a sharded embedding
    "cohere": {},
    "olmo2": {},  # outputs that are gathered, and inputs that are split
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8},
    "deepseek_v3": {
        **EXPERTS,
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
        **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
        **{"v_head_dim": 8, "num_key_value_heads": 4},
    },
}


def make_model(family: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family]}, **options)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def split(folder: Path) -> torch.nn.Module:
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config
    ).train()


def losses(model: torch.nn.Module, steps: int = STEPS) -> list[float]:
    """Of each step, and of one forward pass without grad mode."""
    optimizer = mixprec.optim.AdamW(model.parameters(), 1e-3, max_grad_norm=1.0)
    group = dist.group.WORLD if dist.is_initialized() else None
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        tokens = torch.randint(3, VOCAB, (2, 12), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        mixprec.update_scales(model, process_group=group)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    with torch.no_grad():
        return [*found, model(input_ids=tokens, labels=tokens).loss.item()]


def trained(
    folder: Path, cases: list[tuple[str, Any, bool]], steps: int = STEPS
) -> list[list[float]]:
    return [
        losses(mixprec.convert(split(folder / family), recipe, fuse=fuse), steps)
        for family, recipe, fuse in cases
    ]


RECIPES = "bf16", "fp8", "fp8-delayed", "mxfp8"
CASES = {
    "llama": [("llama", recipe, False) for recipe in RECIPES],
    "mixtral": [("mixtral", recipe, False) for recipe in RECIPES],
    "biases": [(f, r, False) for f in ("phi", "gpt_neox", "olmo2") for r in RECIPES[:2]],
    "norms": [(f, r, False) for f in ("qwen3", "gemma2", "cohere") for r in RECIPES[:2]],
    "experts": [(f, r, False) for f in ("qwen3_moe", "deepseek_v3") for r in RECIPES[:2]],
    "fused": [(f, "fp8", True) for f in ("qwen2", "mistral", "gemma", "granite")],
}


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_losses_are_those_of_one_process(
    cases: list[tuple[str, str, bool]], tmp_path: Path
) -> None:
    """Fourteen families loaded with tp_plan="auto", on two ranks."""
    alone = []
    for family, recipe, _ in cases:
        model = make_model(family)
        model.save_pretrained(tmp_path / family)
        alone.append(losses(mixprec.convert(model, recipe)))  # split layers are not fused
    ranks = on_ranks(2, trained, folder=tmp_path, cases=cases)
    assert ranks[0] == ranks[1]
    for case, mine, want in zip(cases, ranks[0], alone, strict=True):
        # Norms and attention are fused; other products differ by the order of sums over ranks.
        limit = 5e-3 if case[2] else 1e-3
        assert mine == pytest.approx(want, rel=0, abs=limit), case


def test_scales_are_those_of_all_ranks(tmp_path: Path) -> None:
    """Scales of any value, with which those of one rank would give losses that differ by 1e-4."""
    recipe = dataclasses.replace(
        mixprec.Recipe.parse("fp8"), name="exact", power_of_two_scale=False
    )
    cases, alone = [(family, recipe, False) for family in ("llama", "mixtral")], []
    for family, _, _ in cases:
        model = make_model(family)
        model.save_pretrained(tmp_path / family)
        alone.append(losses(mixprec.convert(model, recipe), 2))
    for rank in on_ranks(2, trained, folder=tmp_path, cases=cases, steps=2):
        for mine, want in zip(rank, alone, strict=True):
            assert mine == pytest.approx(want, rel=0, abs=1e-5)


def layers_of(model: torch.nn.Module) -> dict[str, Any]:
    """The name of a class of ours, or of a style of transformers, in place of each forward pass."""
    own = {n: vars(m)["forward"] for n, m in model.named_modules() if "forward" in vars(m)}
    return {name: type(getattr(f, "__self__", f)).__name__ for name, f in own.items()}


def changed(folder: Path) -> None:
    """A model that is converted, converted again, and back."""
    model = split(folder / "mixtral")
    before = layers_of(model)
    tokens = torch.arange(3, 11).view(1, -1)

    def loss(model: torch.nn.Module) -> float:
        return model(input_ids=tokens, labels=tokens).loss.item()

    start = loss(model)
    mixprec.convert(model, "fp8", fuse=True)
    kinds = Counter(layers_of(model).values())
    assert (kinds["ParallelLinear"], kinds["ParallelExperts"]) == (5, 1)
    fp8 = loss(model)
    assert fp8 != start
    assert loss(mixprec.convert(model, "bf16", fuse=True)) != fp8
    assert loss(mixprec.convert(model, "fp8", fuse=True)) == fp8
    with mixprec.autocast(enabled=False):
        assert loss(model) == pytest.approx(start, abs=1e-6)
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match=r"experts: recipe must not scale whole tensors, .* fp8"):
        loss(model)
    loss(mixprec.convert(model, "bf16"))
    mixprec.unconvert(model)
    assert layers_of(model) == before
    assert loss(model) == pytest.approx(start, abs=1e-6)
    plan = {"model.layers.*.mlp.down_proj": "packed_rowwise"}
    config = DistributedConfig(tp_size=2, tp_plan=plan)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder / "llama", distributed_config=config)
    with pytest.raises(ValueError, match=r"^convert: model.layers.0.mlp.down_proj must be split"):
        mixprec.convert(model, "fp8")
    assert layers_of(model)
    mixprec.convert(model, "fp8", overrides={"*.down_proj": None})


def test_converted_and_back(tmp_path: Path) -> None:
    """Split models that are converted, fused and unconverted, on two ranks."""
    for family in ("mixtral", "llama"):
        make_model(family).save_pretrained(tmp_path / family)
    on_ranks(2, changed, folder=tmp_path)


def compiled(folder: Path) -> None:
    tokens = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    for recipe in ("fp8", "fp8-delayed"):
        found: list[list[torch.Tensor]] = []
        for run in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
            model = mixprec.convert(split(folder), recipe)
            loss = run(model)(input_ids=tokens, labels=tokens).loss
            loss.backward()
            grads = (p.grad for p in model.parameters())
            found.append([loss, *(getattr(g, "full_tensor", lambda g=g: g)() for g in grads)])
        assert all(map(torch.equal, *found)), recipe


def test_a_split_model_compiles(tmp_path: Path) -> None:
    """A model with a tp_plan, compiled: the loss and gradients without."""
    make_model("llama").save_pretrained(tmp_path)
    on_ranks(2, compiled, folder=tmp_path)
