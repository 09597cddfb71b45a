"""One process that peak.py measures: a few training steps of one way to train.

    PYTHONPATH=examples python bench/studies/peak_step.py "lean small" '{"model": "gpt", ...}'

It prints, as JSON, the most that was resident: before the model was made (after the imports, and
the same for a model of one small layer: torch.optim imports more when an optimizer is made) and at
the end; and the time and loss of each step; or why the way does not run here. Each way imports what
it needs alone, so that a process holds what a user's would.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HEAD = 64  # elements of an attention head
RELEASED = "lean balanced, `release_gradients`"
COMMON = (
    *("FP32", "`torch.autocast`, bf16", "checkpointing", "torchao `AdamW8bit`"),
    *("torchao `AdamW8bit`, BF16 model", "bitsandbytes `AdamW8bit`"),
    *("checkpointing, torchao `AdamW8bit`", "mixprec bf16", "lean high", "lean balanced", RELEASED),
    *("lean small", "checkpointing, mixprec bf16", "checkpointing, lean balanced"),
    *(f"checkpointing, {RELEASED}", "checkpointing, lean small"),
)
FUSED = ("lean balanced, `fuse_loss`", f"checkpointing, {RELEASED}, `fuse_loss`")
WAYS = {"gpt": COMMON, "phi3": COMMON + FUSED}
Loss = Callable[[torch.Tensor], torch.Tensor]  # of tokens [batch, context]


def prepare(way: str, model: nn.Module) -> torch.optim.Optimizer:
    """Prepare an FP32 model as the name of the way says. KeyError for one that is not known."""
    name, *options = way.removeprefix("checkpointing, ").replace("`", "").split(", ")
    if name.startswith("lean "):
        import mixprec

        more = {"release_gradients": True} if "release_gradients" in options else {}
        optimizer = mixprec.lean(model, fidelity=name[5:], verbose=False, **more)[1]
        if "fuse_loss" in options:  # the loss from the last hidden states
            from mixprec.integrations.transformers import fuse_loss

            fuse_loss(model)
    elif name == "mixprec bf16":
        import mixprec

        mixprec.convert(mixprec.cast_parameters(model, torch.bfloat16), "bf16", fuse=True)
        optimizer = mixprec.optim.AdamW(model.parameters())
    elif name.endswith(" AdamW8bit"):
        adamw, more = importlib.import_module(f"{name.split()[0]}.optim").AdamW8bit, {}
        _in_torch(model)
        if "BF16 model" in options:
            # No masters: stochastic rounding keeps what updates below half a step of BF16 change.
            model, more = model.bfloat16(), {"bf16_stochastic_round": True}
        optimizer = adamw(model.parameters(), **more)
    elif name in ("FP32", "checkpointing", "torch.autocast"):
        _in_torch(model)
        if name == "torch.autocast":
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        raise KeyError(way)
    if way.startswith("checkpointing"):
        # Each block keeps its input alone, from which backward computes it again.
        if hasattr(model, "gradient_checkpointing_enable"):  # of transformers
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for block in getattr(model, "blocks", ()):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return optimizer


def _in_torch(model: nn.Module) -> None:
    """With functions of torch alone where the examples' GPT has some of mixprec."""
    importlib.import_module("mixprec.bench.cases.gpt").in_torch(model)


def gpt(config: dict[str, int]) -> tuple[nn.Module, Loss]:
    from gpt_model import GPT, GPTConfig

    width = config["width"]
    model = GPT(GPTConfig(config["layers"], width, width // HEAD, config["context"]))
    return model, lambda tokens: model(tokens, tokens.roll(-1, 1))


def phi3(config: dict[str, int]) -> tuple[nn.Module, Loss]:
    from transformers import Phi3Config, Phi3ForCausalLM

    width = config["width"]
    sizes = Phi3Config(
        vocab_size=config["vocabulary"],
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=config["layers"],
        num_attention_heads=width // HEAD,
        max_position_embeddings=config["context"],
        pad_token_id=0,
        use_cache=False,
    )
    model = Phi3ForCausalLM(sizes).train()
    return model, lambda tokens: model(tokens, labels=tokens).loss


MODELS = {"gpt": gpt, "phi3": phi3}


def most_resident() -> int:
    """Of this process, in bytes; unlike ru_maxrss without what its parent had when it started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def train(
    way: str, model: str, steps: int, caching_allocator: bool = False, **config: int
) -> dict[str, Any]:
    """Steps on one batch of random tokens, whose loss falls as they are memorized."""
    if caching_allocator:
        import mixprec

        mixprec.memory.use_caching_allocator()
    torch.manual_seed(0)
    prepare(way, MODELS[model]({**config, "layers": 1, "width": HEAD})[0])
    baseline = most_resident()
    net, loss_of = MODELS[model](config)
    optimizer = prepare(way, net)
    tokens = torch.randint(config["vocabulary"], (config["batch"], config["context"]))
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        del loss
        seconds.append(time.perf_counter() - start)
    found = {"losses": losses, "seconds": seconds, "baseline": baseline, "peak": most_resident()}
    return {"parameters": sum(p.numel() for p in net.parameters()), **found}


if __name__ == "__main__":
    try:
        found = train(sys.argv[1], **json.loads(sys.argv[2]))
    except ModuleNotFoundError as error:
        found = {"refused": f"{error.name} is not installed"}
    except Exception as error:  # of another package, which then does not run on this machine
        found = {"refused": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))
