"""Lists that are written must not hold the same memory twice: threads would write in no order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mixprec
from mixprec import ops
from mixprec.ops._dispatch.checks import check_disjoint
from mixprec.optim import SGD, AdamW, Lion, Muon


def unscale(grads: list[torch.Tensor]) -> None:
    ops.unscale_(grads, torch.tensor(0.5), torch.tensor(0.0))


def bytes_of(t: torch.Tensor) -> set[int]:
    """The addresses that a tensor holds, one by one."""
    first = [t.storage_offset()]
    for stride, count in zip(t.stride(), t.shape, strict=True):
        first = [at + i * stride for at in first for i in range(count)]
    return {at * t.element_size() + byte for at in first for byte in range(t.element_size())}


@st.composite
def views(draw: Any) -> list[torch.Tensor]:
    """Parts of one buffer, by any strides, of two sizes of element."""
    found = []
    for _ in range(draw(st.integers(2, 4))):
        base = torch.ones(64, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
        dims = draw(
            st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8)), min_size=1, max_size=3)
        )
        shape, strides = zip(*dims, strict=True)
        found.append((base.dtype, shape, strides, draw(st.integers(0, 16))))
    buffer = torch.ones(128, dtype=torch.float64)
    return [buffer.view(d).as_strided(shape, strides, at) for d, shape, strides, at in found]


@given(views())
def test_views_of_one_buffer(tensors: list[torch.Tensor]) -> None:
    """Disjoint lists are taken; ranges without gaps, and one begin of two views, are compared."""
    tensors = [t for t in tensors if _is_writable(t)]
    held = [bytes_of(t) for t in tensors]
    shared = len(set().union(*held)) < sum(map(len, held))
    ranges = [h for h in held if max(h) - min(h) + 1 == len(h)]
    begins = [min(h) for h in held]
    found = len(set().union(*ranges)) < sum(map(len, ranges)) or len(set(begins)) < len(begins)
    for check in (lambda: check_disjoint("op", "x", tensors), lambda: unscale(tensors)):
        if found:
            with pytest.raises(ValueError, match=r"share memory, got \w+\[\d\] and \w+\[\d\]"):
                check()
        elif not shared:
            check()


def _is_writable(t: torch.Tensor) -> bool:
    try:
        ops._dispatch.checks.is_writable("op", "x", t)
    except ValueError:
        return False
    return True


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


def test_delayed_scales(backend: str) -> None:
    histories = list(torch.ones(2, 4).unbind()) * 2
    scales, amaxes = (list(torch.ones(4).unbind()) for _ in range(2))
    with pytest.raises(ValueError, match=r"amax_histories\[0\] and amax_histories\[2\]"):
        mixprec.ops.update_delayed_scales_(histories, scales, amaxes, [448.0] * 4)
