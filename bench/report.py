"""The measured tables of README.md and of docs/, generated from bench/results/.

Between markers, never typed: <!-- gpu --> and <!-- gpu state --> in README, <!-- gpu OP ... -->
and <!-- build FILE --> in docs/kernels.md, <!-- accuracy TASK --> in docs/accuracy.md,
<!-- claims --> in docs/claims.md, those of gpu_page in docs/gpu.md, each up to <!-- end -->. And
the pictures of each GPU.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from . import (
    accuracy,
    claims,
    gpu,
    gpu_folder,
    gpu_page,
    gpu_plot,
    gpu_table,
    readme,
    results,
    sources,
    table,
)
from .registry import Row
from .rows import ROWS

NOT_YET = "not yet measured"
H200 = gpu.CEILINGS["H200"]
KERNELS = Path("docs/kernels.md")
ACCURACY = Path("docs/accuracy.md")
CLAIMS = Path("docs/claims.md")
GPU = Path("docs/gpu.md")
HEADER = ("row", "moves", "floor on an H200", *gpu_table.HEADER[1:4], *gpu_table.HEADER[5:11])
_BUILD_HEADER = ("kernel", "instances", "registers", "shared memory", "spilled")
PRODUCTS = ("gemm", "gemm_accumulate_")  # of hundreds of shapes, shown by families
STATE = "gpu state"
STALE = " (older sources)"


def gpu_results(root: Path) -> list[dict[str, Any]]:
    """Every result of gpu-bench in bench/results/. ResultError for a rehearsal."""
    return [content for folder in gpu_folder.load(root) for content in folder.bench.values()]


def _by_gpu(contents: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each GPU, by its name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for content in contents:
        found.setdefault(content["environment"]["gpu_name"], []).extend(content["rows"])
    return found


def stale(row: dict[str, Any], backend: str) -> bool:
    """Whether the kernel that was measured is made of other sources than today's."""
    variant = row.get("variants", {}).get(backend)
    if variant is None or variant["sources"] is None:
        return False
    return sources.digest(tuple(row["ops"]), backend) != variant["sources"]


def _measured(row: dict[str, Any], peak: gpu.Ceiling | None) -> list[tuple[str, ...]]:
    """The cells of HEADER after the floor, one line per variant."""
    found = []
    for _, variant, *cells in gpu_table.lines(row, peak):
        old = STALE if stale(row, variant.rstrip("*")) else ""
        found.append((variant, cells[0] + old, cells[1], *cells[3:9]))
    return found


def size(count: float) -> str:
    """Three figures and a unit of bytes."""
    for unit, factor in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if count < 1000 * factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e12:.3g} TB"


def _lines(row: Row, contents: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row of the docs: what it has to move, and what was measured on each GPU."""
    floor = table.duration(row.bytes / H200.bytes) if row.bytes else ""
    first = (row.name.removeprefix("cuda/"), size(row.bytes) if row.bytes else "", floor)
    found = []
    for name, rows in _by_gpu(contents).items():
        for result in rows:
            if result["name"] == row.name:
                for variant, *cells in _measured(result, gpu.ceiling(name)):
                    found.append((*first, f"{variant}, {name}", *cells))
    share = "" if row.share is None else f"(>= {row.share:.0%})"
    return found or [(*first, "", NOT_YET, "", share, "", "", "", str(row.target or ""), "")]


def kernel_block(ops: list[str], contents: list[dict[str, Any]]) -> str:
    """The table of some ops: row by row, or by families where there are hundreds of shapes."""
    rows = [r for r in ROWS.values() if r.device == "cuda" and r.op in ops]
    if not rows:
        raise results.ResultError(f"report: there is no row on the GPU for {' '.join(ops)}")
    if not rows[0].flops:
        lines = [line for row in rows for line in _lines(row, contents)]
        return readme.markdown(HEADER, lines)
    measured: list[tuple[str, ...]] = [
        (f"{line[0].removeprefix('cuda/')} on {name}", *line[1:])
        for name, found in _by_gpu(contents).items()
        for line in gpu_table.families([r for r in found if r["op"] in ops])
    ]
    if measured:
        return readme.markdown(gpu_table.FAMILY_HEADER, measured)
    counts: dict[str, int] = {}
    for row in rows:
        family = row.name.removeprefix("cuda/").rsplit("/", 1)[0]
        counts[family] = counts.get(family, 0) + 1
    blank: list[tuple[str, ...]] = [
        (f, "", "", str(n), NOT_YET, "", "", "") for f, n in counts.items()
    ]
    return readme.markdown(gpu_table.FAMILY_HEADER, blank)


def build_block(source: str, root: Path) -> str:
    """What the compiler made of the kernels of one file, over all GPU generations."""
    facts = json.loads((root / "bench" / "results" / "cuda_build.json").read_text())
    lines: list[tuple[str, ...]] = []
    for kernel in facts["kernels"]:
        if kernel["source"] == source:
            low, high = kernel["registers"]
            registers = str(low) if low == high else f"{low} to {high}"
            shared, spilled = f"{kernel['shared']} B", f"{kernel['spilled']} B"
            old = "" if kernel["sources"] == sources.digest_of(source) else STALE
            name = kernel["name"] + old
            lines.append((name, str(kernel["instances"]), registers, shared, spilled))
    if not lines:
        raise results.ResultError(f"report: cuda_build.json has no kernel of {source}")
    return readme.markdown(_BUILD_HEADER, lines)


def _is_product(row: dict[str, Any]) -> bool:
    return row["op"] in PRODUCTS and row["status"] == "ok"


def gpu_block(contents: list[dict[str, Any]]) -> str:
    """README: what was measured on each GPU by the variant that a user gets."""
    if not contents:
        return f"Nothing: {NOT_YET} on a GPU."
    parts = []
    for name, rows in _by_gpu(contents).items():
        peak = gpu.ceiling(name)
        lines = [
            (r["name"].removeprefix("cuda/"), *cells)
            for r in rows
            if not _is_product(r)
            for cells in _measured(r, peak)
            if cells[0].endswith("*") or len(r.get("variants", ())) < 2
        ]
        header = (HEADER[0], *HEADER[3:])
        parts.append(f"{name}:\n\n{readme.markdown(header, lines)}")
        if products := gpu_table.families([r for r in rows if _is_product(r)]):
            short = [(line[0].removeprefix("cuda/"), *line[1:]) for line in products]
            parts.append(readme.markdown(gpu_table.FAMILY_HEADER, short))
        parts.append(f"{gpu_table.summary(rows)}.")
    first = contents[0]["environment"]
    commit = f", commit {first['commit']}" if first["commit"] else ""
    parts.append(f"torch {first['torch']}{commit}.")
    return "\n\n".join(parts)


def render(root: Path) -> dict[Path, str]:
    """Every generated page as bench/results/ has it today."""
    contents, folders = gpu_results(root), gpu_folder.load(root)
    front, cpu = root / "README.md", root / "bench" / "results" / "cpu"
    text = readme.fill(readme.render(front, cpu), "gpu", gpu_block(contents))
    if f"<!-- {STATE} -->" in text:
        text = readme.fill(text, STATE, gpu_page.state(folders))
    kernels = (root / KERNELS).read_text()
    for name in re.findall(r"<!-- (gpu [\w ]+) -->", kernels):
        kernels = readme.fill(kernels, name, kernel_block(name.split()[1:], contents))
    for name in re.findall(r"<!-- build ([\w.]+) -->", kernels):
        kernels = readme.fill(kernels, f"build {name}", build_block(name, root))
    parity = (root / ACCURACY).read_text()
    for task in re.findall(r"<!-- accuracy (\w+) -->", parity):
        parity = readme.fill(
            parity, f"accuracy {task}", accuracy.task_block(accuracy.load(cpu, task))
        )
    said = readme.fill((root / CLAIMS).read_text(), "claims", claims.block(cpu, folders))
    return {
        front: text,
        root / KERNELS: kernels,
        root / GPU: gpu_page.render((root / GPU).read_text(), folders),
        root / ACCURACY: parity,
        root / CLAIMS: said,
    }


def out_of_date(root: Path) -> list[Path]:
    """The pages that are not as bench/results/ has them."""
    return [path for path, text in render(root).items() if text != path.read_text()]


def _pictures(root: Path) -> list[Path]:
    """Draw those of every GPU beside its results; which of them that changed."""
    changed = []
    for folder in gpu_folder.load(root):
        if gpu_plot.drawable([*folder.bench.values()]):
            drawn = {p: p.read_bytes() for p in folder.path.glob(f"{gpu_page.PICTURE}-*.png")}
            for path in gpu_plot.save([*folder.bench.values()], folder.path / gpu_page.PICTURE):
                if path.read_bytes() != drawn.get(path):
                    changed.append(path)
    return changed


def write(root: Path) -> list[Path]:
    """Bring README, docs and the pictures up to date; which of them that changed."""
    changed = []
    for path, text in render(root).items():
        if text != path.read_text():
            path.write_text(text)
            changed.append(path)
    return changed + _pictures(root)
