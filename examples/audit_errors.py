"""How small an error of one op audit finds: errors put into steps of models of transformers.

    python examples/audit_errors.py --out bench/results/cpu/audit-errors.json

Each place is a product of a model in one recipe; the error is 1, 2, 4 and 16 times as large as the
error that the product has anyway. A step with it is compared with one in FP32 by Audit.diff: found
is where that names the module and the product. Clean pairs have no error.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from needs import needs

import mixprec
from mixprec.bench.environment import environment
from mixprec.diagnostics.audit import reference
from mixprec.diagnostics.audit.ops import arguments
from mixprec.diagnostics.audit.shadow import Shadow

FACTORS = (1, 2, 4, 16)
RECIPES = ("torch.autocast", "bf16", "fp8", "fp8-rowwise", "mxfp8", "nvfp4")
ERRORS = ("noise", "lost tail of K", "transposed scale", "wrong cast")
PRODUCTS = ("y", "grad_input", "grad_weight")
TEXT, IMAGE = "text", "image"
# None of these has set the constants of mixprec/diagnostics/audit/trace.py.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2ForCausalLM": (TEXT, {"num_key_value_heads": 2}),
    "Olmo2ForCausalLM": (TEXT, {}),
    "Gemma2ForCausalLM": (TEXT, {"num_key_value_heads": 2, "head_dim": 16}),
    "FalconForCausalLM": (TEXT, {}),
    "BloomForCausalLM": (TEXT, {}),
    "GPT2LMHeadModel": (TEXT, {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "Starcoder2ForCausalLM": (TEXT, {"num_key_value_heads": 2}),
    "DistilBertForMaskedLM": (TEXT, {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}),
    "AlbertForMaskedLM": (TEXT, {"embedding_size": 64}),
    "DeiTForImageClassification": (IMAGE, {"image_size": 32, "patch_size": 8}),
}
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def make(name: str, seed: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    with needs("transformers"):
        import transformers
    kind, more = MODELS[name]
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    model = cls(cls.config_class(**{**SIZES, **more})).train()
    tokens = torch.randint(3, 96, (2, 24))
    if kind == TEXT:
        return model, {"input_ids": tokens, "labels": tokens}
    return model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 1, 0])}


class Wrong(Shadow):
    """A shadow of a step in which one op returns something else.

    at: the place of the op among the points; size: of the error, as a part of the result.
    """

    def __init__(self, model: torch.nn.Module, at: int, size: float, error: str) -> None:
        super().__init__(model.parameters())
        self.at, self.size, self.error = at, size, error
        self.points: list[Any] = []  # of the audit, so far

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any, listed: Any) -> Any:
        is_here = listed is not None and len(self.points) == self.at
        if is_here and listed.kind == "product" and isinstance(result, torch.Tensor):
            off = self.direction(func, args, kwargs, listed, result)
            wide = result.float()
            wrong = wide + off * (self.size * wide.norm() / off.norm().clamp(min=1e-30))
            result.copy_(wrong)
        return super().follow(func, args, kwargs, result, listed)

    def direction(self, func: Any, args: Any, kwargs: Any, listed: Any, y: Any) -> torch.Tensor:
        """The error without its size."""
        given = arguments(func, args, kwargs)
        ours = func.namespace == "mixprec"
        a, b = (
            reference.decoded(given, name) if ours else given[name].float()
            for name in listed.operands
        )
        if self.error == "lost tail of K":
            k = a.shape[-1]
            off = a[..., k - max(k // 8, 1) :] @ b[..., k - max(k // 8, 1) :, :]
        elif self.error == "transposed scale":
            scales = a.abs().amax(-1, keepdim=True)
            off = (a / scales.clamp(min=1e-30) * scales.flip(-2)) @ b - a @ b
        elif self.error == "wrong cast":
            off = (a.to(torch.float8_e5m2).float() - a) @ b
        else:
            off = torch.randn(y.shape, generator=torch.Generator().manual_seed(self.at))
        return off if float(off.norm()) > 0 else torch.ones_like(off)


def audited(model: Any, batch: Any, recipe: str, shadow: Shadow | None = None) -> mixprec.Audit:
    audit = mixprec.Audit(model, sqnr=True)
    if shadow is not None:
        audit._shadow = shadow
    is_autocast = recipe == "torch.autocast"
    region = torch.autocast("cpu", torch.bfloat16) if is_autocast else nullcontext()
    torch.manual_seed(1)
    with audit:
        if isinstance(shadow, Wrong):
            shadow.points = audit._recorder.trace.points
        with region:
            loss = model(**batch).loss
        loss.backward()
    for p in model.parameters():
        p.grad = None
    return audit


def pair(name: str, recipe: str, seed: int) -> tuple[mixprec.Audit, Any, Any]:
    """A step in FP32, and the model and batch of the other one."""
    model, batch = make(name, seed)
    first = audited(model, batch, "fp32")
    if recipe != "torch.autocast":
        mixprec.convert(model, recipe)
    return first, model, batch


def clean(pairs: int) -> dict[str, Any]:
    alarms = []
    for i in range(pairs):
        name = list(MODELS)[i % len(MODELS)]
        recipe = RECIPES[i // len(MODELS) % len(RECIPES)]
        first, model, batch = pair(name, recipe, 100 + i)
        diff = first.diff(audited(model, batch, recipe))
        if diff.first is not None:
            alarms.append(f"{name} {recipe}: {diff.said}")
    return {"pairs": pairs, "alarms": alarms}


def places(count: int) -> list[dict[str, Any]]:
    draws, rows = random.Random(0), []
    while len(rows) < count:
        name, recipe = draws.choice(list(MODELS)), draws.choice(RECIPES)
        first, model, batch = pair(name, recipe, 7)
        points = audited(model, batch, recipe).points
        able = [i for i, p in enumerate(points) if p.own > 0 and p.result and p.op in PRODUCTS]
        for at in draws.sample(able, min(5, count - len(rows), len(able))):
            point, error = points[at], draws.choice(ERRORS)
            row = {"model": name, "recipe": recipe, "module": point.module, "op": point.op,
                   "error": error, "own": point.own, "found": {}}  # fmt: skip
            for factor in FACTORS:
                shadow = Wrong(model, at, factor * point.own, error)
                place = first.diff(audited(model, batch, recipe, shadow)).first
                same = place is not None and (place.module, place.op) == (point.module, point.op)
                row["found"][factor] = same
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--places", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=200)
    given = parser.parse_args()
    start = time.perf_counter()
    rows = places(given.places)
    found = {f: sum(row["found"][f] for row in rows) / len(rows) for f in FACTORS}
    report = {"found": found, "clean": clean(given.pairs), "places": rows}
    print(json.dumps({**report, "places": len(rows)}, indent=1))
    for row in rows:
        if not row["found"][4]:
            print("missed at 4 times:", row)
    print(f"{time.perf_counter() - start:.0f} s")
    if given.out:
        report["environment"] = environment(quick=False)
        given.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
