"""torchtitan's small Llama, converted by MixprecConverter: in one process, and for torchrun

    torchrun --nproc-per-node 2 titan_ranks.py

the losses of two ranks, FSDP2 and then tensor and sequence parallel, against those of one.

torchtitan's attention has no backward pass on a CPU, and the device of its meshes is that of a GPU:
both are replaced here. All else is its own code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from mixprec.integrations.torchtitan import MixprecConverter

BACKEND = "partial_dtensor"


def attention(
    self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, attention_masks: Any = None, **_: Any
) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2)


FlexAttention.forward = attention


def built(recipe: str | None, is_split: bool = False) -> tuple[Any, Any]:
    """The specification and the model; recipe None: as torchtitan has it."""
    config = recipe and MixprecConverter.Config(recipe=recipe, overrides={"lm_head": None})
    spec = model_registry("debugmodel", converters=[config] if config else None)
    if is_split:
        set_llama3_sharding_config(spec.model, enable_sp=True)
    torch.manual_seed(0)
    model = spec.model.build()
    model.verify_module_protocol()
    model.init_weights()
    return spec, model


def losses(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(100, (3, 2, 64), generator=torch.Generator().manual_seed(1))
    found = []
    for step in tokens:
        y = model(step)
        y = y.full_tensor() if hasattr(y, "full_tensor") else y
        loss = F.cross_entropy(y.float().flatten(0, 1), step.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def split(recipe: str, tp: int) -> Any:
    spec, model = built(recipe, is_split=True)
    sizes = {"dp_replicate": 1, "dp_shard": 2 // tp, "cp": 1, "tp": tp, "pp": 1, "ep": 1}
    dims = ParallelDims(**sizes, world_size=2, spmd_backend=BACKEND)
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend=BACKEND),
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no other
            module.set_force_sum_reduction_for_comms(True)
    return model


def main() -> None:
    parallel_dims.device_type = "cpu"
    dist.init_process_group("gloo")
    for recipe in ("fp8", "fp8-rowwise"):
        expected = losses(built(recipe)[1])
        for tp in (1, 2):
            got = losses(split(recipe, tp))
            # Gradients of two equal batches are summed, which AdamW divides by their size again.
            print(recipe, tp, got, expected)
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
