"""One process that peak_memory.py measures: a few training steps of one way to train.

    python examples/peak_step.py "lean small" '{"model": "gpt", "layers": 4, ...}'

It prints, as JSON, the most that was resident before the model was made (after the imports, and the
same for a model of one small layer: torch.optim imports more when an optimizer is made), and the
time and loss of each step; or why the way does not run here.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from memory_ways import WAYS
from torch import nn

HEAD = 64  # elements of an attention head
Loss = Callable[[torch.Tensor], torch.Tensor]  # of tokens [batch, context]


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


def train(
    way: str, model: str, steps: int, caching_allocator: bool = False, **config: int
) -> dict[str, Any]:
    """Steps on one batch of random tokens, whose loss falls as they are learned by heart."""
    if caching_allocator:
        import mixprec

        mixprec.memory.use_caching_allocator()
    torch.manual_seed(0)
    WAYS[model][way](MODELS[model]({**config, "layers": 1, "width": HEAD})[0])
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    net, loss_of = MODELS[model](config)
    parameters = sum(p.numel() for p in net.parameters())
    optimizer = WAYS[model][way](net)
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
    return {
        "baseline": baseline,
        "parameters": parameters,
        "losses": losses,
        "seconds": seconds,
    }


def main(way: str, settings: str) -> None:
    try:
        found = train(way, **json.loads(settings))
    except ModuleNotFoundError as error:
        found = {"refused": f"{error.name} is not installed"}
    except Exception as error:  # of another package, which then does not run on this machine
        found = {"refused": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
