"""Weights in NF4 and what bitsandbytes makes of them, in tests/ops/measured/nf4.npz.

    python tests/nf4_cases.py     writes that file, with bitsandbytes installed

The weights are small whole numbers times powers of two: no sum depends on its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from mixprec.ops.nf4 import VALUES, Nf4

FILE = Path(__file__).parent / "ops" / "measured" / "nf4.npz"
WIDE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def numbers(*shape: int, bits: int = 8) -> torch.Tensor:
    """Whole numbers with a sign, from a multiplicative hash of their index."""
    index = torch.arange(torch.Size(shape).numel())
    return ((index * 2654435761 >> 7) % 2**bits - 2 ** (bits - 1)).double().view(shape)


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    values = torch.tensor(VALUES)
    midpoints = (values[:-1] + values[1:]) / 2
    for absmax in (1.0, 3.0, 0.7, 1.3):  # a block and a ragged one of what is next to a midpoint
        near = midpoints * absmax
        up, down = (torch.nextafter(near, torch.tensor(to)) for to in (4.0, -4.0))
        ragged = torch.cat([torch.tensor([absmax, 0.0, -0.0]), near, up, down])
        block = torch.cat([ragged, near, -ragged[:1]])
        yield f"ties of {absmax} fp32", torch.cat([block, ragged])[None].double()
    for name in WIDE:
        yield f"2-D {name}", numbers(7, 128) / 64
        yield f"zeros {name}", torch.zeros(2, 64)
        yield f"equal {name}", torch.full((3, 64), -0.375)
        yield f"ragged, odd {name}", numbers(3, 43) * 2.0**-7
        yield f"one {name}", torch.tensor([[-3.0]])
        yield f"nested {name}", numbers(65, 320) * 2.0 ** (numbers(65, 1, bits=3) - 5)
        mixed = numbers(4, 64)
        mixed[1], mixed[2] = 0.0, -0.0
        yield f"with zeros {name}", mixed
    zeros_last = torch.cat([numbers(64), torch.zeros(32)]).view(1, 96)
    yield "zeros in the ragged block fp32", zeros_last
    yield "tiny fp32", numbers(4, 64) * 2.0**-149
    yield "tiny fp16", numbers(4, 64) * 2.0**-24
    yield "huge fp32", numbers(4, 64) * 2.0**118
    yield "huge fp16", numbers(4, 64) * 2.0**8


CASES = {name: w.to(WIDE[name.split()[-1]]) for name, w in weights()}


def by_bitsandbytes(w: torch.Tensor, double_quant: bool = True) -> tuple[Nf4, torch.Tensor]:
    """Its codes and scales, and the weight that it decodes."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        w, quant_type="nf4", compress_statistics=double_quant, blocksize=64
    )
    outer = state.state2.absmax if double_quant else None
    # Its decoder for AVX-512 takes the scales of wrong blocks where rows are no multiple of 64.
    state.shape = torch.Size((1, w.numel()))
    decoded = functional.dequantize_4bit(codes, state).view(w.shape)
    return Nf4(codes.view(-1), state.absmax, outer, state.offset), decoded


def raw(t: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


if __name__ == "__main__":
    import bitsandbytes

    found = {"version": np.array(bitsandbytes.__version__)}
    for case, weight in CASES.items():
        q, decoded = by_bitsandbytes(weight)
        tensors = {**q._asdict(), "decoded": decoded}
        found |= {f"{case}/{name}": raw(t) for name, t in tensors.items()}
    np.savez_compressed(FILE, **found)
    print(FILE.stat().st_size, "bytes")
