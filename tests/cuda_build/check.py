"""make cuda: what can be known of the CUDA kernels without a GPU.

    python tests/cuda_build/check.py --report FILE [--gpus 8.0,9.0a,...] [--summary FILE]

Compiles every csrc/cuda/*.cu for every GPU generation that setup.py builds for, and asks the
compiler and the disassembler: no spilled register, no stack, no warning; 16-byte loads and stores
in the kernels that move tensors; no local memory. Then loads the built mixprec._C_cuda and takes
an optimizer step on fake CUDA tensors, where anything that waits for the device raises. Results go
to FILE as JSON; a table comes last. Exit status 1 if anything is not as it should be.
--summary writes the few facts per kernel that docs/kernels.md shows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.cpp_extension import CUDA_HOME, include_paths

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# Kernels that run on a few numbers, whose accesses are strided by design, or that move their data
# by TMA: no 16-byte words.
NARROW = re.compile(
    "scale_kernel|coef_kernel|amax_kernel|steps_kernel|chunks|transpose|gemm_kernel"
)


def gpus() -> list[str]:
    """The list that setup.py builds for, without +PTX."""
    found = re.search(r'^GPUS = "([^"]+)"', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert found is not None, "setup.py must say GPUS"
    return [gpu.removesuffix("+PTX") for gpu in found[1].split(";")]


class Kernel(NamedTuple):
    source: str
    gpu: str
    name: str
    registers: int
    spilled: int  # bytes
    stack: int  # bytes
    shared: int  # bytes
    wide: int  # 16-byte loads and stores of global memory
    local: int  # loads and stores of local memory

    def wrong(self) -> list[str]:
        reasons = []
        if self.spilled or self.stack or self.local:
            reasons.append(f"{self.spilled} bytes spilled, {self.stack} of stack, {self.local} LDL")
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


def compile_(source: Path, gpu: str, folder: Path) -> tuple[Path, str]:
    number = gpu.replace(".", "")
    target = folder / f"{source.stem}.{number}.cubin"
    includes = [word for path in include_paths("cuda") for word in ("-isystem", path)]
    command = [
        *(f"{CUDA_HOME}/bin/nvcc", "-cubin", f"-arch=sm_{number}", "-std=c++20", "-O3"),
        *([] if "_sm90" in source.name else ["-fmad=false"]),
        *("--expt-relaxed-constexpr", "-DUSE_CUDA", "-Xptxas", "-v"),
        *("-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{CSRC}", *includes),
        *("-o", str(target), str(source)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{source.name} does not compile for {gpu}:\n{done.stderr[-4000:]}")
    return target, done.stderr


def kernels_of(source: Path, gpu: str, folder: Path) -> tuple[list[Kernel], list[str]]:
    """The kernels of one file for one GPU, and the compiler's warnings."""
    cubin, log = compile_(source, gpu, folder)
    sass = subprocess.run(
        [tool("cuobjdump"), "-sass", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    code = dict(re.findall(r"Function : (\S+)\n(.*?)(?=\n\s+\.\.\.|\Z)", sass, re.DOTALL))
    found = []
    for entry in re.split(r"Compiling entry function '", log)[1:]:
        name = entry.split("'", 1)[0]
        numbers = {
            word: int(match[1]) if (match := re.search(pattern, entry)) else 0
            for word, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("stack", r"(\d+) bytes stack frame"),
                ("stores", r"(\d+) bytes spill stores"),
                ("loads", r"(\d+) bytes spill loads"),
                ("shared", r"(\d+) bytes smem"),
            )
        }
        assert name in code, f"{name} was not disassembled"
        found.append(
            Kernel(
                *(source.name, gpu, name, numbers["registers"]),
                *(numbers["stores"] + numbers["loads"], numbers["stack"], numbers["shared"]),
                len(re.findall(r"\b(?:LDG|STG)\.\S*128", code[name])),
                len(re.findall(r"\b(?:LDL|STL)\b", code[name])),
            )
        )
    warnings = [line for line in log.splitlines() if "warning" in line.lower() or "C75" in line]
    return found, warnings


def demangled(names: list[str]) -> dict[str, str]:
    if shutil.which("c++filt") is None:
        return {name: name for name in names}
    words = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    short = (re.sub(r"\(.*|void |mixprec::(cuda::)?", "", w) for w in words.stdout.splitlines())
    return dict(zip(names, short, strict=True))


def loaded() -> list[str]:
    """What is wrong with the built library, loaded into this process."""
    from mixprec.ops import _library

    if _library.CUDA_ERROR is not None:
        return [f"mixprec._C_cuda: {_library.CUDA_ERROR}"]
    without = [op for op in _library.OPS if not _library.has_cuda_kernel(op)]
    return [f"without a CUDA kernel: {without}"] if without else []


def fake_step() -> list[str]:
    """An optimizer step on fake CUDA tensors, as shapes alone: a host sync raises."""
    import mixprec

    wrong = []
    with torch._subclasses.FakeTensorMode():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            params = [torch.nn.Parameter(torch.ones(8, 5, dtype=dtype, device="cuda"))]
            optimizer = mixprec.optim.AdamW(params, max_grad_norm=1.0)
            scaler = mixprec.GradScaler()
            scaler._lagged.push = lambda _: None  # pinned memory cannot be fake
            scaler.scale(torch.ones((), device="cuda"))
            try:
                for explicit in (False, True):
                    params[0].grad = torch.ones(8, 5, dtype=dtype, device="cuda")
                    if explicit:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
            except Exception as error:
                wrong.append(f"a step in {dtype}: {type(error).__name__}: {error}")
    return wrong


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per kernel, over its template arguments and all GPUs: instances, least and most registers,
    most shared memory and spilled bytes; and the hash of its sources."""
    from mixprec.bench import sources

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["source"], row["name"].split("<")[0]), []).append(row)
    return [
        {
            "source": source,
            "name": name,
            "instances": len({row["name"] for row in same}),
            "registers": [f(row["registers"] for row in same) for f in (min, max)],
            "shared": max(row["shared"] for row in same),
            "spilled": max(row["spilled"] for row in same),
            "sources": sources.digest_of(source),
        }
        for (source, name), same in sorted(groups.items())
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--gpus", default=",".join(gpus()))
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if CUDA_HOME is None:
        sys.exit("there is no nvcc: install the CUDA toolkit that torch was built with")
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        work = [
            pool.submit(kernels_of, source, gpu, Path(folder))
            for source in sources
            for gpu in args.gpus.split(",")
            if gpu == "9.0a" or "_sm90" not in source.name  # setup.py: cuda_extensions
        ]
        results = [future.result() for future in work]
    kernels = [kernel for found, _ in results for kernel in found]
    wrong = [line for _, warnings in results for line in warnings]
    names = demangled(sorted({kernel.name for kernel in kernels}))
    for kernel in kernels:
        wrong += [f"{names[kernel.name]} on {kernel.gpu}: {reason}" for reason in kernel.wrong()]
    wrong += loaded() + fake_step()
    rows: list[dict[str, Any]] = [
        {**kernel._asdict(), "name": names[kernel.name]} for kernel in kernels
    ]
    args.report.parent.mkdir(parents=True, exist_ok=True)
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "kernels": rows}
    args.report.write_text(json.dumps({**facts, "wrong": wrong}, indent=1) + "\n")
    if args.summary is not None:
        short = {**facts, "gpus": args.gpus.split(","), "kernels": summary(rows)}
        args.summary.write_text(json.dumps(short, indent=1) + "\n")
    print(f"{'kernel':64} {'registers':>12} {'shared':>7} {'spilled':>8}")
    for name in sorted(set(names.values())):
        same = [row for row in rows if row["name"] == name]
        registers = sorted({row["registers"] for row in same})
        span = f"{registers[0]}-{registers[-1]}" if len(registers) > 1 else str(registers[0])
        shared, spilled = (max(row[word] for row in same) for word in ("shared", "spilled"))
        print(f"{name[:64]:64} {span:>12} {shared:>7} {spilled:>8}")
    print(*wrong, sep="\n")
    print(f"{len(kernels)} kernels for {args.gpus}: {'all is well' if not wrong else 'see above'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
