"""What must stay the same when code moves: `golden.py write DIR`, later `golden.py compare DIR`.

`write`, on the commit that the change begins with, stores in DIR the arguments and the bits of
every op at every level of this processor and of steps of the optimizers, the losses of families of
models in every recipe, files that were saved, reports as JSON, and the public names with their
signatures. `compare` prints what differs now, and exits with 1. Both on one machine and with one
torch; `PYTHONPATH=TREE python tests/tooling/golden.py write DIR` runs another commit's tree.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import itertools
import json
import os
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Results = dict[str, Any]
RECIPES = (
    "fp32", "bf16", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4",
    "nvfp4",
)  # fmt: skip


def digest(value: Any) -> str:
    """Of the bits, dtypes, shapes and strides of the tensors in `value`, and of the rest's repr."""
    state = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            state.update(repr((part.dtype, tuple(part.shape), part.requires_grad)).encode())
            state.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                state.update(str(key).encode())
                add(part[key])
        elif isinstance(part, (list, tuple)):
            state.update(str(len(part)).encode())
            for each in part:
                add(each)
        else:
            state.update(repr(part).encode())

    add(value)
    return state.hexdigest()[:16]


# Ops: the arguments are those that were written, whatever examples the code has now.


def op_arguments(folder: Path) -> list[tuple[str, list[Any]]]:
    path = folder / "arguments.pt"
    if not path.exists():
        ops = importlib.import_module("mixprec.ops._dispatch.op").OPS
        torch.manual_seed(0)
        calls = [(name, list(args)) for name, op in ops.items() for args in op.examples("cpu")]
        torch.save(calls, path)
    calls: list[tuple[str, list[Any]]] = torch.load(path, weights_only=False)
    return calls


def ops(folder: Path) -> Results:
    import mixprec  # noqa: F401, which registers them

    results: Results = {}
    numbers: dict[str, Iterator[int]] = {}
    for name, args in op_arguments(folder):
        number = next(numbers.setdefault(name, itertools.count()))
        for variant in (name, f"{name.rstrip('_')}_reference{'_' * name.endswith('_')}"):
            held = copy.deepcopy(args)
            try:
                result = getattr(torch.ops.mixprec, variant)(*held)
            except Exception as error:
                result, held = f"{type(error).__name__}: {error}", []
            results[f"{variant}[{number}]"] = digest((result, held))
    return results


# Training.


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module], act: nn.Module) -> None:
        super().__init__()
        self.norm, self.norm2 = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), act, nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(32, 32), Block(32, nn.LayerNorm, nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(
            self.body(self.embed(x[..., 0].mul(5).long().abs() % 32)), self.embed.weight
        )


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def hugging(kind: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    more = {"Llama": {"num_key_value_heads": 1}, "GPT2": {}, "Bert": {}}[kind]
    config = getattr(transformers, f"{kind}Config")(intermediate_size=64, **sizes, **more)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config)
    return model.eval()


class Hugging(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = hugging(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(inputs_embeds=x).last_hidden_state


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
    "gpt": lambda: nn.Sequential(*(Block(32, nn.LayerNorm, nn.GELU("tanh")) for _ in range(2))),
    "rms": lambda: nn.Sequential(*(Block(32, nn.RMSNorm, nn.SiLU()) for _ in range(2))),
    "tied": Tied,
    "attention": Attentive,
    "encoder": lambda: nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True),
    "conv": lambda: nn.Sequential(nn.Conv1d(16, 32, 3, padding=1), nn.SiLU(), nn.Conv1d(32, 16, 1)),
    "llama": lambda: Hugging("Llama"),
    "gpt2": lambda: Hugging("GPT2"),
    "bert": lambda: Hugging("Bert"),
}


def train(model: nn.Module, optimizer: Any, scaler: Any = None, steps: int = 20) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 16, 32, generator=generator)
        dtype = next(model.parameters()).dtype
        loss = model(x.to(dtype)).float().sub(x.mean()).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        (scaler.step(optimizer), scaler.update()) if scaler else optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def models() -> Results:
    import mixprec

    results: Results = {}
    options: dict[str, dict[str, Any]] = {
        "": {},
        "+saved": {"saved": "int8"},
        "+fuse": {"fuse": True},
    }
    regions: dict[str, Any] = {
        "autocast": mixprec.autocast, "simulate": partial(mixprec.simulate, "hopper"),
        "compress_saved": partial(mixprec.compress_saved, "int8"),
    }  # fmt: skip
    for family, recipe, way in itertools.product(FAMILIES, RECIPES, [*options, *regions]):
        if (recipe == "fp32" and way in options and way) or (recipe != "fp32" and way in regions):
            continue
        torch.manual_seed(0)
        model = FAMILIES[family]()
        try:
            if recipe != "fp32":
                model = mixprec.convert(model, recipe, **options[way])
            optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-3)
            scaler = mixprec.GradScaler() if recipe == "fp16" else None
            with regions.get(way, contextlib.nullcontext)():
                losses = train(model, optimizer, scaler)
            result = [digest((losses, model.state_dict(), optimizer.state_dict())), losses[-1]]
        except Exception as error:
            result = [f"{type(error).__name__}: {error}"]
        results[f"{family} {recipe}{way}"] = result
    return results


def optimizers() -> Results:
    import mixprec
    from mixprec import optim

    results: Results = {}
    forms: list[dict[str, Any]] = [
        {}, {"master_weights": "remainder16"},
        {"stochastic_rounding": True, "master_weights": None},
        {"state_dtype": "int8"}, {"state_dtype": torch.bfloat16}, {"max_grad_norm": 0.1},
    ]  # fmt: skip
    kinds = ("AdamW", "Adam", "SGD", "Lion", "Muon")
    for kind, form, dtype in itertools.product(
        kinds, forms, (torch.float32, torch.bfloat16, torch.float16)
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        if dtype != torch.float32:
            model = mixprec.cast_parameters(model, dtype)
        try:
            optimizer = getattr(optim, kind)(model.parameters(), lr=1e-2, **form)
            losses = train(model, optimizer)
            result = digest(
                (losses, optimizer.state_dict(), optim.fp32_state_dict(model, optimizer))
            )
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        results[f"{kind} {form} {dtype}"] = result
    return results


# Files and reports.


def saved(folder: Path) -> Results:
    """Files that were written then are read now, and training goes on in the same bits."""
    import mixprec

    results: Results = {}
    for name, recipe in itertools.product(("gpt", "llama"), ("bf16", "fp8-delayed", "mxfp8")):
        torch.manual_seed(0)
        model = mixprec.convert(mixprec.cast_parameters(FAMILIES[name](), torch.bfloat16), recipe)
        optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, steps=4)
        path = folder / f"{name}-{recipe}"
        if not path.with_suffix(".pt").exists():
            mixprec.save_checkpoint(path.with_suffix(".pt"), model=model, optimizer=optimizer)
            path.with_suffix(".pickle").write_bytes(pickle.dumps((model, optimizer)))
        content = torch.load(path.with_suffix(".pt"), weights_only=False)
        results[f"{name} {recipe} content"] = digest(content)
        loaded = mixprec.convert(mixprec.cast_parameters(FAMILIES[name](), torch.bfloat16), recipe)
        later = mixprec.optim.AdamW(loaded.parameters(), lr=1e-3)
        mixprec.load_checkpoint(path.with_suffix(".pt"), model=loaded, optimizer=later)
        pickled, optimizer = pickle.loads(path.with_suffix(".pickle").read_bytes())
        results[f"{name} {recipe} after"] = [
            digest((train(m, o, steps=4), m.state_dict()))
            for m, o in ((loaded, later), (pickled, optimizer))
        ]
    return results


# Of a report: what is measured anew in each run, names the machine or where this file stands.
MEASURED = ("seconds", "date", "environment", "version", "commit", "line")


def plain(value: Any) -> Any:
    """`value` without what is measured."""
    if isinstance(value, dict):
        return {
            k: plain(v) for k, v in value.items() if not any(word in str(k) for word in MEASURED)
        }
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def reports() -> Results:
    import mixprec

    results: Results = {}
    for name in ("gpt", "llama", "conv"):
        torch.manual_seed(0)
        model = mixprec.convert(FAMILIES[name](), "fp8")
        optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(2))
        with mixprec.audit(model, optimizer=optimizer) as a:
            model(x).square().mean().backward()
            optimizer.step()
        results[f"audit {name}"] = plain(a.to_dict())
        model = mixprec.unconvert(model)
        batches = [
            torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)
        ]
        chosen = mixprec.plan(model, batches, budget={"time": 0.8}, loss=_loss, passes=4)
        chosen.save("plan.json")
        results[f"plan {name}"] = plain(json.loads(Path("plan.json").read_text()))
    return results


def names() -> Results:
    """The public names of every module whose path has no underscore, and their signatures."""
    import mixprec

    results: Results = {}
    for module in pkgutil.walk_packages(mixprec.__path__, "mixprec."):
        parts = module.name.split(".")
        if any(part.startswith("_") for part in parts) or len(parts) > 2 + (
            parts[1] == "integrations"
        ):
            continue
        try:
            content = importlib.import_module(module.name)
        except ImportError:
            continue
        for name in getattr(content, "__all__", ()):
            value = getattr(content, name, None)
            try:
                results[f"{module.name}.{name}"] = str(inspect.signature(value))
            except (TypeError, ValueError):
                results[f"{module.name}.{name}"] = type(value).__name__
            if inspect.isclass(value):
                methods = {m: f for m, f in inspect.getmembers(value, callable) if m[0] != "_"}
                results[f"{module.name}.{name}."] = {m: _signature(f) for m, f in methods.items()}
    return results


def _signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return ""


PARTS: dict[str, Callable[[Path], Results]] = {
    "ops": ops,
    "models": lambda _: models(),
    "optimizers": lambda _: optimizers(),
    "saved": saved,
    "reports": lambda _: reports(),
    "names": lambda _: names(),
}


def main() -> int:
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "part":
        torch.set_num_threads(1)
        print(json.dumps(PARTS[sys.argv[3]](folder)))
        return 0
    import mixprec._C

    folder.mkdir(parents=True, exist_ok=True)
    print(f"{command}: {mixprec.__file__}", file=sys.stderr)
    jobs = [(part, "") for part in PARTS] + [("ops", isa) for isa in mixprec._C.isa_available()]
    wrong = 0
    for part, isa in jobs:
        environment = {**os.environ, **({"MIXPREC_ISA": isa} if isa else {})}
        line = [sys.executable, __file__, "part", str(folder), part]
        output = subprocess.run(
            line, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        now = json.loads(output.stdout.splitlines()[-1])
        path = folder / f"{part}{isa and '-' + isa}.json"
        if command == "write":
            path.write_text(json.dumps(now, indent=1))
            continue
        then = json.loads(path.read_text())
        for key in sorted(then.keys() | now.keys()):
            if then.get(key) != now.get(key):
                wrong += 1
                print(f"{path.stem}: {key}: {then.get(key)} -> {now.get(key)}"[:600])
    print(f"{command}: {wrong} differ", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
