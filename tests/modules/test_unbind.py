"""unbind in fused attention: torch's values, and gradients that lie in memory as the tensor."""

import pytest
import torch

from mixprec.functional._unbind import unbind


@pytest.mark.parametrize("used", [(0, 1, 2), (1,)])
def test_gradients_are_torchs_and_lie_as_the_tensor(used: tuple[int, ...]) -> None:
    grads = []
    for function in (unbind, torch.unbind):
        torch.manual_seed(0)
        qkv = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
        x = qkv.permute(2, 0, 3, 1, 4)
        seen: list[torch.Tensor] = []
        x.register_hook(seen.append)
        outputs = function(x)
        assert [y.data_ptr() for y in outputs] == [y.data_ptr() for y in x]
        sum((outputs[i] ** 2 * (i + 1)).sum() for i in used).backward()
        grads.append(qkv.grad)
        if function is unbind:
            assert seen[0].stride() == x.stride()
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_other_dimensions_views_and_second_derivatives() -> None:
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: unbind(t * t, 1)[2], x)
    for view in (x, x.transpose(0, 2), x[:, ::2], x.unsqueeze(1).expand(3, 2, 4, 6)):
        for dim in (0, -1):
            (g,) = torch.autograd.grad(unbind(view, dim)[1].sum(), x)
            (expected,) = torch.autograd.grad(view.unbind(dim)[1].sum(), x)
            assert torch.equal(g, expected)


def test_outputs_are_views_that_cannot_be_written() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="multiple views"):
        unbind(x * 1)[0].add_(1)
