"""Run a function on several ranks: processes of this machine that talk through gloo.

    results = on_ranks(4, train, steps=3)      # what train(steps=3) returned, by rank

The processes are forked from a server that has imported torch once, which saves seconds for each.
Still, starting a group is what takes longest: let one function do several checks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = 20.0  # seconds that a rank waits for the others
TIMEOUT = 120  # seconds that a test gives all its ranks
KILLED = "killed"  # in place of the result of a rank that ended its own process
PRELOAD = (  # torch._dynamo, which DDP imports, takes longest
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "mixprec",
)


def _rank_main(
    rank: int,
    world: int,
    folder: str,
    timeout: float,
    function: Callable[..., Any],
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    out = Path(folder) / f"{rank}.pt"
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(Path(folder) / "store"), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        result = {"returned": function(**options)}
        with contextlib.suppress(RuntimeError):  # a rank may be gone: its own result says why
            dist.barrier()
    except BaseException:
        result = {"raised": traceback.format_exc()}
    partial = out.with_suffix(".partial")
    torch.save(result, partial)
    partial.replace(out)
    # Without the group's destructor, which may wait for ranks that are gone.
    sys.stdout.flush()
    os._exit(0)


def on_ranks(
    world: int, function: Callable[..., Any], *, timeout: float = GROUP_TIMEOUT, **options: Any
) -> list[Any]:
    """What `function(**options)` returned on each rank, or KILLED where it ended its process.

    Both must be picklable. timeout: seconds until a rank gives up on the others. Raises
    AssertionError with the tracebacks where a rank raised or hung; no process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, function.__module__])
    folder = tempfile.mkdtemp(prefix="mixprec-ranks-")
    ranks = [
        context.Process(
            target=_rank_main, args=(rank, world, folder, timeout, function, options), daemon=True
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        _join(ranks, folder)
        return _results(ranks, folder)
    finally:
        for process in ranks:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _join(ranks: list[Any], folder: str) -> None:
    """Until all have ended, TIMEOUT is over, or one has raised and the rest had 2 seconds."""
    end = time.monotonic() + TIMEOUT
    running = {process.sentinel for process in ranks}
    while running and (left := end - time.monotonic()) > 0:
        running -= set(multiprocessing.connection.wait(list(running), timeout=left))
        if any("raised" in result for result in _read(folder).values()):
            end = min(end, time.monotonic() + 2)


def _read(folder: str) -> dict[int, dict[str, Any]]:
    return {
        int(path.stem): torch.load(path, weights_only=False) for path in Path(folder).glob("*.pt")
    }


def _results(ranks: list[Any], folder: str) -> list[Any]:
    by_rank = _read(folder)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    raised = {rank: result["raised"] for rank, result in by_rank.items() if "raised" in result}
    if hung or raised:
        lines = [f"rank {rank} raised\n{text}" for rank, text in sorted(raised.items())]
        lines += [f"rank {rank} did not end and was killed" for rank in hung]
        raise AssertionError("\n".join(lines))
    return [by_rank.get(rank, {}).get("returned", KILLED) for rank in range(len(ranks))]
