"""Train one small GPT on several processes, in 16 bits or FP8, with FP32 master weights.

    torchrun --nproc-per-node 2 examples/train_ddp.py [--fsdp] [--recipe fp8] [--dtype fp16] ...

Runs on GPUs if there are any (one per process, NCCL), otherwise on the CPU (gloo):

  DDP     every process holds all weights in 16 bits, with FP32 masters in the optimizer; gradients
          are averaged in FP32
  --fsdp  every process holds a shard of the weights in FP32 and gathers them in 16 bits

--recipe is the recipe of mixprec.convert for the linear layers; without it they compute in --dtype.
The text is the source code of the Python standard library, or a file of your own (--text FILE).
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import sys

import gpt_data
import torch
import torch.distributed as dist
from gpt_model import GPT, GPTConfig
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mixprec
from mixprec.distributed import reduce_gradients_in_fp32

BITS = 1 / math.log(2)  # a loss in nats, times this, is in bits
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train one small GPT on several processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--fsdp", action="store_true", help="shard weights, gradients and optimizer state")
    add("--recipe", help="of the linear layers: fp8, fp8-delayed, bf16, ...")
    add("--dtype", choices=DTYPES, help="of weights and activations; if not given, bf16 or fp16")
    add("--text", metavar="FILE", help="train on this file (default: Python's standard library)")
    add("--steps", type=int, default=60, help="training steps")
    add("--batch", type=int, default=4, help="sequences per step and process")
    add("--context", type=int, default=64, help="bytes per sequence")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--width", type=int, default=128, help="size of the residual stream, a multiple of 64")
    add("--lr", type=float, default=3e-3, help="learning rate")
    options = parser.parse_args(argv)
    for name in ("steps", "batch", "context", "layers", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.width % 64:
        parser.error(f"--width must be a multiple of 64, got {options.width}")
    try:
        recipe = options.recipe and mixprec.Recipe.parse(options.recipe)
    except ValueError as error:
        parser.error(f"--recipe: {error}")
    options.recipe = recipe and recipe.name
    scaled = bool(recipe) and recipe.needs_loss_scaling
    if options.dtype is None:
        options.dtype = "fp16" if scaled else "bf16"
    options.loss_scaling = scaled or options.dtype == "fp16"
    return options


def distributed(model: GPT, options: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model wrapped in DDP or FSDP."""
    dtype = DTYPES[options.dtype]
    if options.recipe:
        mixprec.convert(model, options.recipe)  # before anything wraps or shards its layers
    if options.fsdp:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    mixprec.cast_parameters(model, dtype)
    # Delayed scaling: rank 0's amax must not overwrite that of others. (torch 2.13 renamed it.)
    names = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    devices = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=devices, **{sync: False})
    reduce_gradients_in_fp32(ddp)
    return ddp


def train(options: argparse.Namespace, device: torch.device) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    text = gpt_data.load(options.text, options.context)
    batches = gpt_data.Batches(  # seeded by the rank: each reads other data
        text.train, options.batch, options.context, options.steps, seed=rank
    )

    torch.manual_seed(0)  # the same weights everywhere
    config = GPTConfig(options.layers, options.width, options.width // 64, options.context)
    model = distributed(GPT(config).to(device), options, device)
    optimizer = mixprec.optim.AdamW(
        model.parameters(), options.lr, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0
    )
    scaler = mixprec.GradScaler(enabled=options.loss_scaling)
    if rank == 0:
        wrapper = "FSDP" if options.fsdp else "DDP"
        how = f"{options.recipe}, stored in {options.dtype}," if options.recipe else options.dtype
        print(f"{wrapper} in {how} on {world} processes ({device.type}), {text.source}")

    for step, (tokens, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss = model(tokens.to(device), targets.to(device))
        scaler.scale(loss).backward()
        # Delayed scales from the amax of all ranks; does nothing for other recipes.
        mixprec.update_scales(model, process_group=dist.group.WORLD)
        scaler.step(optimizer)  # unscales, clips, and steps on all ranks or on none
        scaler.update()
        if step % 10 == 9 or step + 1 == options.steps:
            mean = loss.detach().clone()  # reading it waits for the device: not at every step
            dist.all_reduce(mean)
            bits = mean.item() / world * BITS
            if rank == 0:
                skipped = int(optimizer.skipped)
                print(f"step {step + 1:4}: {bits:.3f} bits per byte, {skipped} skipped", flush=True)
    dist.barrier()  # no rank ends while others still work
    return 0 if math.isfinite(bits) else 1


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    if "RANK" not in os.environ:
        sys.exit("error: start it with: torchrun --nproc-per-node 2 examples/train_ddp.py")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return train(options, device)
    except gpt_data.TextError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip Python's shutdown: gloo's threads outlive destroy_process_group, and one that frees a
    # tensor during shutdown aborts the process with SIGABRT (once in some dozens of runs).
    os._exit(status)
