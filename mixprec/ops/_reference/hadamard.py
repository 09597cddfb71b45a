"""hadamard: rows multiplied by an orthogonal 16 x 16 matrix, which spreads outliers."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

BLOCK = 16
_SIGNS = 0x2D9A  # bit i: whether element i of a block changes its sign; 8 of 16 do, in no pattern


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [R, C] @ Q for each 16 columns of x, FP32 [R, C rounded up to 16]; missing columns are 0.

    Q = diag(signs) H / 4, where H is Hadamard's matrix of +-1 in Sylvester's order and signs are
    constants. Q Q^T = I, so hadamard(a) @ hadamard(b)^T = a @ b^T but for roundings. H takes four
    rounds of sums and differences in FP32, in a fixed order: the same bits on every device, inside
    of torch.autocast and with TF32 allowed.

    Source: Training LLMs with MXFP4 (Tseng et al., 2025).
    """
    rows, columns = x.shape
    x = pad(x.float(), (0, -columns % BLOCK))
    ones = torch.ones(BLOCK, dtype=torch.int64, device=x.device)
    signs = (1 - 2 * (ones * _SIGNS >> ones.cumsum(0) - 1 & 1)).float()
    y = x.reshape(rows, x.shape[1] // BLOCK, BLOCK) * signs
    for _ in range(4):  # elements 8 apart become neighbours, in 4 rounds all have met
        low, high = y[..., : BLOCK // 2], y[..., BLOCK // 2 :]
        y = torch.stack((low + high, low - high), dim=-1).flatten(-2)
    return (y * 0.25).reshape(x.shape)
