"""mixprec.graphed without a GPU: the step as it is. tests/gpu/test_graphed.py has the graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mixprec


def test_without_a_gpu_a_step_runs_as_it_is() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = mixprec.optim.SGD(model.parameters(), lr=0.1)
    called = []

    @mixprec.graphed
    def step(x: torch.Tensor, *, name: str = "") -> Any:
        """One step."""
        called.append(name)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item(), loss

    assert (step.__name__, step.__doc__) == ("step", "One step.")
    for size in (2, 3):  # any shape, any result, and the result itself
        number, loss = step(torch.ones(size, 4), name="a name")
        assert loss.item() == number
        assert loss.grad_fn is not None
    assert called == ["a name"] * 2


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="graphed: step must be a function, got int"):
        mixprec.graphed(1)  # type: ignore[type-var]
    for warmup in (0, 1.5, True):
        with pytest.raises(ValueError, match="graphed: warmup must be an int, 1 or more, got"):
            mixprec.graphed(lambda: None, warmup=warmup)  # type: ignore[arg-type]


def test_the_counts_of_the_last_overflow_stay_in_one_tensor() -> None:
    """A graph has captured where they are."""
    from mixprec.grad_report import GradCounts

    counts, param, places = GradCounts(), torch.nn.Parameter(torch.ones(3)), set()
    for step, overflow in enumerate((False, True, False)):
        counts.start()
        counts.table(torch.device("cpu"), [param])[0, 0] = step
        counts.finish(torch.tensor(overflow))
        places.add(counts._overflow[torch.device("cpu")].counts.data_ptr())
        assert [each.inf for each in counts.overflows(lambda p: "p")] == [1] * (step > 0)
    assert len(places) == 1
