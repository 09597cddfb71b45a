"""is_available, why_not: whether a device supports the formats of a recipe, and if not, why."""

from __future__ import annotations

import torch

from .ops._dispatch import library
from .ops._dispatch.scaled_mm import CAPABILITIES, MXFP8, NVFP4
from .recipes import GEMMS, ROLES, Recipe

# The first compute capability whose tensor cores support a format, and its name.
_NEEDED = {"fp16": ((7, 0), "Volta"), "bf16": ((8, 0), "Ampere"), "fp8": ((8, 9), "Ada or Hopper")}
_GENERATIONS = (
    ((5, 0), "Maxwell"), ((6, 0), "Pascal"), ((7, 0), "Volta"), ((7, 5), "Turing"),
    ((8, 0), "Ampere"), ((8, 9), "Ada"), ((9, 0), "Hopper"), ((10, 0), "Blackwell"),
)  # fmt: skip
_STILL_RUNS = "the recipe runs, memory is saved as with the format, speed is not gained"
_BLOCKS = (
    "operands in block formats are decoded to bf16 exactly and multiplied there, but for MXFP8 and "
    f"NVFP4 on GPUs with instructions for them (Blackwell); {_STILL_RUNS}"
)


def _family(recipe: Recipe) -> str:
    return "fp8" if recipe.is_scaled else recipe.x.name


def why_not_cuda(recipe: Recipe, capability: tuple[int, int], name: str) -> str | None:
    """why_not for an NVIDIA GPU with that compute capability and name."""
    if recipe.is_block:
        formats = {recipe.block_format(role) for role in ROLES}
        native = formats <= {*MXFP8} or formats == {NVFP4}
        return None if native and capability[0] in CAPABILITIES else _BLOCKS
    family = _family(recipe)
    needed, generation = _NEEDED[family]
    if capability >= needed:
        return None
    own = ["an early GPU", *(named for first, named in _GENERATIONS if capability >= first)][-1]
    return (
        f"{name} ({own}, compute capability {capability[0]}.{capability[1]}) "
        f"has no tensor cores for {family}, which came with {generation} "
        f"({needed[0]}.{needed[1]}); {_STILL_RUNS}"
    )


def _why_not_cpu(recipe: Recipe) -> str | None:
    if recipe.is_block:
        return _BLOCKS
    family = _family(recipe)
    if family == "fp8":
        return (
            "no CPU multiplies in fp8: operands are decoded exactly and multiplied in bf16 or "
            f"fp32; {_STILL_RUNS}"
        )
    if family == "fp16":
        return f"this CPU path multiplies fp16 operands in fp32; {_STILL_RUNS}"
    if library.C is not None and library.C.isa() == "avx512_bf16":
        return None
    has = library.C is not None and "avx512_bf16" in library.C.isa_available()
    why = "they are faster than its" if has else "it has no"
    return f"this CPU path multiplies in fp32: {why} instructions for bf16; {_STILL_RUNS}"


_HIP = (
    "this torch is built for ROCm: the kernels and formats here are those of the OCP standard "
    "(e4m3fn), AMD's MI300 has others (e4m3fnuz), and no kernel was tried on a newer one"
)
_OTHERS = {
    "xpu": "Intel GPUs: no kernel of mixprec was written for or tried on them",
    "mps": "Apple GPUs: Metal has no fp8, and no kernel of mixprec runs there",
    "xla": "TPUs compile through XLA, which does not support mixprec's ops",
    "hpu": "Gaudi's fp8 has another range (E4M3 to 240 on Gaudi 2); mixprec has no kernel for it",
    "meta": "a meta tensor has no values",
}


def why_not(recipe: Recipe | str, device: torch.device | str | int | None = None) -> str | None:
    """The reason why `device` does not compute in the formats of `recipe`, or None if it does.

    device: a torch.device, its name or a CUDA index; None is the current CUDA device if there is
    one, otherwise the CPU. "Computes" means that the device has instructions for the format and
    that this library uses them, which it does for MXFP8 and NVFP4 ("mxfp8", "nvfp4-1x16") but not
    for the other block formats.
    Every recipe also runs on CPU and CUDA devices without such instructions, with the same values;
    the reason then says what it costs. For other devices (ROCm, XPU, MPS, TPU, Gaudi) it says why
    they are not supported. ValueError for an unknown recipe, RuntimeError for an invalid device.
    """
    recipe = Recipe.parse(recipe)
    if recipe.products:  # the first reason of one of them
        reasons = (why_not(recipe.product(name), device) for name in GEMMS)
        return next(filter(None, reasons), None)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cpu":
        return _why_not_cpu(recipe)
    if device.type != "cuda":
        return _OTHERS.get(device.type, f"{device.type} devices are not supported by mixprec")
    if torch.version.hip is not None:
        return _HIP if recipe.is_scaled else None
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    return why_not_cuda(recipe, capability, torch.cuda.get_device_name(device))


def is_available(recipe: Recipe | str, device: torch.device | str | int | None = None) -> bool:
    """Whether `device` computes in the formats of `recipe`: `why_not` is None."""
    return why_not(recipe, device) is None
