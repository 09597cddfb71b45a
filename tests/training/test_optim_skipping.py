"""Steps of the optimizers that are skipped, with and without a scaler."""

from __future__ import annotations

import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from cases import GRADS
from optimizers import KINDS, LOW, Kind, Run, assert_same, kinds, mixed, set_grads

from mixprec import grad_report
from mixprec.amp.grad_scaler import GradScaler

pytestmark = pytest.mark.usefixtures("flags")


@kinds
def test_without_a_scaler(kind: Kind) -> None:
    """Clipping, or a 16-bit param, makes a step skip; otherwise a NaN arrives, as in torch."""
    cases = [(d, None, 1.0, True) for d in GRADS]
    cases += [(d, masters, None, True) for d in LOW for masters in (None, "auto")]
    cases += [(d, None, None, False) for d in (torch.float32, torch.float64)]
    for i, (dtype, masters, max_norm, skips) in enumerate(cases):
        run = Run(kind, dtype, master_weights=masters, max_grad_norm=max_norm).train(2)
        before = run.copies()
        set_grads(run.params, 7)
        run.params[3].grad[-1] = (math.inf, math.nan, -math.inf)[i % 3]
        run.optimizer.step()
        assert run.optimizer.skipped.item() == skips
        if skips:
            assert_same(run.tensors(), before)
        else:
            arrived = (run.params[3], *run.states[3].values())  # Lion's: in its moment
            assert not all(t.isfinite().all() for t in arrived)


@kinds
def test_a_step_that_overflows_changes_no_bit(kind: Kind, backend: str) -> None:
    """The first one of all, too: training goes on as without any."""
    limits: tuple[dict[str, float], ...] = ({}, {"max_grad_norm": 1.0}, {"max_grad_value": 1.0})
    mixes = kind.mixes if backend == "cpp" else kind.mixes[::4]  # the reference is slow
    for i, mix in enumerate(mixes):
        run, calm = (Run(kind, mixed(), lr=0.01, **mix, **limits[i % 3]) for _ in range(2))
        places = [k for k, p in enumerate(run.params) if p.numel()]
        bad_ones = [(places[0], math.inf), (places[-1], math.nan), (places[2], -math.inf)]
        for count, (place, bad) in enumerate(bad_ones, 1):
            p, before = run.params[place], run.copies()
            set_grads(run.params, 10 + count)
            p.grad[..., -1] = bad
            run.optimizer.step()
            assert run.optimizer.skipped.item() == count
            assert_same(run.tensors()[: len(before)], before)  # the first one creates the states
            (found,) = run.optimizer.overflow_report()
            wrong = p.grad[..., -1].numel()
            assert (found.inf, found.nan) == ((0, wrong) if math.isnan(bad) else (wrong, 0))
            assert found.elements == p.numel()
            assert_same(run.train(), calm.train())
        assert run.optimizer.skipped.item() == 3
        assert set(run.counts()) == {3}


@kinds
def test_under_torchs_scaler_as_under_ours_and_as_without_overflows(kind: Kind) -> None:
    """Unscaled inside the step, and by unscale_ before it; an overflow in either."""
    for i, mix in enumerate(kind.mixes):
        runs = []
        for scaler, overflows in (
            (torch.amp.GradScaler("cpu"), True),
            (GradScaler(), True),
            (GradScaler(), False),
        ):
            params = [p for p in mixed() if p.dtype != torch.float16]  # which torch's refuses
            run = Run(kind, params, lr=0.01, max_grad_norm=1.0 if i % 2 else None, **mix)
            for step in range(6):
                bad = step in (1, 4)
                if bad and not overflows:
                    continue
                scaler.scale(torch.zeros(()))
                set_grads(params, step, scaler.get_scale())
                if bad:
                    params[1].grad[-1] = math.inf
                if step > 2:
                    scaler.unscale_(run.optimizer)
                scaler.step(run.optimizer)
                scaler.update()
            assert scaler.get_scale() == (2.0**14 if overflows else 2.0**16)
            assert run.optimizer.skipped.item() == 2 * overflows
            assert set(run.counts()) == {4}
            assert not hasattr(run.optimizer, "found_inf")
            runs.append(run)
        assert_same(runs[0], runs[1])
        assert_same(runs[1], runs[2])


@pytest.mark.filterwarnings("ignore:GradScaler.unscale_. unscaled gradients are rounded")
def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a scaler, with one, and with unscale_; NaN in the last step."""
    synchronizes = Mock(side_effect=AssertionError("this waits for the device"))
    with monkeypatch.context() as patched:
        patched.setattr(grad_report, "on_host", lambda _: False)
        for method in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu"):
            patched.setattr(torch.Tensor, method, synchronizes)
        for function in ("equal", "is_nonzero", "allclose"):
            patched.setattr(torch, function, synchronizes)
        for kind in KINDS.values():
            for mix in kind.mixes:
                params = mixed()
                groups = [{"params": params[:3]}, {"params": params[3:], "max_grad_norm": 0.1}]
                optimizer = kind(groups, lr=torch.tensor(0.01), max_grad_norm=1.0, **mix)
                for step in range(2):
                    set_grads(params, step)
                    optimizer.step()
                with torch.no_grad():
                    params[4].copy_(params[4] * 2)
                params[0].grad = None
                scaler = GradScaler(grow_on_underflow=0.5)
                for bad, explicit in itertools.product((1.0, math.nan), (False, True)):
                    scaler.scale(torch.zeros(()))
                    params[2].grad[-1] = bad
                    if explicit:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
                assert optimizer.grad_norm is not None
    assert scaler.skipped.item() == 2
