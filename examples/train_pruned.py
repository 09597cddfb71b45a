"""Train a pruned CNN or ViT in low precision: pruned weights stay exactly zero.

    python examples/train_pruned.py [--model cnn|vit] [--recipe fp8] [--sparsity 0.7] ...

After a dense warm-up, the smallest weights of each matrix are set to zero, and training continues
without them. For them to stay zero, three tensors have to be masked: the 16-bit param, its FP32
master, which the optimizer updates and rounds to the param, and the moments, which would otherwise
still move the master. All are masked once, then only the gradient, and AdamW keeps zeros at zero:

    master = 0, exp_avg = 0, gradient = 0   =>   master - lr * weight_decay * 0 - lr * 0 = 0

At the end, every mask is checked against the param, the master and the weight as the recipe casts
it. The exit code is 0 if all pruned weights are zero.
"""

from __future__ import annotations

import argparse
import sys

import image_data
import torch
from image_models import MODELS
from torch import nn
from train_gpt import check_device
from train_image import STEPS, train

import mixprec


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a pruned CNN or ViT in low precision, and a dense one beside it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="cnn", help="what is trained")
    add("--recipe", default="fp8", help="precision: fp32, bf16, fp16, fp8, fp8-delayed, ...")
    add("--sparsity", type=float, default=0.7, help="share of each matrix that is set to zero")
    add("--warmup", type=float, default=0.4, help="share of the steps before that")
    add("--steps", type=int, help=f"training steps (default: {STEPS})")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args(argv)
    if options.steps is None:
        options.steps = STEPS[options.model]
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, got {options.steps}")
    for name in ("sparsity", "warmup"):
        if not 0 < getattr(options, name) < 1:
            parser.error(f"--{name} must be between 0 and 1, got {getattr(options, name)}")
    if options.recipe != "fp32":
        try:
            options.recipe = mixprec.Recipe.parse(options.recipe).name
        except ValueError as error:
            parser.error(f"--recipe: {error}; fp32 is a choice here too")
    return options


def magnitude_mask(weight: torch.Tensor, sparsity: float) -> torch.Tensor:
    """1 for the largest |weight|, 0 for round(sparsity * numel) others; of weight's shape."""
    pruned = round(sparsity * weight.numel())
    mask = torch.ones_like(weight).flatten()
    mask[weight.abs().flatten().argsort(stable=True)[:pruned]] = 0
    return mask.view_as(weight)


class PruningError(Exception):
    """A pruned weight is not zero; the message says where."""


class Pruner:
    """Prunes the weights of the linear and convolution layers but the head, after one step.

    masks: by the layers' names; 0 where a weight is pruned.
    """

    def __init__(self, sparsity: float, last_dense_step: int) -> None:
        self.sparsity, self.last_dense_step = sparsity, last_dense_step
        self.masks: dict[str, torch.Tensor] = {}
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def __call__(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step != self.last_dense_step:
            return
        self.model, self.optimizer = model, optimizer
        for name, layer in model.named_modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)) and name != "head":
                self.masks[name] = self._prune(layer.weight, optimizer)

    @torch.no_grad()
    def _prune(self, weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        state = optimizer.state[weight]
        mask = magnitude_mask(state.get("master", weight), self.sparsity)
        for tensor in (weight, *state.values()):  # the master and the moments; not the step count
            if tensor.shape == weight.shape:
                tensor.mul_(mask.to(tensor.dtype))
        # Times the mask, not torch.where: an Inf in a pruned place becomes NaN, and is still seen.
        kept = mask.to(weight.dtype)
        weight.register_hook(lambda grad: grad * kept)
        return mask

    def shares(self) -> dict[str, float]:
        """The fraction of zeros among the weights of all masked layers: param, master and FP8.

        PruningError if a pruned weight is not zero in all of these forms, or if a weight that was
        kept is zero in the master (in the param where there is no master).
        """
        assert self.model is not None
        assert self.optimizer is not None
        zeros: dict[str, int] = {}
        for name, mask in self.masks.items():
            layer = self.model.get_submodule(name)
            forms = {"param": layer.weight, **self.optimizer.state[layer.weight]}
            forms = {k: forms[k].detach() for k in ("param", "master") if k in forms}
            recipe = getattr(layer, "recipe", None)
            if recipe is not None and recipe.is_scaled:
                scaled = {"granularity": recipe.w_granularity}
                cast = mixprec.quantize(forms["param"].flatten(1), recipe.w, **scaled)
                forms["FP8"] = mixprec.dequantize(cast).view_as(mask)
            exact = "master" if "master" in forms else "param"
            for form, values in forms.items():
                zero = values == 0
                if not zero[mask == 0].all():
                    raise PruningError(f"{name}: a pruned weight is not zero in the {form}")
                if form == exact and zero[mask == 1].any():
                    raise PruningError(f"{name}: a kept weight is zero in the {form}")
                zeros[form] = zeros.get(form, 0) + int(zero.sum())
        total = sum(mask.numel() for mask in self.masks.values())
        return {form: count / total for form, count in zeros.items()}


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    check_device(options.device)
    pruner = Pruner(options.sparsity, max(0, round(options.warmup * options.steps) - 1))
    print(f"{'weights':8} {'loss':>8} {'accuracy':>9} {'skipped':>8} {'seconds':>8}  sparsity")
    try:
        for name, after_step in (("dense", None), ("pruned", pruner)):
            result = train(
                options.model,
                options.recipe,
                seed=options.seed,
                steps=options.steps,
                device=options.device,
                after_step=after_step,
            )
            shares = pruner.shares() if after_step else {}
            zeros = ", ".join(f"{share:.1%} in the {form}" for form, share in shares.items())
            print(
                f"{name:8} {result['loss']:8.4f} {result['accuracy']:9.2%} "
                f"{result['skipped']:8} {result['seconds']:8.1f}  {zeros or '-'}",
                flush=True,
            )
    except image_data.DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except PruningError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"passed: all pruned weights of {len(pruner.masks)} layers are exactly zero")
    return 0


if __name__ == "__main__":
    sys.exit(main())
