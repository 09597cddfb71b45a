"""rotary: bit for bit with its reference, and against complex numbers in FP64."""

from __future__ import annotations

import independent as ind
import pytest
import torch
from cases import LAYOUTS, WIDE, Layout, for_each, normal, pairwise, random_bits

from mixprec.functional import rotary, rotary_qkv
from mixprec.ops.attention import rotary_op, rotary_reference
from mixprec.testing import assert_close

SHAPES = ((2, 3, 5, 8), (1, 1, 1, 2), (2, 2, 33, 70), (1, 4, 7, 128), (2, 0, 3, 4), (1, 2, 0, 6))


def angles(shape: tuple[int, ...]) -> torch.Tensor:
    return normal((shape[2], shape[3] // 2), torch.float64, seed=9) * 3


def factors(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return angles(shape).cos().float(), angles(shape).sin().float()


def exact(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The pairs as complex numbers times e^(i angle)."""
    order = (-1, 2) if interleaved else (2, -1)
    pairs = x.double().unflatten(-1, order)
    pairs = pairs if interleaved else pairs.mT
    angle = angles(x.shape)
    turned = torch.complex(*pairs.unbind(-1)) * torch.polar(torch.ones_like(angle), angle)
    result = torch.view_as_real(turned)
    return (result if interleaved else result.mT).flatten(-2)


Tables = tuple[torch.Tensor, torch.Tensor]


def agrees(x: torch.Tensor, tables: Tables, interleaved: bool, *kv: torch.Tensor) -> torch.Tensor:
    """The rotation of x, in both directions that of the reference."""
    for inverse in (True, False):
        args = rotary_op.Args(x, *(kv or (None, None)), *tables, interleaved, inverse)
        y = rotary_op(*args)
        ind.assert_same_bits(y, rotary_reference(args))
        assert y.transpose(1, 2).is_contiguous()
    return y


@for_each("layout, shape, dtype, interleaved", pairwise(LAYOUTS, SHAPES, WIDE, (False, True)))
def test_values(
    poisoned: None, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool
) -> None:
    x, (cos, sin) = layout(normal(shape, dtype)), factors(shape)
    y = agrees(x, (cos, sin), interleaved)
    unit = torch.finfo(dtype).eps + 2.0**-22
    assert_close(y, exact(x, interleaved), unit * (1 + x.double().abs().amax(-1, keepdim=True)))


@for_each("dtype, interleaved", pairwise(WIDE, (False, True)))
def test_every_kind_of_number(two_threads: None, dtype: torch.dtype, interleaved: bool) -> None:
    x = random_bits(2 * 3 * 700 * 16, dtype).view(2, 3, 700, 16)
    wide = torch.stack([*factors((1, 1, 700, 32))], 0).repeat(1, 1, 2)  # rows of views
    for cos, sin in (factors(x.shape), wide[:, :, 3:11].unbind(0), wide[:, :, ::4].unbind(0)):
        agrees(x, (cos, sin), interleaved)


@for_each("dtype, interleaved, samples", pairwise(WIDE, (False, True), ((), (1,), (2,))))
def test_parts_of_a_packed_tensor_and_tables(
    dtype: torch.dtype, interleaved: bool, samples: tuple[int, ...]
) -> None:
    """Heads of three tensors, two of them rotated; factors for each feature, and each sample."""
    x, k, v = normal((2, 5, 7, 24), dtype).transpose(1, 2).split((4, 2, 1), 1)
    for n in (12, 24):
        cos, sin = (normal((*samples, 5, n), torch.float32, seed=seed) for seed in (1, 2))
        together = agrees(x, (cos, sin), interleaved, k, v)
        parts = [agrees(part, (cos, sin), interleaved) for part in (x, k)]
        ind.assert_same_bits(together, torch.cat([*parts, v], 1))


def test_of_each_feature_and_sample() -> None:
    """Against the formula that transformers writes, x * cos + cat(-x2, x1) * sin, with FP64."""
    x = normal((2, 3, 5, 8), torch.float32)
    cos, sin = (normal((2, 5, 8), torch.float32, seed=seed) for seed in (1, 2))
    wide = x.double().requires_grad_()
    turned = torch.cat((-wide[..., 4:], wide[..., :4]), -1)
    want = wide * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
    assert_close(rotary(x, cos, sin), want.detach(), 1e-5)
    g = normal((2, 3, 5, 8), torch.float32, seed=3)
    (dx,) = torch.autograd.grad(rotary(x.requires_grad_(), cos, sin), x, g)
    assert_close(dx, torch.autograd.grad(want, wide, g.double())[0], 1e-5)


@for_each("dtype, interleaved", pairwise(WIDE, (False, True)))
def test_q_k_v_of_one_tensor(dtype: torch.dtype, interleaved: bool) -> None:
    """As q and k rotated one by one, twice differentiated, in torch.func and compiled."""
    packed, (cos, sin) = normal((2, 5, 8 * 8), dtype).requires_grad_(), factors((1, 1, 5, 8))
    settings = {"heads": 4, "kv_heads": 2, "interleaved": interleaved}
    heads = packed.unflatten(2, (8, 8)).transpose(1, 2)
    q, k, v = heads.split((4, 2, 2), 1)
    want = [rotary(x, cos, sin, interleaved=interleaved) for x in (q, k)] + [v]
    g = [normal(x.shape, dtype, seed=1).requires_grad_() for x in want]
    (wanted,) = torch.autograd.grad(want, packed, g)
    for run in (rotary_qkv, torch.compile(rotary_qkv, backend="aot_eager", fullgraph=True)):
        got = run(packed, cos, sin, **settings)
        (dx,) = torch.autograd.grad(got, packed, g)
        for ours, theirs in zip([*got, dx], [*want, wanted], strict=True):
            ind.assert_same_bits(ours.detach(), theirs.detach())
    (dx,) = torch.autograd.grad(rotary_qkv(packed, cos, sin, **settings), packed, g, None, True)
    again = torch.autograd.grad(dx, g, packed.detach())  # the rotation itself
    batch = torch.func.vmap(lambda x: rotary_qkv(x[None], cos, sin, **settings))(packed.detach())
    for ours, other, theirs in zip(again, batch, want, strict=True):
        ind.assert_same_bits(ours, theirs.detach())
        ind.assert_same_bits(other[:, 0], theirs.detach())


@for_each("interleaved", [False, True])
def test_gradients(interleaved: bool) -> None:
    """The transpose of a rotation, also differentiated again; FP32 against FP64."""
    x = normal((2, 3, 5, 8), torch.float32).requires_grad_()
    g = normal((2, 3, 5, 8), torch.float32, seed=1).requires_grad_()
    cos, sin = factors(x.shape)
    y = rotary(x, cos, sin, interleaved=interleaved)
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(exact(wide, interleaved), wide, g.detach().double())
    assert_close(dx.detach(), want, 1e-5)
    (dg,) = torch.autograd.grad(dx, g, x.detach())  # the rotation itself, of x
    assert_close(dg, y.detach().double(), 1e-6)


def test_both_forms_of_the_factors() -> None:
    x = normal((2, 3, 5, 8), torch.bfloat16)
    cos, sin = factors(x.shape)
    for interleaved in (False, True):
        want = rotary(x, cos, sin, interleaved=interleaved)
        twice = [f.repeat_interleave(2, 1) if interleaved else f.repeat(1, 2) for f in (cos, sin)]
        ind.assert_same_bits(rotary(x, *twice, interleaved=interleaved), want)
    low = [f.bfloat16() for f in (cos, sin)]
    ind.assert_same_bits(rotary(x, *low), rotary(x, *(f.float() for f in low)))


def test_compiled() -> None:
    """Forward and backward, for a second shape too."""
    compiled = torch.compile(rotary, backend="aot_eager", fullgraph=True)
    for shape, turn in (((2, 3, 5, 8), False), ((2, 3, 5, 8), True), ((1, 2, 9, 8), True)):
        x = normal(shape, torch.float32).requires_grad_()
        got, want = (f(x, *factors(shape), interleaved=turn) for f in (compiled, rotary))
        ind.assert_same_bits(got.detach(), want.detach())
        ind.assert_same_bits(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)))


def test_errors_of_the_function() -> None:
    x, (cos, sin) = torch.ones(2, 3, 5, 8), factors((2, 3, 5, 8))
    for bad in ((x[0], cos, sin), (None, cos, sin), (x, 1.0, sin), (x, cos[:4], sin)):
        with pytest.raises((ValueError, TypeError), match=r"^rotary: (x|cos) must"):
            rotary(*bad)
    with pytest.raises(RuntimeError, match="detach sin"):
        rotary(x, cos, sin.requires_grad_())
    for heads in (0, 4):
        with pytest.raises(ValueError, match=rf"^rotary_qkv: qkv must .* for {heads} and 1 heads"):
            rotary_qkv(torch.ones(2, 5, 30), cos, sin.detach(), heads=heads, kv_heads=1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_q_and_k_in_place(interleaved: bool) -> None:
    cos, sin = torch.rand(2, 5, 4)
    x = torch.randn(2, 5, 4 * 8).bfloat16().requires_grad_()
    settings = {"heads": 2, "kv_heads": 1, "interleaved": interleaved}
    gs, results, grads = [torch.randn(2, n, 5, 8).bfloat16() for n in (2, 1, 1)], [], []
    for inplace in (False, True):
        qkv = x * 1
        before, version = qkv.detach().clone(), qkv._version
        parts = rotary_qkv(qkv, cos, sin, **settings, inplace=inplace)
        results.append([part.detach().clone() for part in parts])
        grads.append(torch.autograd.grad(parts, x, gs)[0])
        assert (qkv._version > version, parts[2].data_ptr() == qkv[..., 24:].data_ptr()) == (
            (inplace, inplace)
        )
        assert torch.equal(qkv, before) != inplace
    assert all(map(torch.equal, *results))
    assert torch.equal(*grads)
    with pytest.raises(ValueError, match=r"^rotary_qkv: qkv must be the result of a layer"):
        rotary_qkv(x, cos, sin, **settings, inplace=True)
    saved = (x * 1).sigmoid()  # whose backward reads it
    q, *_ = rotary_qkv(saved, cos, sin, **settings, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()
