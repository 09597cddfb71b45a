"""Lists that are written must not hold the same memory twice: threads would write in no order."""

from __future__ import annotations

import pytest
import torch

from mixprec import ops
from mixprec.optim import SGD, AdamW, Lion, Muon


def unscale(grads: list[torch.Tensor]) -> None:
    ops.unscale_(grads, torch.tensor(0.5), torch.tensor(0.0))


B = torch.zeros(128)
WIDE = B.view(torch.float64)
SHARED: tuple[list[torch.Tensor], ...] = (
    [B[:8], B[:8]], [B[:8], B[7:12]], [B[:60], B[61:], B[40:41], B[:0]], [B[4:], B[:5]],
    [B[::2], B[:100:3]], [B.view(8, 16), B[127:]], [B.view(8, 16).t(), B[64:72]],
    [WIDE[3:5], B[7:8]], [B[9:10], WIDE[:2], WIDE[3:5]],
)  # fmt: skip
DISJOINT = (
    [B[:8], B[8:16], B[:0], B[4:4]], [B[::2], B[1::2]], [B[20:40], B[40:], B[:20]],
    [WIDE[3:5], B[5:6], B[10:12]], [*B.view(8, 16).unbind(1)], [B.view(8, 16)[:, :4], B[4:8]],
)  # fmt: skip


def test_views_of_one_buffer(backend: str) -> None:
    """Ranges without gaps, and views that begin together, in whatever order they are listed."""
    for tensors in SHARED:
        with pytest.raises(ValueError, match=r"share memory, got \w+\[\d\] and \w+\[\d\]"):
            unscale(tensors)
    for tensors in DISJOINT:
        unscale(tensors)


def test_columns_of_one_weight_are_disjoint(backend: str) -> None:
    buffer = torch.ones(64, 96)
    unscale([*buffer.split(32, dim=1), torch.zeros(0), torch.zeros(0)])
    assert buffer.eq(0.5).all()
    with pytest.raises(ValueError, match=r"grads\[0\] and grads\[2\], which do"):
        unscale([buffer[:33], torch.ones(3), buffer[32:]])
    assert buffer.eq(0.5).all()


def test_memory_that_two_storages_share() -> None:
    """As of torch.from_numpy; only the kernel sees that."""
    array = torch.ones(8).numpy()
    with pytest.raises(RuntimeError, match="two tensors of grads share memory"):
        unscale([torch.from_numpy(array), torch.from_numpy(array[4:])])


def test_negative_views(backend: str) -> None:
    """The imaginary part of a conjugate holds other values than its memory."""
    part = torch.ones(4, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match=r"grads\[0\] is .* got a negative view of others"):
        unscale([part])


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion, Muon])
def test_optimizers(kind: type[torch.optim.Optimizer], backend: str) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="params must hold each parameter once, got one twice"):
        kind([p, p], lr=0.1)
    q = torch.nn.Parameter(p.detach()[2:])
    optimizer = kind([p, q], lr=0.1)
    p.grad, q.grad = torch.ones(4), torch.ones(2)
    with pytest.raises(ValueError, match=r"params\[0\] and params\[1\], which do"):
        optimizer.step()
    assert p.eq(1).all()
