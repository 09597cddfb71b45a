"""make cuda: what can be known of the CUDA kernels without a GPU.

    python tests/emulated/build_check/check.py --objects FOLDER --report FILE [--gpus 8.0,9.0a,...]
                                     [--summary FILE]

Asks the disassembler about the object files that setup.py has compiled of csrc/cuda/*.cu, for every
GPU generation (with MIXPREC_WERROR=1, so that a warning, a spilled register or a serialised wgmma
ended the build): no stack and no local memory; 16-byte loads and stores in the kernels that move
tensors; in the Hopper GEMM what each instance declares (machine_code.py); FP4 instructions for the
GPUs that have them. Then loads the built libraries. Results go to FILE as JSON. Exit status 1 if
anything is not as it should be. --summary writes the facts per kernel that docs/kernels.md shows.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import machine_code as hopper
import torch
from torch.utils.cpp_extension import CUDA_HOME

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
# Kernels that run on a few numbers, whose accesses are strided by design, or that move their data
# by TMA: no 16-byte words.
NARROW = re.compile(
    "scales?_kernel|coef_kernel|amax_kernel|amax_of_partials|steps_kernel|chunks|transpose|"
    "norm_bands|norm_columns|gemm_kernel"
)

GEMM = "gemm_sm90_bf16.cu"  # one of the files that instances of the Hopper GEMM are in


def setting(name: str) -> Any:
    """The value of a constant of setup.py."""
    found = re.search(rf"^{name} = (.+)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert found is not None, f"setup.py must say {name}"
    return ast.literal_eval(found[1])


def gpus() -> list[str]:
    """The list that setup.py builds for, without +PTX."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", setting("GPUS"))
    return [gpu.removesuffix("+PTX") for gpu in asked.split(";")]


def built_for(source: str, asked: set[str]) -> set[str]:
    """The GPUs that a source is compiled for, as in cuda_extensions of setup.py."""
    if "_sm90" in source:
        return {"9.0a"}
    return asked


class Kernel(NamedTuple):
    source: str
    gpu: str
    name: str
    registers: int
    stack: int  # bytes, of spilled registers too
    shared: int  # bytes
    wide: int  # 16-byte loads and stores of global memory
    local: int  # bytes of local memory, and loads and stores of it
    code: list[str]  # what is wrong with the machine code itself

    def wrong(self) -> list[str]:
        reasons = list(self.code)
        if self.stack or self.local:
            reasons.append(f"{self.stack} bytes of stack, {self.local} uses of local memory")
        if not self.wide and not NARROW.search(self.name):
            reasons.append("no 16-byte load or store")
        return reasons


def tool(name: str) -> str:
    """A disassembler: of the CUDA toolkit, or the one that Triton brings."""
    candidates = [Path(CUDA_HOME or "") / "bin" / name]
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        candidates.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name)
    for path in candidates:
        if path.exists():
            return str(path)
    found = shutil.which(name)
    if found is None:
        sys.exit(f"{name} is missing: it comes with the CUDA toolkit, and with triton")
    return found


def ask(option: str, file: Path) -> dict[str, dict[str, str]]:
    """{GPU: {kernel: text}} of what cuobjdump tells of each kernel in an object file."""
    command = [tool("cuobjdump"), option, str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"^Fatbin elf code:", text, flags=re.MULTILINE)[1:]:
        # Only newer disassemblers name a family ("sm_100f"): its instructions are looked for.
        arch = re.search(r"^arch = sm_(\d+)(\d)(a?)f?$", part, re.MULTILINE)
        assert arch is not None, f"cuobjdump {option} names no GPU"
        kernels = re.findall(r"Function ?:? ?(\w+):?\n(.*?)(?=\n\s*Function|\Z)", part, re.DOTALL)
        found.setdefault(f"{arch[1]}.{arch[2]}{arch[3]}", {}).update(kernels)
    return found


def kernels_of(source: str, file: Path) -> list[Kernel]:
    """The kernels of one source, for every GPU that its object file was compiled for."""
    usage, sass = ask("-res-usage", file), ask("-sass", file)
    names = demangled(sorted({name for kernels in usage.values() for name in kernels}))
    families = setting("FAMILIES") if source in setting("FAMILY_SOURCES") else {}
    found = []
    for gpu, kernels in usage.items():
        for name, text in kernels.items():
            uses = {word: int(number) for word, number in re.findall(r"\b(\w+):(\d+)", text)}
            code, gemm = sass[gpu][name], hopper.instance(names[name])
            reserved = 1024 if float(gpu.rstrip("a")) >= 9 and uses["SHARED"] else 0
            found.append(
                Kernel(
                    *(source, gpu, names[name], uses["REG"], uses["STACK"]),
                    uses["SHARED"] - reserved,  # what the system takes of each block
                    len(re.findall(r"\b(?:LDG|STG)\.\S*128", code)),
                    uses["LOCAL"] + len(re.findall(r"\b(?:LDL|STL)\b", code)),
                    hopper.wrong(gemm, code)
                    if gemm is not None
                    else hopper.no_fp4(names[name], code)
                    if gpu in families
                    else [],
                )
            )
    return found


def demangled(names: list[str]) -> dict[str, str]:
    """Short names with template arguments; values of enums as numbers."""
    words = subprocess.run(
        [tool("c++filt")], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    plain = re.sub(r"\([\w:]+\)(\d)", r"\1", words)
    short = (re.sub(r"\(.*|void |mixprec::(cuda::)?", "", w) for w in plain.splitlines())
    return dict(zip(names, short, strict=True))


def missing_gemms(names: set[str]) -> list[str]:
    """Instances of the planner's table that were not compiled, and others that were."""
    there = {gemm for name in names if (gemm := hopper.instance(name)) is not None}
    expected = hopper.expected(CSRC / "cuda" / "gemm" / "config" / "tile_configs.h")
    return [f"not compiled: {gemm}" for gemm in sorted(expected - there)] + [
        f"not in tile_configs.h: {gemm}" for gemm in sorted(there - expected)
    ]


def loaded() -> list[str]:
    """What is wrong with the built library, loaded into this process."""
    from mixprec.ops._dispatch import library

    if library.CUDA_ERROR is not None:
        return [f"mixprec._C_cuda: {library.CUDA_ERROR}"]
    from mixprec.ops._dispatch.op import OPS

    # Instead of a GPU; those that are torch's functions there; those of Triton and torch alone; and
    # those of torch alone.
    others = {"gemm_simulated", "attention", "attention_backward", "rotary", "rotary_"}
    others |= {"gemm_grouped", "gemm_grouped_accumulate_"}
    others |= {"cross_entropy", "cross_entropy_backward"}
    without = [name for name in OPS if name not in others and not library.has_cuda_kernel(name)]
    return [f"without a CUDA kernel: {without}"] if without else []


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per kernel, over its template arguments and all GPUs: instances, least and most registers,
    most shared memory and spilled bytes."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        gemm = hopper.instance(row["name"])
        if gemm is None:
            rule = re.match(r"\w*steps?_kernel<\w+", row["name"])  # an optimizer's
            key = (row["source"], f"{rule[0]}>" if rule else row["name"].split("<")[0])
        else:  # by tile; all types and layouts come from the same sources
            tile = f"{gemm.block_m}x{gemm.block_n}, {gemm.consumers} consumers"
            key = (GEMM, f"gemm {gemm.accumulate} {tile}, cluster {gemm.cluster}")
        groups.setdefault(key, []).append(row)
    return [
        {
            "source": source,
            "name": name,
            "instances": len({row["name"] for row in same}),
            "registers": [f(row["registers"] for row in same) for f in (min, max)],
            "shared": max(row["shared"] for row in same),
            "spilled": max(row["stack"] + row["local"] for row in same),
        }
        for (source, name), same in sorted(groups.items())
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--objects", type=Path, required=True, help="where setup.py compiled them")
    parser.add_argument("--gpus", default=",".join(gpus()))
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    wrong: list[str] = []
    objects: dict[str, Path] = {}
    for source in sorted((CSRC / "cuda").rglob("*.cu")):
        built = sorted(args.objects.rglob(f"{source.stem}.o"))
        objects |= {source.name: built[-1]} if built else {}
        wrong += [] if built else [f"not compiled: {source.name}"]
    with ThreadPoolExecutor(args.jobs) as pool:
        kernels = [k for found in pool.map(kernels_of, objects, objects.values()) for k in found]
    for source in objects:
        there = {kernel.gpu for kernel in kernels if kernel.source == source}
        asked = built_for(source, set(args.gpus.split(",")))
        if there and there != asked:
            wrong.append(f"{source} was compiled for {sorted(there)}, not {sorted(asked)}")
    for kernel in kernels:
        wrong += [f"{kernel.name} on {kernel.gpu}: {reason}" for reason in kernel.wrong()]
    names = {kernel.name for kernel in kernels}
    if "9.0a" in args.gpus.split(","):
        wrong += missing_gemms(names)
    wrong += loaded()
    rows: list[dict[str, Any]] = [kernel._asdict() for kernel in kernels]
    args.report.parent.mkdir(parents=True, exist_ok=True)
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "kernels": rows}
    args.report.write_text(json.dumps({**facts, "wrong": wrong}, indent=1) + "\n")
    if args.summary is not None:
        short = {**facts, "gpus": args.gpus.split(","), "kernels": summary(rows)}
        args.summary.write_text(json.dumps(short, indent=1) + "\n")
    print(*wrong, sep="\n")
    print(f"{len(kernels)} kernels for {args.gpus}: {'all is well' if not wrong else 'see above'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
