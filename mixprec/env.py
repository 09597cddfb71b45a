"""python -m mixprec.env: versions, machine, compiled kernels, and the backend of each op.

`report()` returns the same as a dict of plain values. No module of mixprec imports this one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .ops._dispatch import backends, gemm_table, library
from .ops._dispatch.op import OPS

__all__ = ["build", "describe", "machine", "main", "report", "self_test", "variants", "versions"]

# The processor features by which our kernels, or those of torch, are selected.
FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_bf16", "asimd", "asimdhp", "bf16", "sve"),
)
OPTIONAL = ("triton", "matplotlib", "numpy", "torchao")


def versions() -> dict[str, str]:
    """The versions of mixprec, Python, torch, and of the optional packages that are installed."""
    installed = {"mixprec": __version__, "python": platform.python_version()}
    installed["torch"] = str(torch.__version__)
    for name in OPTIONAL:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip().lower(): value.strip() for key, value in pairs}


def machine() -> dict[str, Any]:
    """The processor, its cores and features, the threads and instruction sets in use, the GPU."""
    info = _cpuinfo()
    flags = (info.get("flags") or info.get("features") or "").split()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu, gpu_reason = _gpu()
    name = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in info:  # rented machines name the maker alone
        name += f" (family {info['cpu family']}, model {info.get('model')})"
    return {
        "system": platform.platform(),
        "processor": name,
        "cores": usable,
        "threads": torch.get_num_threads(),
        "features": [name for name in FEATURES if name in flags],
        "isa": library.C.isa() if library.C is not None else None,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
        "gpu_reason": gpu_reason,
    }


def _gpu() -> tuple[str | None, str | None]:
    """The name of the first GPU, or why there is none."""
    if torch.version.cuda is None:
        return None, "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return None, f"torch is built for CUDA {torch.version.cuda} but finds no usable GPU"
    major, minor = torch.cuda.get_device_capability(0)
    return f"{torch.cuda.get_device_name(0)} (compute capability {major}.{minor})", None


def build() -> dict[str, Any]:
    """How mixprec._C was built and which instruction sets run here, or why it is not loaded."""
    extension = library.C
    if extension is None:
        return {"loaded": False, "reason": library.LOAD_ERROR}
    return {
        "loaded": True,
        "file": extension.__file__,
        **extension.build_info(),
        "cuda_reason": library.CUDA_ERROR,
        "isa": extension.isa(),
        "isa_available": list(extension.isa_available()),
        "isa_forced": os.environ.get("MIXPREC_ISA") or None,
        "products": "torch" if extension.products_are_torchs() else "mixprec",
        "products_forced": os.environ.get("MIXPREC_PRODUCTS") or None,
    }


def variants(device_type: str) -> dict[str, dict[str, Any]]:
    """Per op: the backend used for tensors on `device_type`, and why the others are not."""
    table: dict[str, dict[str, Any]] = {}
    for name, op in OPS.items():
        tried = op.order(device_type)
        reasons = {b: op.why_not(b, device_type) for b in backends.BACKENDS}
        uses = next((b for b in tried if reasons[b] is None), None)
        others = {
            b: reason
            or (
                f"{uses} comes first"
                if b in tried
                else f"runs only when asked for: mixprec.use_backend({b!r})"
            )
            for b, reason in reasons.items()
            if b != uses
        }
        table[name] = {"uses": uses, "others": others}
    return table


def gemm_choice() -> dict[str, Any]:
    """How the backend of gemm is chosen on the first GPU: the order and the measured entries."""
    capability = library.capability(0)
    arch = None if capability is None else ".".join(map(str, capability))
    return {
        "order": list(gemm_table.DEFAULT),
        "arch": arch,
        "entries": {k: list(entry) for k, entry in gemm_table.table().get(arch or "", {}).items()},
        "file": str(gemm_table.user_file()),
    }


def self_test(name: str, device: str) -> str | None:
    """How the backend of op `name` on `device` differs from the reference; None if it does not."""
    return OPS[name].difference(OPS[name], device)


def report() -> dict[str, Any]:
    """Everything `python -m mixprec.env` prints, as plain values."""
    extension = build()
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    by_device = {device: variants(device) for device in devices}
    tests = {
        # The reference itself has nothing to be compared with.
        device: {n: self_test(n, device) for n in ops if ops[n]["uses"] not in (None, "reference")}
        for device, ops in by_device.items()
    }
    passed = not any(
        difference for of_device in tests.values() for difference in of_device.values()
    )
    return {
        "versions": versions(),
        "machine": machine(),
        "extension": extension,
        "ops": by_device,
        "gemm": gemm_choice(),
        "self_test": tests,
        "ok": extension["loaded"] and passed,
    }


def describe(facts: dict[str, Any]) -> str:
    """A report as text."""
    where, extension = facts["machine"], facts["extension"]
    kernels = {"NOT LOADED": extension.get("reason")}
    if extension["loaded"]:
        forced, available = extension["isa_forced"], ", ".join(extension["isa_available"])
        why = f"forced by MIXPREC_ISA={forced}" if forced else "the best one supported here"
        products = f"{extension['products']}'s"
        if extension["products"] == "torch":
            products += " where operands and result are bf16 and M * N * K is 2^22 or more"
        if extension["products_forced"]:
            products += f" (forced by MIXPREC_PRODUCTS={extension['products_forced']})"
        kernels = {
            "loaded": extension["file"],
            "built with": f"compiler {extension['compiler']}, torch {extension['torch']}",
            "level in use": f"{extension['isa']} ({why}; available: {available})",
            "products": products,
            "for CUDA": extension["cuda_reason"] or f"loaded, built for {extension['cuda_archs']}",
        }
    machine = {
        "system": where["system"],
        "processor": f"{where['processor']}, {where['cores']} cores, torch uses {where['threads']} "
        "threads",
        "features": " ".join(where["features"]) or "none that the kernels use",
        "gpu": where["gpu"] or f"none: {where['gpu_reason']}",
    }
    lines = []
    for title, rows in (
        ("Versions", facts["versions"]),
        ("Machine", machine),
        ("Compiled kernels (mixprec._C)", kernels),
    ):
        lines += [title, *(f"  {name:12} {text}" for name, text in rows.items()), ""]
    for device, ops in facts["ops"].items():
        lines.append(f"Ops on {device}: the backend in use, and the result of its self-test")
        width, tests = max(map(len, ops)), facts["self_test"][device]
        for name, op in ops.items():
            verdict = f"FAILED, {tests.get(name)}" if tests.get(name) else "ok"
            if name not in tests:
                why = "it is the reference" if op["uses"] else "no backend can run it"
                verdict = f"not tested: {why}"
            lines.append(f"  {name:{width}} {op['uses'] or 'NOTHING':10} {verdict}")
        lines += _reasons(ops)
        lines += [*(_describe_choice(facts["gemm"]) if device == "cuda" else ()), ""]
    return "\n".join([*lines, "All is well." if facts["ok"] else "Something is wrong: see above."])


def _describe_choice(choice: dict[str, Any]) -> list[str]:
    """Which backend of gemm is chosen for a call on a GPU."""
    line = f"  gemm uses the first of {', '.join(choice['order'])} that supports the call"
    if choice["entries"]:
        rows = [f"    {kind:24} {backend}" for kind, (backend, _) in choice["entries"].items()]
        return [f"{line}, except where measured:", *rows]
    return [
        line,
        f"    nothing is measured for compute capability {choice['arch']}: "
        f"python -m mixprec.bench tune measures, and writes {choice['file']}",
    ]


def _reasons(ops: dict[str, dict[str, Any]]) -> list[str]:
    """Why the other backends are not used: each reason once, with its ops."""
    ops_by_reason: dict[tuple[str, str], list[str]] = {}
    for name, op in ops.items():
        for backend, reason in op["others"].items():
            ops_by_reason.setdefault((backend, reason), []).append(name)
    return [
        f"  not {backend} ({'all ops' if len(names) == len(ops) else ', '.join(names)}): {reason}"
        for (backend, reason), names in ops_by_reason.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns 1 if mixprec._C is missing or a self-test failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m mixprec.env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    facts = report()
    print(json.dumps(facts, indent=1) if args.json else describe(facts))
    return 0 if facts["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
