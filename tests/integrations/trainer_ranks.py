"""A program for torchrun: trains with delayed scales, resumes, and compares runs and ranks.

torchrun --nproc-per-node 2 trainer_ranks.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from by_hand import DELAYED, assert_same_bits
from test_transformers import LowPrecision, arguments, dataset, tiny_model

FOLDER = Path(sys.argv[1])
BUFFERS = {"ddp_broadcast_buffers": False}


def train(resume: str | None, **settings: bool) -> dict[str, torch.Tensor]:
    trainer = LowPrecision(
        tiny_model(),
        arguments(FOLDER, max_steps=8, save_steps=4, **settings),
        train_dataset=dataset(),
        recipe=DELAYED,
        params=torch.bfloat16,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.state_dict()


with pytest.raises(ValueError, match=r"args.ddp_broadcast_buffers must be False.*got None"):
    train(None)
state = train(None, **BUFFERS)
assert_same_bits(train(str(FOLDER / "checkpoint-4"), **BUFFERS), state)
states = [None, None]
torch.distributed.all_gather_object(states, state)
assert_same_bits(states[0], states[1])
scales = [v for name, v in state.items() if name.endswith(".scale")]
print(f"{len(scales)} layers with the same scales", flush=True)
torch.distributed.destroy_process_group()
