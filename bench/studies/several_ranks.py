r"""Training on several ranks, compared with one process, on CPUs (gloo): every way of
examples/train_ranks.py x recipe x optimizer x what a run can meet.

    python -m mixprec.bench.studies.several_ranks

Each run trains a small model for three steps, saves, and goes on for a fourth step on half as
many ranks. One process computes the same passes one after another, adds gradients up as the
ranks do, and takes the same steps. Compared are parameters, masters, moments, delayed scales and
norms; what several ranks have must be the same on each, bit for bit.

    overflow  a GradScaler, and an Inf in the gradients of one rank: all skip the second step
    clipping  max_grad_norm: the norm of each step
    restart   the state that was loaded is that which was saved, and the fourth step
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mixprec

from .. import results
from ..cases.registry import example
from ..environment import environment
from ..table import markdown

WAYS = {"ddp": 2, "zero1": 2, "fsdp": 2, "hsdp": 4, "tp": 2, "sp": 2, "tp-fsdp": 4, "pp": 2,
        "pp-fsdp": 4, "ep": 2}  # fmt: skip
IMPORTED = ["torch._dynamo", "mixprec.bench.studies.several_ranks"]
for _name in ("fsdp", "checkpoint", "optim", "pipelining", "tensor.parallel"):
    IMPORTED.append(f"torch.distributed.{_name}")
RESTARTED = {"pp-fsdp": "pp"}  # on half as many ranks, else in the same way
RECIPES = ("bf16", "fp8", "fp8-delayed", "mxfp8")
# An eps above the rounding errors of small gradients, which Adam would magnify.
ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", ADAMW),
    "AdamW, int8": ("AdamW", {**ADAMW, "state_dtype": "int8"}),
    "Muon": ("Muon", {"adamw": ADAMW, "lr": 1e-2}),
}
MAX_NORM, SAVED_AFTER, STEPS, BAD_STEP, BAD_RANK = 0.05, 3, 4, 1, 1
# Of each byte that a rank gives to a collective of n ranks, the bytes that it sends.
SENT: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: n - 1,
    "reducescatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "send": lambda n: 1,
}
OUTPUTS_FIRST = ("allgather", "reducescatter", "alltoall")
WIDTH, BLOCKS, BATCH, TIME = 64, 2, 8, 8
OUT = results.RESULTS / "several_ranks.json"
State = dict[str, torch.Tensor]  # whole tensors by name, the kind first: "master 1.mlp.0.weight"


class Cell(NamedTuple):
    way: str
    recipe: str
    optimizer: str

    @property
    def restart(self) -> tuple[str, int]:
        return RESTARTED.get(self.way, self.way), WAYS[self.way] // 2

    @property
    def cast(self) -> bool:
        """Whether parameters have 16 bits, and FP32 masters."""
        return self.optimizer == "AdamW"


CELLS = [Cell(*each) for each in itertools.product(WAYS, RECIPES, OPTIMIZERS)]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(256, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(step))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def kind_of(cell: Cell) -> tuple[Any, dict[str, Any]]:
    name, options = OPTIMIZERS[cell.optimizer]
    return getattr(mixprec.optim, name), {**options, "max_grad_norm": MAX_NORM}


# On the ranks


def make_run(cell: Cell, way: str) -> Any:
    run = example("train_ranks").Run(
        way, cell.recipe, *kind_of(cell), cast=cell.cast, scaled=True, width=WIDTH, blocks=BLOCKS
    )
    run.norms = []
    return run


def train(run: Any, step: int) -> None:
    run.backward(*(t.chunk(run.parts)[run.part].contiguous() for t in data(step)))
    if step == BAD_STEP:
        params = [p for p in run.model.parameters() if p.grad is not None]
        # Of a gradient that is placed otherwise, some of a rank's elements are not used.
        parts = [p for p in params if hasattr(p, "placements")]
        parts = [p for p in parts if p.grad.placements == p.placements and _part(p.grad).numel()]
        if parts or run.stages is not None:  # what no other rank has
            if dist.get_rank() == BAD_RANK:
                _part((parts or params)[0].grad).view(-1)[0] = math.inf
        else:
            _gradient(params[0]).view(-1)[0] = math.inf
    run.step()
    run.norms.append(getattr(run.optimizer, "optim", run.optimizer).grad_norm.item())


def _part(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def _gradient(p: torch.Tensor) -> torch.Tensor:
    main = getattr(p, "main_grad", None)
    return p.grad if main is None else main  # type: ignore[return-value]


def state_of(model: Any, optimizer: Any) -> State:
    """Parameters, buffers and the optimizer's state, as this rank has them."""
    names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
    found: State = {f"param {names[id(p)]}": p for p in model.parameters()}
    found |= {f"buffer {n.removeprefix('module.')}": b for n, b in model.named_buffers()}
    states = optimizer.fp32_state_dict()["state"]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in enumerate(params):
        for key, value in states.get(index, {}).items():
            found[f"{key} {names[id(p)]}"] = torch.as_tensor(value)
    return {name: t.detach().clone() for name, t in found.items()}


def _placed(t: Any) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """The part of this rank, where it begins, and the shape of the whole."""
    if not hasattr(t, "placements"):
        return t, (0,) * t.dim(), tuple(t.shape)
    from torch.distributed.tensor import _utils as utils

    _, at = utils.compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return t.to_local(), at, tuple(t.shape)


def gathered(run: Any) -> dict[str, Any] | None:
    """On rank 0: the state of all ranks, whole, and the names where those of two differ."""
    inner = getattr(run.optimizer, "optim", run.optimizer)
    mine = {name: _placed(t) for name, t in state_of(run.model, inner).items()}
    where = {"norms": run.norms, "scale": run.scaler.get_scale(), "parts": run.parts}
    where["skipped"] = int(run.scaler.skipped)
    others = {**where, "parts": None}
    all_: list[Any] = [None] * dist.get_world_size()
    dist.gather_object((mine, str(others)), all_ if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return None
    parts: dict[Any, torch.Tensor] = {}
    state: State = {}
    differ = set() if len({said for _, said in all_}) == 1 else {"norms, scale or skipped"}
    for name, (part, at, shape) in ((n, t) for theirs, _ in all_ for n, t in theirs.items()):
        if part.numel() and not torch.equal(parts.setdefault((name, *at), part), part):
            differ.add(name)
        whole = state.setdefault(name, torch.full(shape, math.nan, dtype=part.dtype))
        whole[tuple(slice(i, i + n) for i, n in zip(at, part.shape, strict=True))] = part
    return {**where, "state": state, "differ": sorted(differ)}


def on_rank(cells: Iterable[Cell], folder: str) -> None:
    """Train and save the cells of this number of ranks; restart those that others have saved."""
    for cell in cells:
        name = f"{folder}/{'-'.join(cell)}"
        for saves in (True, False):  # what 4 ranks save, 2 restart
            way, ranks = (cell.way, WAYS[cell.way]) if saves else cell.restart
            if ranks != dist.get_world_size() or not (saves or Path(f"{name}.saved.pt").exists()):
                continue
            found: dict[str, Any] | None = None
            try:
                run = make_run(cell, way)
                if saves:
                    wire = Wire()
                    for step in range(SAVED_AFTER - 1):
                        train(run, step)
                    with wire:
                        train(run, SAVED_AFTER - 1)
                    found = gathered(run)
                    run.save(name)
                else:
                    run.load(name)
                    loaded = gathered(run)
                    train(run, SAVED_AFTER)
                    found = gathered(run)
                    if found is not None:
                        found["loaded"] = loaded
                if found is not None and saves:
                    found["wire"] = dict(wire.bytes)
            except Exception as error:
                traceback.print_exc()  # the result has the sentence alone, without paths
                found = {"raised": f"{type(error).__name__}: {error}"}
            if dist.get_rank() == 0:
                print(*cell, "saved" if saves else "restarted", flush=True)
                torch.save(found, f"{name}.{'saved' if saves else 'restarted'}.pt")
            dist.barrier()


class Wire(TorchDispatchMode):
    """Bytes that a rank sends, as in rings of n ranks, by the kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        name = name.strip("_").replace("_", "")
        kind = next((kind for kind in SENT if name.startswith(kind)), None)
        if space not in ("c10d", "_c10d_functional") or kind is None:
            return result
        group = args[-1] if space == "_c10d_functional" else None
        if group is None:
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
            size = dist.ProcessGroup.unbox(boxed).size()
        else:
            size = dist.distributed_c10d._resolve_process_group(group).size()
        # Of c10d ops that have both, outputs come first.
        tensors = args[1] if space == "c10d" and kind in OUTPUTS_FIRST else args[0]
        given = sum(t.nbytes for t in tree_leaves(tensors))
        self.bytes[kind] += round(given * SENT[kind](size))
        return result


# In one process


@cache
def alone(
    cell: Cell, parts: tuple[int, ...], micro: int, wide: tuple[bool, ...]
) -> list[dict[str, Any]]:
    """The states after SAVED_AFTER and all steps. parts: of the batch in each step, micro: batches
    of each; wide: whether gradients of these are added in FP32."""
    train_ranks = example("train_ranks")
    model = train_ranks.make_model(WIDTH, BLOCKS, cell.way == "ep")
    mixprec.convert(model, cell.recipe)
    if cell.cast:
        train_ranks.cast_to_16_bits(model, cell.way)
    kind, options = kind_of(cell)
    optimizer, scaler = kind(model.parameters(), **options), mixprec.GradScaler()
    norms, found = [], []
    for step, count in enumerate(parts):
        params = dict(model.named_parameters())
        total = [torch.zeros(p.shape) for p in params.values()]
        for part in zip(*(t.chunk(count) for t in data(step)), strict=True):
            sums = None
            for x, y in zip(*(t.chunk(micro) for t in part), strict=True):
                used = params
                if not cell.cast and (wide[step] or cell.way == "hsdp"):
                    used = {name: p.to(torch.bfloat16) for name, p in params.items()}
                loss = train_ranks.loss_of(torch.func.functional_call(model, used, x), y)
                grads = torch.autograd.grad(scaler.scale(loss), [*used.values()])
                grads = [g.float() for g in grads] if wide[step] else grads
                sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
            total = [t + g.float() / micro for t, g in zip(total, sums, strict=True)]
        for p, t in zip(params.values(), total, strict=True):
            if cell.way in ("ddp", "zero1", "ep") and p.dtype == torch.bfloat16 and p.dim() < 3:
                p.main_grad = t / count
                p.main_grad.is_copy_of_grad = True
                p.grad = p.main_grad.to(p.dtype)
            else:
                p.grad = (t / count).to(p.dtype)
        if step == BAD_STEP:
            _gradient(next(iter(params.values()))).view(-1)[0] = math.inf
        mixprec.update_scales(model)
        scaler.step(optimizer)
        scaler.update()
        for p in params.values():
            p.grad = p.main_grad = None
        norms.append(optimizer.grad_norm.item())
        if step + 1 in (SAVED_AFTER, STEPS):
            found.append({"norms": [*norms], "state": state_of(model, optimizer)})
    return found


def difference(state: State, want: State, start: State) -> float:
    """The largest of all tensors: of parameters, in units of what training has moved them."""
    if state.keys() != want.keys():
        raise ValueError(f"several_ranks: other names: {sorted(state.keys() ^ want.keys())[:4]}")
    largest = 0.0
    for name, b in want.items():
        kind, _, key = name.partition(" ")
        if kind == "param" and f"master {key}" in want:
            a = state[name]
            if not torch.equal(a, state[f"master {key}"].to(a.dtype)):
                return math.inf  # it must be the master, rounded
        elif not name.endswith(".scale") and not torch.equal(
            state[name], b
        ):  # it is of the history
            moved = b - start[f"param {key}"] if kind in ("param", "master") else b
            error = (state[name].double() - b.double()).norm() / moved.double().norm()
            largest = max(largest, error.item() if error.isfinite() else math.inf)
    return largest


def judged(cell: Cell, saved: dict[str, Any], restarted: dict[str, Any]) -> dict[str, Any]:
    """What became of each event: the largest difference to one process, 0.0 for none."""
    row: dict[str, Any] = {**cell._asdict(), "ranks": WAYS[cell.way], "restart": cell.restart}
    for found in (saved, restarted):
        if "raised" in found:
            return row | {"raised": found["raised"]}
    parts = (saved["parts"],) * SAVED_AFTER + (restarted["parts"],) * (STEPS - SAVED_AFTER)
    ways = (cell.way,) * SAVED_AFTER + (cell.restart[0],) * (STEPS - SAVED_AFTER)
    micro, wide = 2 if "pp" in cell.way else 1, tuple("fsdp" in way for way in ways)
    before, after = alone(cell, parts, micro, wide)
    model = example("train_ranks").make_model(WIDTH, BLOCKS, cell.way == "ep")
    start = {f"param {n}": p.detach() for n, p in model.named_parameters()}
    norms = zip(saved["norms"], before["norms"], strict=True)
    finite = [(a, b) for a, b in norms if math.isfinite(b)]
    skips = (saved["scale"], saved["skipped"]) == (2.0**15, 1)
    clips = all(b > MAX_NORM for _, b in finite) and len(finite) == SAVED_AFTER - 1
    first = difference(saved["state"], before["state"], start)
    loaded = difference(restarted["loaded"]["state"], saved["state"], start)
    row |= {"overflow": first if skips else math.inf}
    row |= {"clipping": max(abs(a - b) / b for a, b in finite) if clips else math.inf}
    row |= {"loaded": loaded, "restarted": difference(restarted["state"], after["state"], start)}
    differ = saved["differ"] + restarted["differ"] + restarted["loaded"]["differ"]
    return row | {"ranks differ": differ, "wire": saved["wire"]}


def outcome(row: dict[str, Any]) -> str:
    """The largest difference to one process, and to what was saved."""
    if "raised" in row:
        return "refused"
    if row["ranks differ"]:
        return "ranks differ"
    largest = max(row[event] for event in ("overflow", "clipping", "restarted"))
    loaded = "" if row["loaded"] == 0 else f", loaded {row['loaded']:.0e}"
    return ("equal" if largest < 1e-12 else f"{largest:.0e}") + loaded


def block(content: dict[str, Any]) -> str:
    """For docs/several_ranks.md: the matrix, what is refused, and the bytes on the wire."""
    rows = {(r["way"], r["optimizer"], r["recipe"]): r for r in content["rows"]}
    keys = [(w, o) for w in WAYS for o in OPTIMIZERS if any((w, o, r) in rows for r in RECIPES)]
    cells = [[rows.get((*key, recipe)) for recipe in RECIPES] for key in keys]
    body = [
        (*key, *("not run" if row is None else outcome(row) for row in line))
        for key, line in zip(keys, cells, strict=True)
    ]
    said = sorted({(r["way"], r["optimizer"], r["raised"]) for r in rows.values() if "raised" in r})
    sent = [r for r in rows.values() if r["optimizer"] == "AdamW" and "wire" in r]
    wire = [  # delayed scales are what recipes add
        (r["way"], r["recipe"], *(f"{r['wire'].get(k, 0):,}" for k in SENT))
        for r in sorted(sent, key=lambda r: list(WAYS).index(r["way"]))
        if r["recipe"] in ("bf16", "fp8-delayed")
    ]
    where = content["environment"]
    return "\n\n".join(
        [
            markdown(("way", "optimizer", *RECIPES), body),
            "\n".join(f"- {way}, {name}, refused: `{text}`" for way, name, text in said),
            "Bytes that a rank sends in a step of this model with AdamW, by collective:",
            markdown(("way", "recipe", *SENT), wire),
            f"gloo, torch {where['torch']}, commit {where['commit']}.",
        ]
    )


# The program


def _rank_main(rank: int, world: int, cells: list[Cell], folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("mixprec").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    on_rank(cells, folder)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive their group


def on_ranks(world: int, cells: list[Cell], folder: str) -> None:
    """RuntimeError if a rank ends before the others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    arguments = [(rank, world, cells, folder) for rank in range(world)]
    ranks = [context.Process(target=_rank_main, args=a, daemon=True) for a in arguments]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"several_ranks: of {world} ranks {[r.exitcode for r in ranks]} ended")


def pairwise() -> list[Cell]:
    """All pairs of a way, a recipe and an optimizer."""
    ways, recipes, kinds = list(WAYS), RECIPES, list(OPTIMIZERS)
    at = itertools.product(range(len(ways)), range(len(recipes)))
    return [Cell(ways[i], recipes[j], kinds[(i + j) % len(kinds)]) for i, j in at]


def measured(cells: list[Cell]) -> Iterator[dict[str, Any]]:
    """Some at a time, so that little is lost."""
    for start in range(0, len(cells), 40):
        some = cells[start : start + 40]
        with tempfile.TemporaryDirectory() as folder:
            for world in (4, 2, 1):
                on_ranks(world, some, folder)
            for cell in some:
                name = f"{folder}/{'-'.join(cell)}"
                yield judged(cell, *(torch.load(f"{name}.{w}.pt") for w in ("saved", "restarted")))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON to write (%(default)s)")
    parser.add_argument("--pairwise", action="store_true", help="a third of the runs: all pairs")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the file has")
    options = parser.parse_args(argv)
    rows = results.read_json(options.out)["rows"] if options.resume else []
    known = {(row["way"], row["recipe"], row["optimizer"]) for row in rows}
    cells = sorted(CELLS, key=lambda cell: cell not in pairwise())
    cells = [cell for cell in cells if cell not in known]
    where = environment(quick=False)
    for row in measured([cell for cell in cells if not options.pairwise or cell in pairwise()]):
        rows.append(row)
        results.write_json(options.out, {"environment": where, "rows": rows})
        print(row, flush=True)
    print(block(results.read_json(options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
