"""What a record of `_masters` holds for its parameter: its forms, and how one becomes another.

A record is a dict. It holds one of
    "master"     the FP32 values, of which the parameter is the rounding
    "remainder"  int16 or int8: the bits of them that a BF16 parameter lacks
or neither, where the parameter is all there is; beside it
    "previous"   the FP32 values before load_state_dict set the master: those that count where
                 16-bit weights are loaded back, as after an evaluation
    "other"      True where load_state_dict has loaded 16 bits that are not the master rounded
    "fresh"      True where an optimizer's state was loaded, and the weights may be loaded next
    "optimizer"  the number of the optimizer that updates it, whose state has the same tensor
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ._local_gradients import LOW_PRECISION, is_sharded, local
from .ops import export_master
from .ops._reference.rounding import lower_half, remainder_of, upper_half

FORMS = ("master", "remainder")
Record = dict[str, Any]


def values(param: torch.Tensor, record: Record) -> torch.Tensor:
    """The FP32 values: the parameter's own where nothing is known, or where other code has written
    it since."""
    p = param.detach()
    if not record or param.is_meta:
        return p.float()
    place(param, record)
    if p.dtype not in LOW_PRECISION:
        return like(param, widened(local(p), record))
    if "remainder" in record and p.dtype == torch.bfloat16:
        return like(param, export_master(local(p), local(record["remainder"])))
    return like(param, current(local(p), record))


def place(param: torch.Tensor, record: Record) -> None:
    """Move the record to the device of the parameter, and shard it as that is."""
    for name in (*FORMS, "previous"):
        t = record.get(name)
        if not isinstance(t, torch.Tensor):
            continue
        if t.is_meta and not param.is_meta:
            del record[name]
            continue
        if t.shape != param.shape:
            del record[name]
            warnings.warn(
                f"the FP32 values of a parameter of shape {tuple(t.shape)} are lost, because it "
                f"has shape {tuple(param.shape)} now: use fully_shard (FSDP2), which keeps the "
                "shape, or call cast_parameters after what changes it",
                stacklevel=2,
            )
            continue
        if is_sharded(param) and not is_sharded(t):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
            # Each rank has all of it, and takes its part, as fully_shard does.
            t = distribute_tensor(t.to(param.device), mesh, placements, src_data_rank=None)
        elif is_sharded(t) and is_sharded(param) and t.device_mesh != param.device_mesh:  # type: ignore[attr-defined]
            t = like(param, _cut(t, param))
        if t.device != param.device:
            t = t.to(param.device)
        record[name] = t


def _cut(t: Any, param: Any) -> torch.Tensor:
    """This rank's part of a split tensor after fully_shard has cut the parts along other dimensions
    of the mesh."""
    part, mesh, kept = t.to_local(), param.device_mesh, t.device_mesh.mesh_dim_names or ()
    for i, (name, placement) in enumerate(
        zip(mesh.mesh_dim_names or (), param.placements, strict=False)
    ):
        if name not in kept and not placement.is_replicate():
            chunks = part.chunk(mesh.size(i), placement.dim)
            rank = mesh.get_local_rank(i)
            part = chunks[rank] if rank < len(chunks) else part.narrow(placement.dim, 0, 0)
    if part.shape != local(param).shape:
        raise RuntimeError(
            f"the FP32 values of a parameter are split over {t.device_mesh}, and the parameter "
            f"over {mesh}: call cast_parameters after what splits it"
        )
    return part.contiguous()


def distribute(before: torch.Tensor | None, param: torch.Tensor, record: Record) -> None:
    """Where a plain parameter becomes a DTensor, on all ranks at once: the record becomes that of
    the first rank if the values do, as parallelize_module takes them, and stays that of each rank
    where the values are its own, as fully_shard takes them."""
    if before is None or not is_sharded(param) or is_sharded(before) or param.is_meta:
        return
    if before.is_meta or before.shape != param.shape:
        return
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    with torch.no_grad():
        mine = distribute_tensor(before.detach(), mesh, placements, src_data_rank=None)
        flag = (local(mine) != local(param.detach())).any().int()
        if all(place.is_replicate() for place in placements):
            flag.fill_(1)  # the first rank's values have been written to `before`
        for group in mesh.get_all_groups():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group)
        if not flag:
            return
        for name, t in record.items():
            if isinstance(t, torch.Tensor) and t.shape == param.shape and not is_sharded(t):
                wide = (t if t.is_floating_point() else t.int()).to(param.device, copy=True)
                for group in mesh.get_all_groups():  # gloo sends no int16
                    dist.broadcast(wide, dist.get_global_rank(group, 0), group)
                record[name] = wide.to(t.dtype)  # of which each rank takes its part in `place`


def current(p: torch.Tensor, record: Record) -> torch.Tensor:
    """The FP32 values behind (the part of) a 16-bit parameter without a remainder for its dtype.
    No host sync."""
    if "remainder" in record:  # the model was cast since
        master = export_master(p.to(torch.bfloat16), local(record["remainder"]))
    elif "master" in record:
        master = local(record["master"])
    else:
        return p.float()
    follows = same(p, master)
    # As a whole, if 16-bit weights were loaded: then no bits of those before stay.
    kept = follows.all() if "other" in record else follows
    now = torch.where(kept, master, p.to(master.dtype))
    if "previous" in record:
        before = local(record["previous"])
        now = torch.where(~follows.all() & same(p, before).all(), before, now)
    return now


def settle(param: torch.Tensor, record: Record) -> None:
    """Take into the record what has been written to the parameter since."""
    p = local(param.detach())
    kept = "remainder" in record and p.dtype == torch.bfloat16
    if p.dtype in LOW_PRECISION and not kept and record.keys() & set(FORMS):
        now = current(p, record)
        if "master" in record:
            local(record["master"]).copy_(now)
        else:
            record.pop("remainder")
            record["master"] = like(param, now)
    for name in ("previous", "other", "fresh"):
        record.pop(name, None)


def load(param: torch.Tensor, record: Record, value: torch.Tensor) -> None:
    """Take FP32 values that are about to be loaded into the parameter: they become its master; of
    one that is not trained, only what will be cut off."""
    wide = value.detach().to(torch.float32, copy=True)
    before = values(param, record)
    has_values = not (before.is_meta or record.keys().isdisjoint(FORMS))
    if has_values and torch.equal(local(before), local(wide).to(before.device)):
        return  # of two remainders for it, the one that is there
    is_trained = param.requires_grad or "optimizer" in record
    record.clear()
    if is_trained:
        record["master"] = wide
        if has_values:
            record["previous"] = before
    else:
        record.update(cut_off(wide, wide.to(param.dtype)))


def cut_off(wide: torch.Tensor, low: torch.Tensor) -> Record:
    """What rounding has cut off of a parameter that is not trained: 16 bits of BF16, or nothing."""
    if low.is_meta or all(torch.equal(n.to(w.dtype), w) for n, w in _pieces(low, wide)):
        return {}
    if low.dtype != torch.bfloat16:
        return {"master": wide.float()}
    remainder = torch.empty_like(low, dtype=torch.int16)
    for r, n, w in _pieces(remainder, low, wide):
        r.copy_(remainder_of(w.float(), n))
    return {"remainder": remainder}


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same elements of each, so few that temporary values take little memory."""
    parts = [local(t) for t in tensors]
    if not all(t.is_contiguous() for t in parts):
        return iter([tuple(parts)])
    return zip(*(t.view(-1).split(1 << 16) for t in parts), strict=True)


def convert(param: torch.Tensor, record: Record, form: str, dtype: torch.dtype) -> None:
    p = local(param.detach())
    if form == "master":
        if "remainder" in record:
            wide = export_master(p, local(record.pop("remainder")))
            record["master"] = like(param, wide)
        elif "master" not in record:
            record["master"] = param.detach().to(torch.float32)
    elif "master" in record:
        wide = local(record.pop("master"))
        record["remainder"] = like(param, remainder_of(wide, p, dtype))
    elif "remainder" not in record:
        record["remainder"] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    elif record["remainder"].dtype != dtype:
        half = lower_half if dtype == torch.int16 else upper_half
        record["remainder"] = like(param, half(local(record["remainder"])))


def widened(p: torch.Tensor, record: Record) -> torch.Tensor:
    """The values of (the part of) a parameter that was cast to FP32, where other code has not
    written it."""
    wide = local(record["master"]) if "master" in record else None
    if wide is None:
        if "remainder" not in record:
            return p.float()
        wide = export_master(p.to(torch.bfloat16), local(record["remainder"]))
    follows = torch.stack([wide.to(dtype).to(p.dtype) == p for dtype in LOW_PRECISION]).any(0)
    return torch.where(follows, wide.to(p.dtype), p)


def same(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    rounded = master.to(param.dtype)
    return (rounded == param) | (rounded.isnan() & param.isnan())


def like(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor of which this rank has `part`, sharded as the parameter is."""
    if not is_sharded(param):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    shape, stride = param.shape, param.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
