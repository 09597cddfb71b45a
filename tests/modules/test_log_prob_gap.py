"""log_prob_gap: engines that only round are told from those that compute something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mixprec

SIZE, TOKENS, GENERATED = 96, 24, 10


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=SIZE, n_embd=64, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config).eval()


def make(dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa") -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        attn_implementation=attention,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(3)
    return model.to(torch.bfloat16).to(dtype).eval()


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, SIZE, (8, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :5] = mask[0, :5] = 0
    return ids, mask


@torch.no_grad()
def engine(model: Any, file: Path, modules: tuple[str, ...] = (), temperature: float = 1.0) -> None:
    """Decodes token by token with a cache, padded, and writes what it had."""
    from safetensors.torch import save_file

    ids, mask = texts()
    hidden: dict[str, list[torch.Tensor]] = {name: [] for name in modules}
    for name in modules:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda m, a, y, name=name: hidden[name].append(y))
    logits, cache, start = [], None, 0
    for end in range(TOKENS - GENERATED, TOKENS + 1):
        places = (mask.cumsum(1) - 1).clamp_min(0)[:, start:end]
        known = {"attention_mask": mask[:, :end], "position_ids": places, "use_cache": True}
        out = model(ids[:, start:end], past_key_values=cache, **known)
        logits, cache, start = [*logits, out.logits], out.past_key_values, end
    wide = torch.cat(logits, 1).float() / temperature
    log_probs = wide[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    table = {"tokens": ids, "attention_mask": mask, "log_probs": log_probs[:, -GENERATED:]}
    table |= {f"hidden_states.{name}": torch.cat(parts, 1) for name, parts in hidden.items()}
    save_file({name: t.contiguous() for name, t in table.items()}, file)


BLOCKS = "model.layers.0", "model.layers.1", "model.layers.2"


@pytest.mark.parametrize("recipe", [None, "bf16", "fp8-rowwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_explains_another_order_of_sums(
    recipe: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    sampler, model = make(dtype, "eager"), make(dtype)
    if recipe is not None:
        mixprec.convert(sampler, recipe)
        mixprec.convert(model, recipe, fuse=True)
    engine(sampler, tmp_path / "engine.safetensors", BLOCKS)
    model.train()
    report = mixprec.log_prob_gap(model, tmp_path / "engine.safetensors")
    assert model.training
    assert (report.samples, report.tokens) == (8, 8 * GENERATED)
    assert report.is_explained, str(report)
    assert report.begins == ""
    assert [d.name for d in report.hidden] == [*BLOCKS]
    assert "rounding explains it" in str(report)


def test_an_invariant_model(tmp_path: Path) -> None:
    engine(gpt2(), tmp_path / "engine.safetensors")
    model = mixprec.convert(gpt2(), "bf16", invariant=True)
    report = mixprec.log_prob_gap(model, tmp_path / "engine.safetensors")
    assert report.is_explained, str(report)
    assert mixprec.invariance(model, texts()[0], cases=["each sample alone"]).holds


def test_the_engine_may_have_another_precision(tmp_path: Path) -> None:
    engine(make(torch.bfloat16, "eager"), tmp_path / "engine.safetensors")
    trainer = make(torch.float32)
    assert not mixprec.log_prob_gap(trainer, tmp_path / "engine.safetensors").is_explained
    report = mixprec.log_prob_gap(trainer, tmp_path / "engine.safetensors", dtype=torch.bfloat16)
    assert report.is_explained, str(report)
    assert 0 < report.kl < report.mean < report.largest < 0.5
    assert next(trainer.parameters()).dtype == torch.float32


@torch.no_grad()
def other_weights(model: Any) -> None:
    for p in model.parameters():
        p.add_(torch.randn_like(p) * p.abs().mean() / 20)


@torch.no_grad()
def a_layer_not_loaded(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.mul_(1.05)


def other_positions(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq.mul_(0.9)


def other_epsilon(model: Any) -> None:
    model.model.layers[2].input_layernorm.variance_epsilon = 0.05


def in_eight_bits(model: Any) -> None:
    mixprec.convert(model, "fp8-rowwise")


PLANTED = {
    other_weights: BLOCKS[0],
    a_layer_not_loaded: BLOCKS[1],
    other_positions: BLOCKS[0],
    other_epsilon: BLOCKS[2],
    in_eight_bits: BLOCKS[0],
}


@pytest.mark.parametrize("change", PLANTED, ids=lambda change: change.__name__)
def test_what_is_not_rounding_is_found_where_it_begins(change: Any, tmp_path: Path) -> None:
    sampler = make()
    change(sampler)
    engine(sampler, tmp_path / "engine.safetensors", BLOCKS)
    report = mixprec.log_prob_gap(make(), tmp_path / "engine.safetensors")
    assert not report.is_explained, str(report)
    assert report.begins == PLANTED[change], str(report)
    assert f"begins in {report.begins}" in str(report)


def test_another_temperature_is_not_rounding(tmp_path: Path) -> None:
    engine(make(), tmp_path / "engine.safetensors", temperature=0.8)
    report = mixprec.log_prob_gap(make(), tmp_path / "engine.safetensors")
    assert not report.is_explained
    assert str(report).splitlines()[2] == "rounding does not explain it"


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(SIZE, 32), nn.Linear(32, SIZE)
        self.unused = nn.Identity()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids))


def line(model: Bigrams, known: int, **more: Any) -> dict[str, Any]:
    ids = torch.arange(3, 12)
    log_probs = model(ids)[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return {"tokens": ids.tolist(), "log_probs": log_probs[-known:].tolist(), **more}


def write(file: Path, *rows: Any) -> Path:
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return file


def test_samples_may_have_other_modules(tmp_path: Path) -> None:
    model = Bigrams()
    states = model.embed(torch.arange(3, 12))
    far = {"head": (model.head(states) + 1).tolist()}
    rows = [line(model, 8, hidden_states=far), line(model, 8, hidden_states={})]
    rows.append(line(model, 8, hidden_states={"embed": states.tolist()}))
    report = mixprec.log_prob_gap(model, write(tmp_path / "lines.jsonl", *rows))
    assert {d.name: d.is_explained for d in report.hidden} == {"head": False, "embed": True}
    assert report.begins == "head"


def test_shapes_of_safetensors(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    good = {"tokens": torch.ones(2, 5, dtype=torch.long), "log_probs": torch.zeros(2, 4)}
    for wrong in (
        {"log_probs": torch.zeros(2, 6)},
        {"log_probs": torch.zeros(1, 4)},
        {"attention_mask": torch.ones(2, 4)},
        {"hidden_states.embed": torch.zeros(2, 4, 32)},
    ):
        save_file(good | wrong, tmp_path / "engine.safetensors")
        with pytest.raises(ValueError, match=r"log_probs \[B, N\] with N <= T"):
            mixprec.log_prob_gap(Bigrams(), tmp_path / "engine.safetensors")


def test_lines_of_json(tmp_path: Path) -> None:
    model = Bigrams()
    states = {"embed": model.embed(torch.arange(3, 12)).tolist()}
    rows = [line(model, 8), line(model, 3, hidden_states=states)]
    rows[0]["log_probs"][0] = None
    report = mixprec.log_prob_gap(model, write(tmp_path / "lines.jsonl", *rows))
    assert (report.samples, report.tokens) == (2, 10)
    assert report.is_explained
    assert report.largest < 1e-5
    assert report.hidden[0].engine < 1e-7
    first = {"tokens": rows[0]["tokens"], "log_probs": [None, *rows[0]["log_probs"]]}
    report = mixprec.log_prob_gap(model, write(tmp_path / "lines.jsonl", first))
    assert (report.tokens, report.is_explained) == (7, True)
    rows[1]["log_probs"][1] += 0.5
    report = mixprec.log_prob_gap(model, write(tmp_path / "lines.jsonl", *rows))
    assert report.worst == (1, 7)
    assert report.largest == pytest.approx(0.5)
    assert not report.is_explained
    rows[1]["log_probs"][1] = float("-inf")  # as where top-k has cut the token off
    report = mixprec.log_prob_gap(model, write(tmp_path / "lines.jsonl", *rows))
    assert report.worst == (1, 7)
    assert report.largest == float("inf")
    assert not report.is_explained


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "line 1 of .* must be .*TypeError"),
        ({"tokens": [1, 2.5]}, "line 1 of .* must be .*tokens must be integers"),
        ({"tokens": [SIZE] * 9}, "tokens must be those of the model, got 96 to 96"),
        ({"log_probs": []}, "log_probs must be those of the last tokens, at most 8 of 9, got 0"),
        ({"log_probs": [0.0] * 9}, "at most 8 of 9, got 9 in sample 0"),
        ({"hidden_states": {"none": []}}, "named as modules of the model, got 'none'"),
        ({"hidden_states": {"embed": [[0.0]]}}, r"embed must be \[9, D\].*got \(1, 1\)"),
        ({"hidden_states": {"embed": [[0.0]] * 9}}, r"embed must be \(9, 32\).*got \(9, 1\)"),
        ({"hidden_states": {"unused": [[0.0]] * 9}}, "got 'unused', which returned none"),
        ({"log_probs": [None]}, "file must have log-probabilities, got none"),
    ],
)
def test_what_a_file_lacks_is_an_error(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = Bigrams()
    file = write(tmp_path / "lines.jsonl", {**line(model, 8), **change})
    with pytest.raises(ValueError, match=f"^log_prob_gap: .*{message}"):
        mixprec.log_prob_gap(model, file)


def test_a_model_that_returns_no_logits_is_an_error(tmp_path: Path) -> None:
    class Pooled(Bigrams):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids).mean(1)

    file = write(tmp_path / "lines.jsonl", line(Bigrams(), 8))
    with pytest.raises(
        ValueError, match=r"^log_prob_gap: model must return logits .*got \(1, 96\)"
    ):
        mixprec.log_prob_gap(Pooled(), file)
    with pytest.raises(ValueError, match=r"^log_prob_gap: dtype must be"):
        mixprec.log_prob_gap(Bigrams(), file, dtype=torch.int8)
