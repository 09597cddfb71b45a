"""mixprec.autocast belongs to the thread that enters it, and reaches what backward recomputes."""

from __future__ import annotations

import threading

import pytest
import torch
from test_autocast import formats
from torch.utils.checkpoint import checkpoint

import mixprec


def test_threads_do_not_see_each_other_and_leave_nothing_behind() -> None:
    """Two regions that overlap in time, ended in the order in which they began."""
    layer, x = mixprec.nn.Linear(32, 32), torch.randn(4, 32)
    entered, left = threading.Event(), threading.Event()
    found: list[set[str]] = []

    def other() -> None:
        with mixprec.autocast("fp16"):
            found.append(formats(layer, x))
            entered.set()
            assert left.wait(60)
        found.append(formats(layer, x))

    thread = threading.Thread(target=other)
    with mixprec.autocast("bf16"):
        thread.start()
        assert entered.wait(60)
        assert formats(layer, x) == {"bf16"}
    left.set()
    thread.join()
    assert found == [{"fp16"}, {"e4m3"}]
    assert formats(layer, x) == {"e4m3"}


def test_off_inside_of_on_leaves_every_op_alone() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    with mixprec.autocast("bf16"), mixprec.autocast(enabled=False):
        assert x.exp().dtype == torch.bfloat16
        with mixprec.autocast():
            assert x.exp().dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_inside_the_region_recomputes_with_its_recipe(reentrant: bool) -> None:
    layer, x = mixprec.nn.Linear(32, 32), torch.randn(4, 32, requires_grad=True)
    with mixprec.autocast("bf16"):
        y = checkpoint(layer, x, use_reentrant=reentrant).sum()
        assert formats(y.backward) == {"bf16"}


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_layer_follows_the_region_that_it_is_called_in() -> None:
    layer, x = mixprec.nn.Linear(32, 32), torch.randn(4, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    outside = compiled(x)
    with mixprec.autocast("bf16"):
        assert torch.equal(compiled(x), layer(x))
        assert not torch.equal(compiled(x), outside)
    assert torch.equal(compiled(x), outside)
