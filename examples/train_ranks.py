"""Train one small language model on several ranks, in each way that mixprec is tested with.

    torchrun --nproc-per-node 2 examples/train_ranks.py --way ddp [--recipe fp8] [--scale] ...

  ddp      each rank has the whole model and other data
  zero1    ... and the optimizer's state of a part of the parameters (ZeroRedundancyOptimizer)
  fsdp     each rank has a part of each parameter, gradient and state (fully_shard)
  hsdp     ... of two ranks, which are copied to the other pairs
  tp       each rank computes a part of each product (parallelize_module)
  sp       ... and has a part of the sequence between them
  tp-fsdp  tp over two ranks, fsdp over the others
  pp       each rank has some of the blocks (GPipe)
  pp-fsdp  pp over two ranks, fsdp over the others
  ep       each rank has some of the experts of a mixture, and other data

--save FOLDER writes a checkpoint at the end; --load FOLDER goes on from it, on any number of ranks.
Runs on GPUs if there are any (one per rank, NCCL), otherwise on the CPU (gloo).
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import sys
from collections import OrderedDict
from typing import Any

import gpt_data
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel

import mixprec
from mixprec.distributed import reduce_gradients_in_fp32

MESHES = {  # the dimensions of ranks; one alone, unless said
    "hsdp": ("replicate", "shard"),
    "tp-fsdp": ("shard", "tensor"),
    "pp-fsdp": ("stage", "shard"),
    **{"ddp": ("data",), "zero1": ("data",), "fsdp": ("shard",), "tp": ("tensor",)},
    **{"sp": ("tensor",), "pp": ("stage",), "ep": ("data",)},
}
BYTES, HEAD, EXPERTS = 256, 16, 4
# Of an optimizer's state: stages of a pipeline have other parameters in their groups.
FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)


class Attention(nn.Module):
    """Of all heads, or, with a part of each weight, of some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Of four experts each has the tokens at every fourth position. Where a rank has some of them
    (DTensors), tokens travel to their expert and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) * (2 * width) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, W], T a multiple of EXPERTS
        up, down = (w.to_local() if hasattr(w, "to_local") else w for w in (self.up, self.down))
        here, ranks, width = len(up), EXPERTS // len(up), x.shape[-1]
        tokens = x.unflatten(1, (-1, EXPERTS)).permute(2, 0, 1, 3)  # by expert
        rows = self.travel(tokens.reshape(-1, width), ranks).view(ranks, here, -1, width)
        rows = rows.transpose(0, 1).reshape(-1, width)
        ends = torch.arange(1, here + 1, dtype=torch.int32, device=x.device) * (len(rows) // here)
        h = F.gelu(F.grouped_mm(rows, up.transpose(1, 2), offs=ends))
        y = F.grouped_mm(h, down.transpose(1, 2), offs=ends).view(here, ranks, -1, width)
        y = self.travel(y.transpose(0, 1).reshape(-1, width), ranks)
        return y.view_as(tokens).permute(1, 2, 0, 3).flatten(1, 2)

    @staticmethod
    def travel(rows: torch.Tensor, ranks: int) -> torch.Tensor:
        group: Any = dist.group.WORLD
        return all_to_all_single_autograd(rows, None, None, group) if ranks > 1 else rows


class Block(nn.Module):
    def __init__(self, width: int, experts: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width)
        dense = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = Experts(width) if experts else nn.Sequential(*dense)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def make_model(width: int, blocks: int, experts: bool) -> nn.Sequential:
    """Tokens [B, T] -> logits [B, T, BYTES]; experts in every other block."""
    torch.manual_seed(0)  # the same weights everywhere
    inner = [Block(width, experts and i % 2 == 1) for i in range(blocks)]
    head = nn.Linear(width, BYTES, bias=False)
    return nn.Sequential(nn.Embedding(BYTES, width), *inner, nn.RMSNorm(width), head)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def cast_to_16_bits(model: nn.Module, way: str) -> None:
    """With FP32 masters; ZeroRedundancyOptimizer wants one dtype, also of the norms."""
    if way == "zero1":
        model.to(torch.bfloat16)
    else:
        mixprec.cast_parameters(model, torch.bfloat16)


def data_parallel(model: nn.Module) -> nn.Module:
    # Delayed scaling: rank 0's amax must not overwrite that of others. (torch 2.13 renamed it.)
    names = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    ddp = DistributedDataParallel(model, **{sync: False})
    reduce_gradients_in_fp32(ddp)
    return ddp


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """In what fully_shard gathers at once, parameters have one dtype: norms, FP32, are by
    themselves. Parameters that are all FP32 are gathered in BF16."""
    low = any(p.dtype == torch.bfloat16 for p in model.parameters())
    dtype = None if low else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    norms = [m for m in model.modules() if isinstance(m, nn.RMSNorm)] if low else []
    for module in (*norms, *(m for m in model if m not in norms), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh, sequence: bool) -> None:
    """sequence: x is sharded along it between the products."""
    at = Shard(1) if sequence else Replicate()
    for block in (m for m in model if isinstance(m, Block)):
        whole = tp.PrepareModuleInput(input_layouts=at, desired_input_layouts=Replicate())
        plan: dict[str, Any] = {"attention": whole, "mlp": whole}
        plan |= {f"attention.{name}": tp.ColwiseParallel() for name in "qkv"}
        plan |= {"attention.out": tp.RowwiseParallel(output_layouts=at)}
        plan |= {"mlp.0": tp.ColwiseParallel(), "mlp.2": tp.RowwiseParallel(output_layouts=at)}
        if sequence:
            plan |= {"norm1": tp.SequenceParallel(), "norm2": tp.SequenceParallel()}
        tp.parallelize_module(block, mesh, plan)
    last = len(model) - 1
    plan = {"0": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=at)}
    plan[str(last)] = tp.ColwiseParallel(input_layouts=at, output_layouts=Replicate())
    if sequence:
        plan[str(last - 1)] = tp.SequenceParallel()
    tp.parallelize_module(model, mesh, plan)


def split_experts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank keeps some of the experts; DDP averages the gradients of all else."""
    parts = []
    for prefix, module in model.named_modules():
        if isinstance(module, Experts):
            for name, p in module.named_parameters(recurse=False):
                part = distribute_tensor(p.detach(), mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(part))
                parts.append(f"{prefix}.{name}")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, parts)
    return data_parallel(model)


class Run:
    """A model, distributed, with its optimizer and scaler.

    kind, options: of the optimizer. cast: parameters of 16 bits, with FP32 masters; else FP32 ones
    (fsdp). part, parts: of the data, which ones this rank has.
    """

    def __init__(
        self,
        way: str,
        recipe: str,
        kind: Any,
        options: dict[str, Any],
        *,
        cast: bool = True,
        scaled: bool = False,
        width: int = 64,
        blocks: int = 4,
        device: str = "cpu",
    ) -> None:
        names, world = MESHES[way], dist.get_world_size()
        sizes = (2, world // 2) if way == "pp-fsdp" else (world // 2, 2)
        sizes = sizes if len(names) == 2 else (world,)
        self.mesh = mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
        self.part, self.parts = 0, 1
        for name in names:
            if name not in ("tensor", "stage"):
                self.part = self.part * mesh[name].size() + mesh[name].get_local_rank()
                self.parts *= mesh[name].size()
        # Ranks that hold other parameters, and ranks that share the model.
        self.stages = mesh["stage"].get_group() if "stage" in names else None
        self.sharing = {"pp": None, "pp-fsdp": "shard"}.get(way, dist.group.WORLD)
        if self.sharing == "shard":
            self.sharing = mesh["shard"].get_group()
        self.scaler = mixprec.GradScaler(enabled=scaled, process_group=self.stages)

        model = make_model(width, blocks, way == "ep").to(device)
        mixprec.convert(model, recipe)  # before anything wraps or shards its layers
        if cast:
            cast_to_16_bits(model, way)
        if "tensor" in names:
            tensor_parallel(model, mesh["tensor"], way == "sp")
        self.schedule: Any = None
        if "stage" in names:
            model = self.pipeline(model, mesh["stage"], device)
        if "shard" in names:
            model = shard(model, mesh if way == "hsdp" else mesh["shard"])
        if way == "ep":
            model = split_experts(model, mesh)
        elif "data" in names:
            model = data_parallel(model)
        self.model, params = model, list(model.parameters())
        if way == "zero1":
            self.optimizer: Any = ZeroRedundancyOptimizer(params, kind, **options)
        else:
            self.optimizer = kind(params, **options, process_group=self.stages)
        experts = (m for m in model.modules() if isinstance(m, Experts))
        self.experts = [p for m in experts for p in m.parameters()]

    def pipeline(self, model: nn.Sequential, mesh: DeviceMesh, device: str) -> nn.Sequential:
        """The blocks of this rank's stage, under the names that they have in the model."""
        stages, index = mesh.size(), mesh.get_local_rank()
        cuts = [0, *(1 + i * (len(model) - 3) // stages for i in range(1, stages)), len(model)]
        mine = OrderedDict((str(i), model[i]) for i in range(cuts[index], cuts[index + 1]))
        self.losses: list[torch.Tensor] = []

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.losses.append(loss_of(logits, targets))
            return self.scaler.scale(self.losses[-1])

        part = nn.Sequential(mine)
        group = mesh.get_group()
        self.stage = PipelineStage(part, index, stages, torch.device(device), group=group)
        self.schedule = ScheduleGPipe(self.stage, 2, loss_fn=loss)
        return part

    def backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """The loss of this rank's part; None on a stage that has none."""
        loss = None
        if self.schedule is None:
            loss = loss_of(self.model(tokens), targets)
            self.scaler.scale(loss).backward()
        else:
            self.losses.clear()
            arguments = (tokens,) if self.stage.is_first else ()
            self.schedule.step(*arguments, target=targets if self.stage.is_last else None)
            loss = torch.stack(self.losses[-2:]).mean() if self.losses else None
        for p in self.experts:  # which have the sum of all ranks' tokens, and DDP's average
            p.grad /= self.parts
        return loss

    def step(self) -> None:
        # Delayed scales from the amax of all ranks; does nothing for other recipes.
        mixprec.update_scales(self.model, self.sharing)
        self.scaler.step(self.optimizer)  # unscales, clips, and steps on all ranks or on none
        self.scaler.update()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def save(self, folder: str) -> None:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict()  # to rank 0
            if dist.get_rank() == 0:
                found = (self.model.state_dict(), self.optimizer.state_dict())
                os.makedirs(folder, exist_ok=True)
                torch.save((*found, self.scaler.state_dict()), f"{folder}/zero1.pt")
            dist.barrier()
        else:
            dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            model, optimizer, scaler = torch.load(f"{folder}/zero1.pt")
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
        else:
            state = self.state()
            dcp.load(state, checkpoint_id=folder)
            model, optimizer, scaler = state.values()
            both = {"model_state_dict": model, "optim_state_dict": optimizer}
            states.set_state_dict(self.model, self.optimizer, **both, options=FLAT)
        self.scaler.load_state_dict(scaler)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train one small language model on several ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--way", choices=MESHES, default="ddp", help="how the ranks divide the work")
    add("--recipe", default="bf16", help="of the linear layers: bf16, fp8, fp8-delayed, mxfp8, ...")
    add("--fp32-params", action="store_true", help="in place of 16 bits with FP32 masters")
    add("--scale", action="store_true", help="scale the loss")
    add("--save", metavar="FOLDER", help="write a checkpoint at the end")
    add("--load", metavar="FOLDER", help="go on from a checkpoint, of any number of ranks")
    add("--text", metavar="FILE", help="train on this file (default: Python's standard library)")
    add("--steps", type=int, default=60, help="training steps")
    add("--batch", type=int, default=16, help="sequences per step, of all ranks")
    add("--context", type=int, default=64, help="bytes per sequence, a multiple of 4")
    add("--blocks", type=int, default=4, help="transformer blocks")
    add("--width", type=int, default=64, help="size of the residual stream, a multiple of 16")
    options = parser.parse_args(argv)
    try:
        options.recipe = mixprec.Recipe.parse(options.recipe).name
    except ValueError as error:
        parser.error(f"--recipe: {error}")
    return options


def train(options: argparse.Namespace, device: str) -> int:
    text = gpt_data.load(options.text, options.context)
    run = Run(
        options.way,
        options.recipe,
        mixprec.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0},
        cast=not options.fp32_params,
        scaled=options.scale,
        width=options.width,
        blocks=options.blocks,
        device=device,
    )
    if options.load:
        run.load(options.load)
    seed = 1 if options.load else 0
    batches = gpt_data.Batches(text.train, options.batch, options.context, options.steps, seed)
    for step, batch in enumerate(batches):
        loss = run.backward(*(t.chunk(run.parts)[run.part].to(device) for t in batch))
        run.step()
        if step % 10 == 9 or step + 1 == options.steps:
            mean = torch.zeros(2, device=device)  # their sum, and of how many ranks
            if loss is not None:
                mean += torch.stack([loss.detach(), torch.ones_like(loss)])
            dist.all_reduce(mean)
            bits = (mean[0] / mean[1]).item() / math.log(2)
            if dist.get_rank() == 0:
                print(f"step {step + 1:4}: {bits:.3f} bits per byte", flush=True)
    if options.save:
        run.save(options.save)
    dist.barrier()  # no rank ends while others still work
    return 0 if math.isfinite(bits) else 1


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    if "RANK" not in os.environ:
        sys.exit("error: start it with: torchrun --nproc-per-node 2 examples/train_ranks.py")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
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
