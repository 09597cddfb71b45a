"""Train a small Llama with the Trainer of transformers, in FP8 with FP32 masters.

    pip install transformers accelerate
    python examples/train_transformers.py [--recipe fp8] [--dtype bf16] [--steps 40] [--resume]

The three lines marked with (1), (2) and (3) are all that differs from a program without mixprec.
The model starts from random weights, the text is the source code of Python's standard library.
--resume goes on from the last checkpoint in --output, to the end of --steps.
"""

from __future__ import annotations

import argparse

import gpt_data
import torch
from needs import needs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama with the Trainer.")
    parser.add_argument("--recipe", default="fp8", help="fp8, fp8-delayed, bf16, fp16, ...")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the parameters")
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--output", default="trainer_output", help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    options = parser.parse_args()
    with needs("transformers accelerate"):
        from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

        from mixprec.integrations.transformers import Trainer  # (1) not from transformers
    windows = gpt_data.Batches(gpt_data.load(None, 64).train, 1, 64, 8 * options.steps, seed=0)
    samples = [{"input_ids": x[0], "labels": x[0]} for x, _ in windows]
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes, use_cache=False)
    args = TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=3e-3,
        warmup_steps=5,
        logging_steps=5,
        save_steps=20,
        report_to="none",
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=samples,
        recipe=options.recipe,  # (2)
        params=DTYPES[options.dtype],  # (3)
    )
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
