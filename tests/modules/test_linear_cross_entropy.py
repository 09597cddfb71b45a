"""functional.linear_cross_entropy: what torch computes of all logits, without them in memory."""

from __future__ import annotations

import math
from typing import Any

import independent as ind
import pytest
import torch
from cases import normal
from hypothesis import given
from hypothesis import strategies as st
from independent import assert_same_lists
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.functional import _linear_cross_entropy as module
from mixprec.functional import linear, linear_cross_entropy
from mixprec.functional._linear_cross_entropy import REDUCTIONS
from mixprec.nn import LinearCrossEntropy

Tensors = tuple[torch.Tensor, ...]
OPTIONS = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(REDUCTIONS),
        "label_smoothing": st.sampled_from((0.0, 0.1, 1.0)),
        "z_loss": st.sampled_from((0.0, 1e-3)),
        "softcap": st.sampled_from((None, 3.0)),
        "ignore_index": st.sampled_from((-100, 2)),
    }
)
WIDTHS = st.sampled_from((1, 5, 127, 128, 300))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 128)


def inputs(dtype: torch.dtype, classes: int, bias: bool = True, n: int = 12) -> Tensors:
    x, w = normal((n, 16), dtype), normal((classes, 16), dtype, seed=1)
    b = (normal((classes,), dtype, seed=2),) if bias else ()
    return tuple(t.requires_grad_() for t in (x, w, *b))


def targets(classes: int, n: int = 12) -> torch.Tensor:
    return torch.arange(n) * 5 % classes


def loss_of_logits(
    logits: torch.Tensor,
    target: torch.Tensor,
    z_loss: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> torch.Tensor:
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    loss = F.cross_entropy(logits, target, **options)
    if z_loss == 0:
        return loss
    valid = target != options.get("ignore_index", -100)
    z = z_loss * logits.logsumexp(-1).square() * valid
    how = options.get("reduction", "mean")
    return loss + (z if how == "none" else z.sum() / (valid.sum() if how == "mean" else 1))


def with_grads(loss: torch.Tensor, args: Tensors) -> Tensors:
    g = normal(tuple(loss.shape), torch.float32, seed=7).to(loss.dtype) + 2
    return loss.detach(), *torch.autograd.grad(loss, args, g)


def exact(args: Tensors, target: torch.Tensor, **options: Any) -> Tensors:
    wide = tuple(t.detach().double().requires_grad_() for t in args)
    return with_grads(loss_of_logits(F.linear(*wide), target, **options), wide)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the norm of what is wanted."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-12))


@given(OPTIONS, WIDTHS, st.booleans(), st.sampled_from((torch.bfloat16, torch.float16)))
def test_as_torch_in_fp64(
    options: dict[str, Any], classes: int, bias: bool, dtype: torch.dtype
) -> None:
    """The loss to FP32's accuracy, and gradients no worse than those of linear and cross_entropy
    in the same precision."""
    args, target = inputs(dtype, classes, bias), targets(classes)
    want = exact(args, target, **options)
    got = with_grads(linear_cross_entropy(*args[:2], target, *args[2:], **options), args)
    assert got[0].dtype == torch.float32
    assert got[0].shape == want[0].shape
    assert torch.allclose(got[0].double(), want[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    plain = linear(*args, recipe="fp16" if dtype == torch.float16 else "bf16")
    other = with_grads(loss_of_logits(plain, target, **options), args)
    unit = torch.finfo(dtype).eps
    for y, unfused, x, of in zip(got[1:], other[1:], want[1:], args, strict=True):
        assert y.dtype == of.dtype
        assert error(y, x) <= max(error(unfused, x), unit) or (y - x).abs().max() <= unit


@pytest.mark.parametrize("recipe", ["fp8", "fp8-rowwise", "fp8-block", "mxfp8"])
def test_recipes_with_scales(recipe: str) -> None:
    """FP32 parameters and casts of 8 bits, as near as linear with that recipe."""
    args, target = inputs(torch.float32, 300), targets(300)
    want = exact(args, target)
    got = with_grads(linear_cross_entropy(*args[:2], target, args[2], recipe=recipe), args)
    other = with_grads(F.cross_entropy(linear(*args, recipe=recipe), target), args)
    for y, unfused, x in zip(got, other, want, strict=True):
        assert error(y, x) <= max(1.3 * error(unfused, x), 0.02)


def test_shapes_and_no_tokens() -> None:
    x, w = normal((2, 3, 16), torch.bfloat16), normal((300, 16), torch.bfloat16)
    t = targets(300, 6).view(2, 3)
    rows = linear_cross_entropy(x, w, t, reduction="none")
    assert rows.shape == (2, 3)
    ind.assert_same_bits(linear_cross_entropy(x[1, 2], w, t[1, 2], reduction="none"), rows[1, 2])
    ind.assert_same_bits(linear_cross_entropy(x.flatten(0, 1), w, t.flatten()), rows.mean())
    none = x[:0].requires_grad_()
    loss = linear_cross_entropy(none, w.requires_grad_(), t[:0])
    assert loss.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (none, w)))


def test_ignored_targets() -> None:
    """Rows of NaN too, if they are ignored; the mean of none is NaN and has gradients of 0."""
    args, target = inputs(torch.bfloat16, 300), targets(300)
    target[3:] = -100
    want = exact((args[0][:3], *args[1:]), target[:3], z_loss=0.01)
    loss = linear_cross_entropy(*args[:2], target, args[2], z_loss=0.01)
    got = with_grads(loss, args)
    assert (got[1][3:] == 0).all()
    assert error(got[2], want[2]) < 0.01
    loss = linear_cross_entropy(*args[:2], target * 0 - 100, args[2])
    assert loss.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(loss, args))
    sums = linear_cross_entropy(*args[:2], target * 0 - 100, args[2], reduction="sum")
    assert sums == 0


def test_gradients_of_inf_stay_in_their_rows() -> None:
    """Those of ignored rows count for nothing, as in torch."""
    args, target = inputs(torch.bfloat16, 300), targets(300)
    target[3] = -100
    g, masked = torch.ones(12), torch.ones(12)
    g[3], g[5], masked[3] = math.inf, math.inf, 0.0
    loss = linear_cross_entropy(*args[:2], target, args[2], reduction="none")
    of_x, of_w, _ = torch.autograd.grad(loss, args, g, retain_graph=True)
    assert of_x.isfinite().all(1).tolist() == [i != 5 for i in range(12)]
    assert not of_w.isfinite().all()
    g[5] = 1.0
    for got, want in zip(
        torch.autograd.grad(loss, args, g, retain_graph=True),
        torch.autograd.grad(loss, args, masked),
        strict=True,
    ):
        ind.assert_same_bits(got, want)
    loss = linear_cross_entropy(*args[:2], target, args[2], reduction="none")
    loss *= 2  # not a view
    loss.sum().backward()


@pytest.mark.parametrize("softcap", [30.0, 1e8])
def test_a_softcap_far_above_the_logits(softcap: float) -> None:
    args, target = inputs(torch.bfloat16, 300), targets(300)
    loss = linear_cross_entropy(*args[:2], target, args[2], softcap=softcap)
    got, want = with_grads(loss, args), exact(args, target, softcap=softcap)
    assert error(got[0], want[0]) < 1e-5
    for a, b in zip(got[1:], want[1:], strict=True):
        assert error(a, b) < 0.01


@given(st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_frozen_operands(frozen: tuple[bool, ...]) -> None:
    args, target = inputs(torch.bfloat16, 300), targets(300)
    want = with_grads(linear_cross_entropy(*args[:2], target, args[2]), args)
    for t, freeze in zip(args, frozen, strict=True):
        t.requires_grad_(not freeze)
    loss = linear_cross_entropy(*args[:2], target, args[2])
    ind.assert_same_bits(loss.detach(), want[0])
    assert loss.requires_grad == (not all(frozen))
    if loss.requires_grad:
        loss.backward(torch.tensor(2.0) + normal((), torch.float32, seed=7))
    for t, g, freeze in zip(args, want[1:], frozen, strict=True):
        assert (t.grad is None) == freeze
        if t.grad is not None:
            ind.assert_same_bits(t.grad, g)
    with torch.no_grad():
        assert not linear_cross_entropy(*args[:2], target, args[2]).requires_grad


def test_a_second_backward_has_the_same_bits() -> None:
    args, target = inputs(torch.float16, 300), targets(300)
    loss = linear_cross_entropy(*args[:2], target, args[2], reduction="none")
    g = normal((12,), torch.float32)
    first, second = (torch.autograd.grad(loss, args, g, retain_graph=True) for _ in range(2))
    assert_same_lists(first, second)
    with pytest.raises(RuntimeError, match=r"^linear_cross_entropy: its gradients have no"):
        torch.autograd.grad(loss, args, g, create_graph=True)


def test_the_same_bits_in_every_mode() -> None:
    """torch.func, checkpoints, compressed activations, and the reference of each op."""
    args, target = inputs(torch.bfloat16, 300), targets(300)

    def loss(*args: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(*args[:2], target, args[2], z_loss=1e-3)

    want = torch.autograd.grad(loss(*args), args)
    plain = tuple(t.detach() for t in args)
    found = [torch.func.grad(loss, argnums=(0, 1, 2))(*plain)]
    found += [torch.autograd.grad(checkpoint(loss, *args, use_reentrant=False), args)]
    with mixprec.compress_saved("int8"):
        found += [torch.autograd.grad(loss(*args), args)]
    for grads in found:
        assert_same_lists(grads, want)
    with mixprec.use_backend("reference"):
        result = loss(*args)
    for got, same in zip(torch.autograd.grad(result, args), want, strict=True):
        assert error(got, same.double()) < 4e-3


def test_main_grad() -> None:
    (x, w), target = inputs(torch.bfloat16, 300, bias=False), targets(300)
    linear_cross_entropy(x, w, target).backward()
    want, w.grad = w.grad, None
    w.main_grad = torch.ones(300, 16)  # type: ignore[attr-defined]
    linear_cross_entropy(x, w, target).backward()
    assert w.grad is None
    assert want is not None
    assert torch.allclose(w.main_grad - 1, want.float(), atol=1e-6, rtol=1e-2)  # type: ignore[attr-defined]


def test_fp16_gradients_of_many_tokens() -> None:
    """A probability over N is near FP16's smallest number; the sums over N tokens are not."""
    n, target = 2**14, torch.zeros(2**14, dtype=torch.int64)
    x, w = normal((1, 16), torch.float16) / 8, normal((1024, 16), torch.float16, seed=1) / 8
    w = w.float().requires_grad_()
    wide = w.detach().double().requires_grad_()
    loss = F.cross_entropy(F.linear(x.double(), wide), target[:1])
    (want,) = torch.autograd.grad(loss, wide)
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(x.expand(n, 16), w, target, reduction=reduction, recipe="fp16")
        (got,) = torch.autograd.grad(loss, w, torch.ones_like(loss))
        got = got if reduction == "mean" else got / n
        assert error(got[1:], want[1:]) < 1e-3
        assert error(got, want) < 1e-3


class Largest(TorchDispatchMode):
    """The number of elements of the largest result of an op."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, (tuple, list)) else [result]
        self.size = max([self.size, *(t.numel() for t in found if isinstance(t, torch.Tensor))])
        return result


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_no_tensor_has_all_logits(recipe: str) -> None:
    n, classes = 64, 1000
    args, target = inputs(torch.bfloat16, classes, n=n), targets(classes, n)
    with Largest() as mode:
        linear_cross_entropy(*args[:2], target, args[2], recipe=recipe).backward()
    assert mode.size == classes * 16  # the gradient of the weight


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction: str) -> None:
    """Forward and backward in one graph each, for a second number of tokens too."""

    def f(target: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        options: Any = {"reduction": reduction, "softcap": 4.0, "label_smoothing": 0.1}
        return linear_cross_entropy(*args[:2], target, *args[2:], z_loss=1e-3, **options)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for n in (12, 7):
        args, target = inputs(torch.bfloat16, 300, n=n), targets(300, n)
        got = with_grads(compiled(target, *args), args)
        assert_same_lists(got, with_grads(f(target, *args), args))
    wrong = with_grads(compiled(target + 300, *args), args)
    assert all(t.isnan().any() for t in wrong)


def test_inside_autocast() -> None:
    """FP32 operands are cast to the region's dtype, in backward too."""
    args, target = inputs(torch.float32, 300), targets(300)
    for dtype, recipe in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        want = with_grads(linear_cross_entropy(*args[:2], target, args[2], recipe=recipe), args)
        with torch.autocast("cpu", dtype=dtype):
            got = with_grads(linear_cross_entropy(*args[:2], target, args[2]), args)
        assert_same_lists(got, want)


def test_errors() -> None:
    args, target = inputs(torch.bfloat16, 300), targets(300)
    x, w, b = args
    for changed, message in (
        ({"x": 1.0}, "x must be a torch.Tensor"),
        ({"x": x[:, :3]}, r"x must be \[..., K\] with K = 16"),
        ({"weight": w[0]}, r"weight must be \[V, K\]"),
        ({"bias": b[:3]}, r"bias must have shape \[V\]"),
        ({"target": target.int()}, "target must have dtype int64"),
        ({"target": target[:3]}, "target must have shape"),
        ({"target": target + 300}, r"target must be in \[0, 300\) or -100, got 300"),
        ({"target": target - 1}, "target must be in .* got -1"),
        ({"reduction": "max"}, 'reduction must be "none"'),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1"),
        ({"z_loss": -1.0}, "z_loss must be"),
        ({"softcap": math.inf}, "softcap must be"),
        ({"softcap": torch.tensor(3.0)}, "softcap must be a number, got Tensor"),
        ({"ignore_index": 1.5}, "ignore_index must be an int"),
        ({"recipe": "fp8-delayed"}, "recipe must keep no state"),
    ):
        call: dict[str, Any] = {"x": x, "weight": w, "target": target, "bias": b, **changed}  # type: ignore[dict-item]
        with pytest.raises((TypeError, ValueError, IndexError), match=f"^linear_.*: {message}"):
            linear_cross_entropy(**call)


def test_module() -> None:
    """The function with the layer's recipe; torch's loss in a region and after unconvert."""
    seen: list[torch.nn.Module] = []
    options: dict[str, Any] = {"softcap": 4.0, "z_loss": 1e-3, "label_smoothing": 0.1}
    head = LinearCrossEntropy(16, 300, dtype=torch.bfloat16, reduction="sum", **options)
    x, target = normal((2, 6, 16), torch.bfloat16), targets(300).view(2, 6)
    target[0, 0] = -100
    weight, bias = head.linear.weight, head.linear.bias
    want = linear_cross_entropy(x, weight, target, bias, reduction="sum", **options)
    ind.assert_same_bits(head(x, target), want)
    options = {**options, "reduction": "sum"}
    exactly = loss_of_logits(
        F.linear(x.double(), weight.double(), bias.double()).flatten(0, 1),
        target.view(-1),
        **options,
    )
    assert torch.allclose(want.double(), exactly, rtol=1e-6)
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    assert torch.allclose(head(x, target).double(), exactly, rtol=1e-3)
    handle.remove()
    assert head.linear in seen
    with mixprec.autocast(enabled=False):
        assert torch.allclose(head(x, target).double(), exactly, rtol=1e-3)
    with mixprec.autocast("fp8"):
        assert torch.allclose(head(x, target).double(), exactly, rtol=0.05)
        assert head(x, target) != want
    mixprec.convert(head, "fp8-delayed")
    assert torch.allclose(head(x, target).double(), exactly, rtol=0.05)
    mixprec.unconvert(head)
    assert type(head.linear) is torch.nn.Linear
    assert torch.allclose(head(x, target).double(), exactly, rtol=1e-3)
