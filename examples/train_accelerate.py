"""Train a small GPT with Accelerate, in FP8 with FP32 masters, on one or several processes.

    pip install accelerate
    python examples/train_accelerate.py [--recipe fp8] [--dtype bf16] [--steps 40]
    torchrun --nproc-per-node 2 examples/train_accelerate.py

Lines marked with (*) differ from a program without mixprec. The text is the source code of Python's
standard library. `accelerator.save_state` and `load_state` include masters, scales and the scaler.
"""

from __future__ import annotations

import argparse
import math

import gpt_data
import torch
from gpt_model import GPT, GPTConfig
from needs import needs

import mixprec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT with Accelerate.")
    parser.add_argument("--recipe", default="fp8", help="fp8, fp8-delayed, bf16, fp16, ...")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the parameters")
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    options = parser.parse_args()
    with needs("accelerate"):
        from accelerate import Accelerator

        from mixprec.integrations.accelerate import attach  # (*)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    scaler = mixprec.GradScaler() if "fp16" in (options.recipe, options.dtype) else None  # (*)
    attach(accelerator, scaler)  # (*)
    torch.manual_seed(0)
    model = mixprec.convert(GPT(GPTConfig(2, 128, 2, 64)), options.recipe)  # (*)
    mixprec.cast_parameters(model, DTYPES[options.dtype])  # (*)
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)  # (*)
    calls = options.steps * accelerator.num_processes  # Accelerate steps schedulers once for each
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, calls)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train, seed = gpt_data.load(None, 64).train, accelerator.process_index
    for step, (x, y) in enumerate(gpt_data.Batches(train, 4, 64, 2 * options.steps, seed)):
        with accelerator.accumulate(model):
            loss = model(x.to(accelerator.device), y.to(accelerator.device))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()  # stays where a step was skipped
            optimizer.zero_grad()
        if step % 20 == 19:
            bits, lr = loss.item() / math.log(2), scheduler.get_last_lr()[0]
            accelerator.print(f"step {step // 2 + 1:3}: {bits:.3f} bits, {norm=:.3f}, {lr=:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
