"""Log-probabilities in sampling and in training: how far they are apart, and what is the cause.

Small models of transformers with random weights sample a text by `generate`, with a dynamic and a
static cache, with and without padding on the left; then the same text runs through the model as in
training. `--out` writes the gaps of each family and recipe, converted plainly and with
`invariant=True`, the gaps by precision, which functions of torch depend on their neighbours, and
what invariance costs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mixprec

from .. import pages, results
from ..environment import environment
from ..table import markdown

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 192, "intermediate_size": 357, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
HEAD = {**GROUPED, "head_dim": 40}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", HEAD),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 20}),
    "GPT-2": ("GPT2LMHeadModel", DROPOUT),
    "Gemma 2": ("Gemma2ForCausalLM", HEAD),
    "Gemma 3": ("Gemma3ForCausalLM", {**HEAD, "sliding_window": 20}),
    "Mixtral": ("MixtralForCausalLM", {**GROUPED, **EXPERTS}),
}
RECIPES = ("bf16", "fp16", "mxfp8", "fp8-rowwise", "fp8-block")
CACHES, PADDED = ("dynamic", "static"), (0, 5, 13)  # tokens that are missing, by sample
PROMPT = 16


def make(family: str, seed: int = 0, **sizes: Any) -> Any:
    import transformers

    torch.manual_seed(seed)
    kind: Any = getattr(transformers, FAMILIES[family][0])
    config = kind.config_class(**{**SIZES, **FAMILIES[family][1], **sizes})
    model = kind(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:  # so that the next token is not a matter of chance
                p.mul_(3)
    return model


def converted(family: str, recipe: str, *, low: bool, seed: int = 0, **options: Any) -> Any:
    """low: with parameters in 16 bits."""
    model = mixprec.convert(make(family, seed), recipe, **options)
    if low:
        mixprec.cast_parameters(model, mixprec.Recipe.parse(recipe).dtype)
    return model


def batch(padded: bool, seed: int = 1, columns: int = PROMPT) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, SIZES["vocab_size"], (len(PADDED), columns), generator=generator)
    mask = torch.ones_like(ids)
    for i, count in enumerate(PADDED if padded else ()):
        ids[i, :count] = mask[i, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def log_probabilities(
    model: Any, cache: str, padded: bool, tokens: int = 12, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sampled tokens, [B, tokens]: as sampled, and as the training forward pass has them."""
    start = batch(padded, seed)
    model.eval()
    torch.manual_seed(seed)
    sampled = model.generate(
        **start, max_new_tokens=tokens, do_sample=True, temperature=0.7, top_k=20,
        output_logits=True, return_dict_in_generate=True, cache_implementation=cache,
    )  # fmt: skip
    text, here = sampled.sequences, torch.stack(sampled.logits, 1).float().log_softmax(-1)
    added = torch.ones(len(text), tokens, dtype=torch.long)
    mask = torch.cat([start["attention_mask"], added], 1)
    model.train()
    places = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(text, attention_mask=mask, position_ids=places, use_cache=False).logits
    there = logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
    chosen = text[:, PROMPT:, None]
    return here.gather(-1, chosen)[..., 0], there.gather(-1, chosen)[..., 0].detach()


def gap(*args: Any, **kwargs: Any) -> float:
    here, there = log_probabilities(*args, **kwargs)
    return float((here - there).abs().max())


def first_difference(model: Any) -> str:
    """Where decoding diverges from the whole pass."""
    model.eval()
    for case in mixprec.invariance(model, batch(True, columns=24), cases=["dynamic cache"]):
        if case.gap:
            return case.said.split(" (")[0]
    return "not seen in another text"


def cells(family: str) -> Iterator[dict[str, Any]]:
    for recipe in RECIPES:
        for low in (False, True):
            row: dict[str, Any] = {"family": family, "recipe": recipe, "low": low}
            for way, options in (("plain", {}), ("invariant", {"invariant": True})):
                try:
                    model = converted(family, recipe, low=low, **options)
                    gaps = [gap(model, c, p) for c in CACHES for p in (False, True)]
                except (ValueError, RuntimeError) as error:
                    row[way] = str(error)
                    continue
                row[way] = gaps
                row[f"{way} first"] = first_difference(model) if max(gaps) else "-"
            yield row


def by_precision(seeds: range) -> dict[str, dict[str, float]]:
    """The mean absolute gap of plainly converted models, whose parameters are FP32."""
    ways: dict[str, tuple[str, Any]] = {
        "bf16": ("bf16", None),
        "bf16, head in fp16": ("bf16", {"lm_head": "fp16"}),
        "bf16, head in fp32": ("bf16", {"lm_head": None}),
        "fp16": ("fp16", None),
        "fp16, head in fp32": ("fp16", {"lm_head": None}),
    }
    table: dict[str, dict[str, float]] = {}
    for family in ("Llama", "Qwen3", "GPT-2"):
        for way, (recipe, overrides) in ways.items():
            gaps = []
            for seed in seeds:
                model = converted(family, recipe, low=False, seed=seed, overrides=overrides)
                here, there = log_probabilities(model, "dynamic", True, seed=seed)
                gaps.append(float((here - there).abs().mean()))
            table.setdefault(way, {})[family] = statistics.mean(gaps)
    return table


# Functions of torch


def _functions(dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    weights: dict[tuple[int, int], torch.Tensor] = {}

    def linear(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            k = x.shape[-1]
            w = weights.setdefault((rows, k), torch.randn(rows, k).to(dtype))
            return functional.linear(x, w)

        return run

    return {
        "linear": linear(96),
        "linear, 4 outputs": linear(4),
        **{n: getattr(functional, n) for n in ("silu", "gelu", "softplus", "mish", "elu", "relu")},
        "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
        **{n: getattr(torch, n) for n in ("sigmoid", "tanh", "exp", "cos", "sin", "square", "erf")},
        "rsqrt": lambda x: (x.abs() + 0.01).rsqrt(),
        "log": lambda x: (x.abs() + 0.01).log(),
        "sqrt": lambda x: x.abs().sqrt(),
        "reciprocal": torch.reciprocal,
        "mean": lambda x: x.mean(-1, keepdim=True),
        "sum": lambda x: x.sum(-1, keepdim=True),
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
        "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
        "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    }


def varying() -> dict[str, list[str]]:
    """The functions of torch of which a row had other bits among other rows, by dtype; none: it was
    not seen."""
    torch.manual_seed(0)
    found: dict[str, list[str]] = {}
    threads = torch.get_num_threads()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        functions = _functions(dtype)
        for name, function in functions.items():
            found.setdefault(name, [])
            if any(_varies(function, k, dtype) for k in (64, 100, 257, 515, 1030, 4099)):
                found[name].append(str(dtype).removeprefix("torch."))
    torch.set_num_threads(threads)
    return found


def _varies(
    function: Callable[[torch.Tensor], torch.Tensor], k: int, dtype: torch.dtype, rows: int = 37
) -> bool:
    x = (torch.randn(rows, k) * 2).to(dtype)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        whole = function(x)
        for count in (1, 2, 3, 5, 7, 8, 16):
            for first in (0, 1, 3, rows - count):
                part = slice(first, first + count)
                if not torch.equal(function(x[part].clone()), whole[part]):
                    return True
    return False


def costs(repeats: int = 5) -> dict[str, dict[str, float]]:
    """Seconds of a training step and of a sampled token, with fuse=True and with invariant=True."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
    ways = {"fused": {"fuse": True}, "invariant": {"invariant": True}}
    table: dict[str, dict[str, float]] = {}
    for recipe in ("bf16", "mxfp8"):
        models = {w: mixprec.convert(make("Llama", **sizes), recipe, **o) for w, o in ways.items()}
        times: dict[str, list[float]] = {}
        for _ in range(repeats):
            for way, model in models.items():
                for name, run in (("step", _step), ("token", _tokens)):
                    begin = time.perf_counter()
                    run(model)
                    times.setdefault(f"{name} {way}", []).append(time.perf_counter() - begin)
        table[recipe] = {name: statistics.median(all_of) for name, all_of in times.items()}
    return table


def _step(model: nn.Module) -> None:
    ids = torch.randint(3, SIZES["vocab_size"], (4, 128))
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()


def _tokens(model: Any) -> None:
    model.eval()
    ids = torch.randint(3, SIZES["vocab_size"], (4, 32))
    model.generate(ids, max_new_tokens=32, do_sample=False, attention_mask=torch.ones_like(ids))


# The tables


def block(content: dict[str, Any]) -> str:
    rows = content["cells"]
    good = sum(row["invariant"] == [0.0] * 4 for row in rows)
    body = []
    for family in FAMILIES:
        its = [row for row in rows if row["family"] == family]
        cells = []
        for recipe in RECIPES:
            plain = [g for row in its if row["recipe"] == recipe for g in row["plain"]]
            mine = [row["invariant"] for row in its if row["recipe"] == recipe]
            after = max((max(m) for m in mine if isinstance(m, list)), default=None)
            told = "refused" if after is None else f"{after:.1g}" if after else "0"
            cells.append(f"{max(plain):.1g} / {told}")
        body.append((family, *cells))
    gaps = markdown(("", *RECIPES), body)
    means = content["by precision"]
    families = list(next(iter(means.values())))
    by_precision = [(way, *(f"{means[way][f]:.1e}" for f in families)) for way in means]
    functions = [(name, ", ".join(dtypes) or "-") for name, dtypes in content["varying"].items()]
    costs = [
        (
            recipe,
            *(f"{t[f'{name} invariant'] / t[f'{name} fused']:.2f}x" for name in ("step", "token")),
        )
        for recipe, t in content["costs"].items()
    ]
    made = {}
    for row in rows:
        if ", " in (said := row.get("plain first", "-")):
            op = said.split(", ", 1)[1]
            made.setdefault(op, set()).add(row["family"])
    first = [(op, ", ".join(sorted(where))) for op, where in sorted(made.items())]
    return "\n\n".join((
        "The largest gap of a log-probability, converted plainly / with `invariant=True`, over two "
        "caches, with and without padding, parameters in FP32 and in 16 bits (with it, "
        f"{good} of {len(rows)} models are at exactly 0 in all four):",
        gaps,
        "What made the gaps of the plain models, the first operation that differs:",
        markdown(("operation", "families"), first),
        "The mean absolute gap of plain models with parameters in FP32, by precision:",
        markdown(("", *families), by_precision),
        "Functions of torch of which a row has other bits among other rows, on this processor:",
        markdown(("function", "dtypes"), functions),
        "Time of `invariant=True` against `fuse=True`:",
        markdown(("recipe", "training step", "sampled token"), costs),
        pages.machine(content["environment"]),
    ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), metavar="FAMILY")
    given = parser.parse_args()
    import transformers

    warnings.filterwarnings("ignore", module="(torch|transformers|mixprec).*")
    logging.getLogger("mixprec").setLevel("WARNING")
    transformers.logging.set_verbosity_error()
    rows = []
    for family in given.only:
        for row in cells(family):
            rows.append(row)
            print(*row.values(), flush=True)
    if given.out:
        content = {
            "cells": rows, "by precision": by_precision(range(3)), "varying": varying(),
            "costs": costs(), "environment": environment(quick=False),
        }  # fmt: skip
        results.write_json(given.out, content)
        print(block(content))


if __name__ == "__main__":
    main()
