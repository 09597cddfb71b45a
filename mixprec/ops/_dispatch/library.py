"""The torch library "mixprec": op definitions, and the kernels behind them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

LIBRARY = torch.library.Library("mixprec", "DEF")

OPS: dict[str, Callable[..., None]] = {}  # every op that define() made, with its check

Capability = tuple[int, int]  # of a GPU: (9, 0); None in its place where nothing is known of it
# Why a variant cannot do one call, by its arguments; None if it can.
WhyNot = Callable[[tuple[Any, ...], Capability | None], str | None]


class Choice(NamedTuple):
    """How the variants of an op on a GPU are chosen call by call.

    order: the backends to try for these arguments, best first (None: for a call of which nothing
    is known). why_not: by backend, for those that cannot do every call.
    """

    order: Callable[[tuple[Any, ...] | None, Capability | None], tuple[str, ...]]
    why_not: Mapping[str, WhyNot]


CHOICES: dict[str, Choice] = {}  # of the ops that have one
DIRECT: dict[str, Callable[..., Any]] = {}  # the vendor's variants, without the way through an op
VARIANTS: dict[str, Callable[..., Any]] = {}  # what runs gemm_reference, gemm_vendor, …

OPERANDS: dict[str, tuple[int, ...]] = {}  # of the ops that join torch.autocast: what it casts
AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}  # where they do, by device type
_CAST = (torch.float32, torch.bfloat16, torch.float16)

INSTALL = "pip install --no-build-isolation -e ."

# The ops with a Triton kernel, and the module of mixprec.triton_kernels whose function `op` runs
# it. That package is imported when a kernel is first launched: `import mixprec` needs no Triton.
TRITON = {
    "adamw_": "adamw",
    "amax": "amax",
    "clip_coef": "scale",
    "dequantize": "dequantize",
    "gemm": "gemm",
    "gemm_accumulate_": "gemm",
    "grad_stats_": "grad_stats",
    "inv_scale": "scale",
    "quantize": "quantize",
    "scale_from_amax_": "scale",
    "sgd_": "sgd",
    "unscale_": "unscale",
    "update_scale_": "scale",
}
_TRITON_PACKAGE = __name__.removesuffix(".ops._dispatch.library") + ".triton_kernels"


def _load() -> tuple[ModuleType | None, str | None]:
    """Import mixprec._C; on failure keep the reason, which is raised when an op first needs it."""
    try:
        return importlib.import_module("mixprec._C"), None
    except ModuleNotFoundError:
        here = Path(__file__).resolve().parents[2]
        hint = (
            f"mixprec is imported from its source folder {here}, which holds no build; there, "
            if (here.parent / "setup.py").exists()
            else "this installation holds no compiled ops; in the source folder "
        )
        return None, f"mixprec._C is not built: {hint}run: {INSTALL}"
    except ImportError as error:
        return None, (
            f"mixprec._C was built but does not load ({error}); it needs torch >= 2.11 and the "
            f"Python it was built for. To rebuild it, in the source folder run: {INSTALL}"
        )


C, LOAD_ERROR = _load()


def _load_cuda() -> str | None:
    """Load the CUDA kernels, which registers them; None if they are there, else why not."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if C is None:
        return LOAD_ERROR
    files = sorted(Path(__file__).resolve().parents[2].glob("_C_cuda*.so"))
    if not files:
        reason = C.build_info()["no_cuda"] or "mixprec/_C_cuda.so is gone"
        return f"they were not built: {reason}; to build them, in the source folder run: {INSTALL}"
    # Built only where 9.0a was among the GPUs to build for; on others it has nothing to run.
    files += sorted(files[0].parent.glob("_C_sm90*.so"))
    for file in files:
        try:
            torch.ops.load_library(file)
        except OSError as error:
            return f"{file.name} was built but does not load ({error}); to rebuild it: {INSTALL}"
    return None


CUDA_ERROR = _load_cuda()
# What the CUDA kernels were built for, as TORCH_CUDA_ARCH_LIST writes it; "" if there are none.
CUDA_ARCHS = C.build_info().get("cuda_archs", "") if C is not None else ""


def has_cuda_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"mixprec::{name}", "CUDA")


def _triton_error() -> str | None:
    """Why the Triton kernels cannot be imported, found without importing them; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if importlib.util.find_spec(_TRITON_PACKAGE) is None:
        return f"{_TRITON_PACKAGE} is not installed; in the source folder run: {INSTALL}"
    return None


TRITON_ERROR = _triton_error()


@cache
def triton_launcher(name: str) -> Callable[..., Any]:
    """The function that launches the Triton kernel of op `name`; imports Triton."""
    return getattr(importlib.import_module(f"{_TRITON_PACKAGE}.{TRITON[name]}"), name)


def variant_name(name: str, variant: str) -> str:
    """`gemm`, `triton` -> `gemm_triton`; `unscale_`, `reference` -> `unscale_reference_`."""
    return f"{name[:-1]}_{variant}_" if name.endswith("_") else f"{name}_{variant}"


def has_vendor_kernel(name: str) -> bool:
    return name in DIRECT


def cast_operand(x: torch.Tensor, device_type: str) -> torch.Tensor:
    """x as torch.autocast, which is on, has an operand: fp32, bf16 and fp16 in the autocast dtype.

    FP8, whose scale means that format, stays, and so does fp64, as with torch's own ops.
    """
    if x.dtype not in _CAST or x.device.type != device_type:
        return x
    return x.to(torch.get_autocast_dtype(device_type))


def _autocast_kernel(op: str, operands: tuple[int, ...], device_type: str) -> Callable[..., Any]:
    """What runs for a call of torch.ops.mixprec inside torch.autocast; without operands, nothing
    of its own."""
    if not operands:
        return torch.library.fallthrough_kernel

    def kernel(*args: Any) -> Any:
        cast = list(args)
        for i in operands:
            cast[i] = cast_operand(args[i], device_type)
        with torch.autocast(device_type, enabled=False):
            return op_handle(op)(*cast)

    return kernel


def define(
    name: str,
    signature: str,
    *,
    check: Callable[..., None],
    reference: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    vendor: Callable[..., Any] | None = None,
    choice: Choice | None = None,
    operands: tuple[int, ...] = (),
) -> None:
    """Define `mixprec::name`, `mixprec::name_reference` and, where there is a Triton kernel or one
    of the vendor's, `mixprec::name_triton` and `mixprec::name_vendor` from one signature string.

    The first gets its kernels from the compiled libraries, by device; the second is `reference`
    on every device. `check`, `reference` and `fake` take the schema's arguments in order. `check`
    raises ValueError or TypeError for arguments that do not fit together; `fake` computes output
    shapes, dtypes and strides (None for an op that returns nothing). The compiled kernels check
    again, in C++. `vendor` runs what torch has for the same job on a GPU; `choice` says for which
    calls which variant is taken there. `operands`: the arguments, by position, that torch.autocast
    casts; without any it leaves the op alone.
    """

    def checked_fake(*args: Any) -> Any:
        check(*args)
        return fake(*args) if fake is not None else None

    def checked_reference(*args: Any) -> Any:
        check(*args)
        # The dtypes are the op's own business: torch.autocast must not change a reference's.
        with torch.autocast(_device_type(args), enabled=False):
            return reference(*args)

    def checked_triton(*args: Any) -> Any:
        check(*args)
        return triton_launcher(name)(*args)

    def run_vendor(*args: Any) -> Any:
        assert vendor is not None
        check(*args)
        if torch.is_autocast_enabled(_device_type(args)):
            with torch.autocast(_device_type(args), enabled=False):
                return vendor(*args)
        return vendor(*args)

    def checked_vendor(*args: Any) -> Any:
        refuses = choice.why_not.get("vendor") if choice is not None else None
        check(*args)
        reason = refuses(args, capability(device_index(args))) if refuses is not None else None
        if reason is not None:
            raise RuntimeError(f"{name}: {reason}")
        return run_vendor(*args)

    OPS[name] = check
    if choice is not None:
        CHOICES[name] = choice
    if operands:
        OPERANDS[name] = operands
    variants = {"reference": (checked_reference, "CompositeExplicitAutograd")}
    if name in TRITON:
        variants["triton"] = (checked_triton, "CUDA")
    if vendor is not None:
        variants["vendor"] = (checked_vendor, "CUDA")
        DIRECT[name] = run_vendor
    for op in (name, *(variant_name(name, v) for v in variants)):
        LIBRARY.define(op + signature, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"mixprec::{op}", checked_fake, lib=LIBRARY)
        for device_type, key in AUTOCAST.items():
            LIBRARY.impl(op, _autocast_kernel(op, operands, device_type), key)
    for variant, (function, key) in variants.items():
        VARIANTS[variant_name(name, variant)] = function
        LIBRARY.impl(variant_name(name, variant), function, key)


def _first_tensor(args: tuple[Any, ...]) -> torch.Tensor | None:
    """The first tensor among the arguments of an op, lists included."""
    for arg in args:
        if isinstance(arg, (list, tuple)) and arg:
            arg = arg[0]
        if isinstance(arg, torch.Tensor):
            return arg
    return None


def _device_type(args: tuple[Any, ...]) -> str:
    first = _first_tensor(args)
    return "cpu" if first is None else first.device.type


def device_index(args: tuple[Any, ...]) -> int:
    """The number of the GPU that the arguments are on; 0 where they do not say."""
    first = _first_tensor(args)
    return 0 if first is None else first.device.index or 0


def capability(index: int) -> Capability | None:
    """The compute capability of GPU `index`; None where torch sees no GPU."""
    known = _capabilities.get(index)
    if known is None and torch.cuda.is_available():
        known = _capabilities[index] = torch.cuda.get_device_capability(index)
    return known


_capabilities: dict[int, Capability] = {}
# Asked of the driver, and the same for the life of the process: torch.compile takes it as it is.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def op_handle(name: str) -> Callable[..., Any]:
    """The callable of an op that `define` made."""
    return getattr(torch.ops.mixprec, name).default
