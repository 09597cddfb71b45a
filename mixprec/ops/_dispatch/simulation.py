"""simulate: matrix products on the CPU as the tensor cores of a GPU compute them."""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack

from ..._modes import Block, follow_checkpoints
from .._reference import tensor_core

_PRODUCTS = {  # by lower-case names without spaces
    **dict.fromkeys(("l4", "l40s", "4090", "rtx4090"), "ada"),
    **dict.fromkeys(("h100", "h200"), "hopper"),
    "b200": "blackwell",
}


class simulate(Block):
    """Inside, `gemm` and `gemm_accumulate_` of CPU tensors give the bits of a GPU's tensor cores.

        with mixprec.simulate("hopper"):
            loss = model(x)          # mixprec.nn.Linear, mixprec.functional.linear, ...
        loss.backward()              # the same GPU, inside or outside

    arch: "v100" (fp16), "a100" (fp16, bf16), "ada", "hopper" or "blackwell" (fp16, bf16, FP8), or a
    GPU of the last three: "L4", "L40S", "RTX 4090" or "4090"; "H100", "H200"; "B200", in any case.
    A GEMM in a format without an instruction raises ValueError. Products are added in groups of 4
    to 32 to the sum so far, every addend cut below the largest one, along K in
    ascending order; FP8 sums of Ada and Hopper enter an FP32 register after each 128 of K, unless
    fast_accum is set. Scales, bias and the rounding of the result are those of `gemm`.
    docs/numerics.md has the formula, what of it was measured on GPUs, and what it leaves out: a
    kernel that splits K, or adds in another order, gives other bits.

    Only GEMMs of this library on a CPU are simulated, not torch's own ops, and not convolutions.
    A backward pass uses what its forward pass was
    in, and so does torch.utils.checkpoint; for second derivatives, call it inside the block too.
    The block holds for the thread that entered it; blocks nest; leaving one, also by an exception,
    restores the one before. ValueError for another arch.
    Sources: arXiv 2512.07004, arXiv 2511.10909.
    """

    def __init__(self, arch: str) -> None:
        super().__init__()
        if not torch.compiler.is_compiling():
            follow_checkpoints()
        name = str(arch).lower().replace(" ", "")
        self.arch = _PRODUCTS.get(name, name)
        if self.arch not in tensor_core.ARCHITECTURES:
            raise ValueError(
                f"simulate: arch must be one of {', '.join(tensor_core.ARCHITECTURES)}, or a GPU "
                f"({', '.join(f'{gpu}: {kind}' for gpu, kind in _PRODUCTS.items())}), got {arch!r}"
            )


def current() -> str | None:
    """The GPU of the innermost `simulate` block of this thread; None outside of one."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, simulate):
            return mode.arch
    return None


def check(arch: str, dtype: torch.dtype) -> None:
    """The GPU has an instruction for operands of `dtype`."""
    if arch not in tensor_core.ARCHITECTURES:
        raise ValueError(
            f"gemm_simulated: arch must be one of {tensor_core.ARCHITECTURES}, got {arch!r}"
        )
    if tensor_core.tensor_core(arch, dtype) is None:
        names = ", ".join(str(d).removeprefix("torch.") for d in tensor_core.formats(arch))
        raise ValueError(
            f"simulate: the tensor cores of {arch} have no instruction for {dtype} operands, "
            f"only for {names}"
        )
