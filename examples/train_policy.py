"""Train a small policy by policy gradient, and show the ratio of its two log-probabilities.

    python examples/train_policy.py [--recipe fp8-rowwise] [--steps 30]

The policy, a small Llama with random weights, samples texts token by token with a cache; the reward
is the share of even tokens. The text then runs through the model as a whole, which gives gradients:

    loss = -mean(ratio * (reward - mean(reward)))        ratio = p_training / p_sampling

With one update per text both are of the same weights, and the ratio should be 1. It is exactly 1
with `invariant=True`; without, it is spread, the more so the shorter the format. The exit code is
0 if it is exactly 1 in each step with `invariant=True`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

import torch
from needs import needs

import mixprec

PROMPT, TOKENS, TEXTS, VOCABULARY = 8, 24, 16, 64
EDGES = (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, float("inf"))  # of |ratio - 1|


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small policy by policy gradient, with and without invariant=True.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--recipe", default="fp8-rowwise", help="precision: bf16, fp16, mxfp8, ...")
    parser.add_argument("--steps", type=int, default=30, help="training steps of each policy")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the samples")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    try:
        options.recipe = mixprec.Recipe.parse(options.recipe).name
    except ValueError as error:
        parser.error(f"--recipe: {error}")
    return options


def policy(options: argparse.Namespace, **how: bool) -> Any:
    with needs("transformers"):
        from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = mixprec.convert(LlamaForCausalLM(config), options.recipe, **how)
    return mixprec.cast_parameters(model, mixprec.Recipe.parse(options.recipe).dtype)


def sample(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Texts with prompts of several lengths, padded on the left, [B, T]; their mask; and the
    log-probabilities of the tokens that were sampled."""
    prompt = torch.randint(1, VOCABULARY, (TEXTS, PROMPT))
    mask = (torch.arange(PROMPT) >= torch.randint(0, PROMPT // 2, (TEXTS, 1))).long()
    sampled = model.eval().generate(
        prompt * mask, attention_mask=mask, max_new_tokens=TOKENS, do_sample=True,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    mask = torch.cat([mask, torch.ones(TEXTS, TOKENS, dtype=torch.long)], 1)
    return sampled.sequences, mask, chosen(torch.stack(sampled.logits, 1), sampled.sequences)


def chosen(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of the sampled tokens of the text."""
    return logits.float().log_softmax(-1).gather(-1, text[:, PROMPT:, None])[..., 0]


def train(model: Any, options: argparse.Namespace) -> tuple[list[float], torch.Tensor]:
    """The mean reward of each step, and all ratios."""
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = mixprec.GradScaler("cpu", enabled=options.recipe == "fp16")
    rewards, ratios = [], []
    torch.manual_seed(options.seed)
    for _ in range(options.steps):
        text, mask, before = sample(model)
        places = (mask.cumsum(1) - 1).clamp_min(0)
        logits = model.train()(text, attention_mask=mask, position_ids=places).logits
        ratio = (chosen(logits[:, PROMPT - 1 : -1], text) - before).exp()
        reward = (text[:, PROMPT:] % 2 == 0).float().mean(1)
        loss = -(ratio * (reward - reward.mean())[:, None]).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        rewards.append(float(reward.mean()))
        ratios.append(ratio.detach())
    return rewards, torch.stack(ratios)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    logging.getLogger("mixprec").setLevel("WARNING")
    away = {}
    for name, how in (("plain", {}), ("invariant", {"invariant": True})):
        rewards, ratios = train(policy(options, **how), options)
        away[name] = (ratios - 1).abs()
        print(f"{name:9}  reward {rewards[0]:.3f} to {rewards[-1]:.3f}, ", end="")
        print(f"|ratio - 1| at most {float(away[name].max()):.2g}")
    print("\nshare of tokens by |ratio - 1|")
    print(f"{'':18}{'plain':>10}{'invariant':>12}")
    for low, high in zip((-1.0, *EDGES), EDGES, strict=False):
        shares = [float(((x > low) & (x <= high)).float().mean()) for x in away.values()]
        label = "exactly 0" if high == 0 else f"up to {high:g}"
        print(f"{label:18}{shares[0]:>10.2%}{shares[1]:>12.2%}")
    return int(bool(away["invariant"].any()))


if __name__ == "__main__":
    sys.exit(main())
