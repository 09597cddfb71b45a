r"""What a training step of examples' GPT asks of a GPU: launches, and bytes outside of products.

    make cuda  # which makes what the fake CUDA device needs; then in build/run, for example
    PYTHONPATH=$PWD/../cuda/site:$PWD/../../examples ../cuda/venv/bin/python \
      ../../tests/emulated/device/run.py -m mixprec.bench.studies.step_counts --out FILE

Small models of one and of two blocks train on it. Launches: its runtime is asked before each
kernel of mixprec; an op of torch that is no view counts as one, of which some launch more, and so
does each pass of attention's core, in whose place zeros are written. An op whose kernel is Triton's
alone, of which the fake device has none, counts as often as its launcher launches.

Bytes: the sizes of the inputs and outputs of each op of torch and of mixprec, each element once for
each op, that is no view, no allocation, no product and not attention's core; their dimensions are
those that they have in the model of the full size. What an op writes in place counts as read and
written, but for those that do not read it. A kernel that reads its input twice counts less than
it moves, if that is not in the L2 cache.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mixprec
from mixprec.ops._dispatch import library
from mixprec.ops._dispatch.op import OPS, Op

from .. import device, table
from ..cases import gpt
from ..cases.registry import example
from ..environment import environment

BLOCKS, WIDTH, HEAD, CONTEXT, BATCH = 12, 1024, 64, 1024, 16
# Of the small model, each for one of the full size: a dimension says which it is.
SMALL = {"width": 128, "context": 48, "batch": 5}
_TOKENS, _HEADS = SMALL["context"] * SMALL["batch"], SMALL["width"] // HEAD
FULL = {
    SMALL["batch"]: BATCH,
    SMALL["context"]: CONTEXT,
    _TOKENS: BATCH * CONTEXT,
    **{n * SMALL["width"]: n * WIDTH for n in (1, 3, 4)},
    **{n * _HEADS: n * WIDTH // HEAD for n in (1, 2, 3)},
    **{n: n for n in (1, 3, HEAD // 2, HEAD, 256)},  # 256: bytes
}
FEW = 1024  # bytes of a tensor that is a few numbers in either
PARTS = ("forward", "backward", "step")
WAYS = {  # recipe, fuse, rotary positions and attention of torch
    "bf16, rotary in torch": ("bf16", False, True),
    "bf16": ("bf16", False, False),
    "bf16, fuse": ("bf16", True, False),
    "fp8, rotary in torch": ("fp8", False, True),
    "fp8, fuse, rotary in torch": ("fp8", True, True),
    "fp8": ("fp8", False, False),
    "fp8, fuse": ("fp8", True, False),
    "fp8-delayed": ("fp8-delayed", False, False),
    "fp8-delayed, fuse": ("fp8-delayed", True, False),
}
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm")  # of torch; ours begin with gemm
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
ONLY_WRITE = ("copy_", "fill_", "zero_")


class Ops(TorchDispatchMode):
    """Calls `see` for each op that is no view, while it is entered as a mode."""

    def see(self, name: str, given: dict[str, Any], moved: list[torch.Tensor]) -> None:
        """given: the arguments by name; moved: the tensors that are read or written, once each."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, schema = func(*args, **(kwargs or {})), func._schema
        name = schema.name.partition("::")[2].replace("_reference", "")
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | (kwargs or {})
        names = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        inputs = [x for n, x in given.items() if n != "out"]  # which is written only
        read, made, written = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
            for tree in (inputs, result, [given.get(n) for n in names])
        )
        memory = {x.untyped_storage()._cdata for x in read}
        written += [x for x in made if x.untyped_storage()._cdata not in memory]
        if written:
            self.see(name, given, [*(read[1:] if name in ONLY_WRITE else read), *written])
        return result


class Counts(Ops):
    """Launches on the fake device, always; bytes of ops, where it is entered as a mode."""

    def __init__(self) -> None:
        super().__init__()
        self._runtime = ctypes.CDLL("libcuda.so.1")
        self._runtime.gpu_on_cpu_launches.restype = ctypes.c_long
        self._runtime.gpu_on_cpu_set_launches.argtypes = (ctypes.c_long,)
        self._aside = False
        self.bytes: Counter[str] = Counter()

    @property
    def launches(self) -> int:
        return int(self._runtime.gpu_on_cpu_launches())

    @contextmanager
    def aside(self, launches: int) -> Iterator[None]:
        """Count what runs inside as so many launches, and its bytes not at all."""
        count, before = self.launches + launches, self._aside
        self._aside = True
        try:
            yield
        finally:
            self._runtime.gpu_on_cpu_set_launches(count)
            self._aside = before

    def see(self, name: str, given: dict[str, Any], moved: list[torch.Tensor]) -> None:
        product = name in PRODUCTS or name.startswith("gemm")
        if not (self._aside or product or name in ALLOCATIONS):
            self.bytes[name] += sum(map(_size, moved))


def _size(x: torch.Tensor) -> int:
    """Bytes, in the model of the full size, of the elements that are different ones in memory."""
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride != 0]
    few = x.itemsize * math.prod(sizes) <= FEW
    return x.itemsize * math.prod(sizes if few else [FULL[n] for n in sizes])


def launches_of(op: Op) -> int:
    """How often the launcher of an op's Triton kernel launches, in its source: itself, and in the
    functions of that file that it calls."""
    source = Path(mixprec.__file__).parent / "triton_kernels" / f"{op.triton}.py"
    body = ast.parse(source.read_text()).body
    functions = {f.name: f for f in body if isinstance(f, ast.FunctionDef)}

    def launches(name: str) -> int:
        called = [n.func for n in ast.walk(functions[name]) if isinstance(n, ast.Call)]
        names = [f.id for f in called if isinstance(f, ast.Name) and f.id in functions]
        return sum(isinstance(f, ast.Subscript) for f in called) + sum(map(launches, names))

    return launches(op.name)


@contextmanager
def of_triton_alone(counts: Counts) -> Iterator[None]:
    """Ops without a CUDA kernel count as the launches of their Triton kernel."""
    ops = [op for op in OPS.values() if op.triton and not library.has_cuda_kernel(op.name)]
    key = (None, torch.device("cuda", 0))

    def counted(op: Op) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with counts.aside(launches_of(op)):
                return op.handle("reference")(*args)

        return run

    chosen = [op for op in ops if op._prefers is None]
    before = [dict(op._chosen) for op in chosen]
    for op in chosen:
        op._chosen[key] = "cuda", counted(op)
    try:
        yield
    finally:
        for op, entries in zip(chosen, before, strict=True):
            op._chosen.clear()
            op._chosen.update(entries)


def core_of(counts: Counts) -> Callable[..., torch.Tensor]:
    """In the place of attention's core: results and gradients as FlashAttention lays them out."""

    def rows_first(x: torch.Tensor) -> torch.Tensor:  # [B, H, T, D], in memory [B, T, H, D]
        b, h, t, d = x.shape
        return x.new_zeros((b, t, h, d)).transpose(1, 2)

    class Core(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*qkv)
            with counts.aside(1):
                return rows_first(qkv[0])

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with counts.aside(1):
                return tuple(map(rows_first, ctx.saved_tensors))

    return Core.apply


def trained(way: str, blocks: int, counts: Counts) -> Iterator[str]:
    """Train on and on; yields the name of each part of a step before it runs."""
    width, context, batch = SMALL.values()
    recipe, fuse, in_torch = WAYS[way]
    examples = example("gpt_model")
    mixprec.nn.register_fusion(examples.Norm, gpt.layer_norm)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = examples.GPT(examples.GPTConfig(blocks, width, width // HEAD, context))
        tokens = torch.randint(256, (batch, context))
    mixprec.convert(model, recipe, fuse=fuse)
    mixprec.cast_parameters(model, torch.bfloat16)
    if in_torch:
        gpt.in_torch(model)
    core = core_of(counts)
    for block in model.blocks:
        block.attention.attend = core
    optimizer = mixprec.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    while True:
        yield "forward"
        loss = model(tokens, tokens)
        yield "backward"
        loss.backward()
        yield "step"
        optimizer.step()
        optimizer.zero_grad()


Part = dict[str, Any]


def count(way: str, blocks: int, value: Callable[[], Any], counts: Counts) -> Part:
    """What `value`, which grows, grew by in each part of the third step."""
    step, found = trained(way, blocks, counts), []
    for _ in range(3 * len(PARTS) + 1):
        next(step)
        found.append(value())
    last = found[-len(PARTS) - 1 :]
    return {part: last[i + 1] - last[i] for i, part in enumerate(PARTS)}


def measured(way: str) -> dict[str, Part]:
    """Of a block and of the rest, launches and bytes of each part, and of the block by op."""
    counts = Counts()
    with of_triton_alone(counts):
        one, two = (count(way, n, lambda: counts.launches, counts) for n in (1, 2))
    found: dict[str, Part] = {"launches": _split(one, two)}
    with counts:
        one, two = (count(way, n, lambda: +counts.bytes, counts) for n in (1, 2))
    by_op = {part: two[part] - one[part] for part in PARTS}
    totals = ({part: sum(c[part].values()) for part in PARTS} for c in (one, two))
    found["bytes"] = _split(*totals)
    found["of a block"] = {part: dict(ops.most_common()) for part, ops in by_op.items()}
    return found


def _split(one: Part, two: Part) -> Part:
    """One and two blocks: the block, and the rest."""
    block = {part: two[part] - one[part] for part in PARTS}
    return {"block": block, "rest": {part: one[part] - block[part] for part in PARTS}}


# The table of docs/gpu.md


def block(content: dict[str, Any]) -> str:
    """Of the model of the settings: launches of each part, and bytes of a block both ways."""
    settings, rows = content["settings"], content["rows"]
    n = settings["blocks"]

    def whole(row: dict[str, Any], what: str, part: str) -> int:
        return int(row[what]["rest"][part] + n * row[what]["block"][part])

    body = []
    for way, row in rows.items():
        launches = [whole(row, "launches", part) for part in PARTS]
        both = [row["bytes"]["block"][part] / 1e9 for part in PARTS[:2]]
        total = sum(whole(row, "bytes", part) for part in PARTS) / 1e9
        cells = [*map(str, launches), str(sum(launches))]
        cells += [f"{gb:.2f} GB" for gb in (*both, sum(both))] + [f"{total:.1f} GB"]
        body.append((way, *cells))
    header = ("", *(f"launches, {part}" for part in PARTS), "all")
    header += ("bytes of a block, forward", "backward", "both", "bytes of a step")
    return (
        f"GPT of examples/, {n} blocks of width {settings['width']}, {settings['batch']} x "
        f"{settings['context']:,} tokens, parameters of 16 bits, AdamW with clipping, eager:\n\n"
        f"{table.markdown(header, body)}\n\ntorch {content['environment']['torch']}, commit "
        f"{content['environment']['commit']}."
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=WAYS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_name() != device.FAKE_NAME:
        print("step_counts runs on the fake CUDA device: see its docstring", file=sys.stderr)
        return 2
    settings = {"blocks": BLOCKS, "width": WIDTH, "context": CONTEXT, "batch": BATCH}
    content = {"settings": settings, "environment": environment(quick=False), "rows": {}}
    for way in options.ways:
        content["rows"][way] = measured(way)
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(block(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
