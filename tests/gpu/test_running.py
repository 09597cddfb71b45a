"""Graphs, host syncs, tensors beyond 2^31 elements: where GPUs differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated.agreement import assert_bits

import mixprec
from mixprec import ops


def parameters(device: torch.device) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 33), (7,), (1000, 129))
    values = [torch.randn(s, generator=generator, device="cpu").bfloat16() for s in shapes]
    return [torch.nn.Parameter(v.to(device)) for v in values]


def set_gradients(params: list[torch.nn.Parameter], scale: float, step: int, bad: bool) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        grad = (torch.randn(p.shape, generator=generator, device="cpu") * scale).to(p.dtype)
        if bad:
            grad.view(-1)[-1] = float("inf")
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(grad.to(p.device))


def trained(device: torch.device, make: Callable[[Any], Any]) -> list[torch.Tensor]:
    """All that five steps under a scaler leave, one of which overflows."""
    params = parameters(device)
    optimizer = make(params)
    scaler = mixprec.GradScaler(init_scale=2.0**10, max_consecutive_skips=3)
    scaler.scale(torch.zeros((), device=device))
    for step in range(5):
        set_gradients(params, 2.0**10, step, bad=step == 2)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.skipped.item() == 1
    states = [t for p in params for t in optimizer.state[p].values()]
    return [t.cpu() for t in (*params, *states, scaler._scale)]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    # The clip factor is the one number that may differ in its last bit: norms are far below it.
    "adamw-masters": lambda p: mixprec.optim.AdamW(p, lr=1e-2, max_grad_norm=1e9),
    "adamw-remainder": lambda p: mixprec.optim.AdamW(p, lr=1e-2, master_weights="remainder16"),
    "adamw-stochastic": lambda p: mixprec.optim.AdamW(
        p, lr=1e-2, stochastic_rounding=True, state_dtype=torch.bfloat16
    ),
    "sgd": lambda p: mixprec.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "lion": lambda p: mixprec.optim.Lion(p, lr=1e-2, weight_decay=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_gives_the_bits_of_the_cpu(
    kernels: str, device: torch.device, make: Callable[[Any], Any]
) -> None:
    got = trained(device, make)
    with mixprec.use_backend("cpp"):
        want = trained(torch.device("cpu"), make)
    assert_bits(got, want)


def test_no_host_sync(kernels: str, device: torch.device, only_cuda: None) -> None:
    params = parameters(device)
    optimizer, scaler = mixprec.optim.AdamW(params, max_grad_norm=1.0), mixprec.GradScaler()
    scaler.scale(torch.zeros((), device=device))
    for step in range(4):
        set_gradients(params, 2.0**16, step, bad=step == 2)
        if step >= 2:  # the first steps make state, and compare kernels with their references
            torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.skipped.item() == 1


def test_a_step_replays_in_a_graph(kernels: str, device: torch.device, only_cuda: None) -> None:
    """With an overflow in the middle: a skipped step is decided in the graph, not in Python."""
    results = []
    for captured in (False, True):
        params = parameters(device)
        optimizer = mixprec.optim.AdamW(params, lr=torch.tensor(1e-2, device=device))
        scaler = mixprec.GradScaler(init_scale=2.0**8)
        scaler.scale(torch.zeros((), device=device))

        def step(scaler: mixprec.GradScaler = scaler, optimizer: object = optimizer) -> None:
            scaler.step(optimizer)
            scaler.update()

        set_gradients(params, 2.0**8, 0, bad=False)
        step()  # makes the state
        graph = torch.cuda.CUDAGraph()
        if captured:
            set_gradients(params, 2.0**8, 1, bad=False)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step()
        for i in range(1, 5):
            set_gradients(params, 2.0**8, i, bad=i == 2)
            graph.replay() if captured else step()
        results.append([*params, *(t for p in params for t in optimizer.state[p].values())])
    assert_bits(*results)


def test_released_gradients_on_other_streams(
    device: torch.device, only_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update waits for what was begun on the stream of the first, and gives the same bits."""
    waits, wait_event = [], torch.cuda.Stream.wait_event
    results = []
    for release in (False, True):
        params = parameters(device)
        optimizer = mixprec.optim.AdamW(params, lr=1e-2, release_gradients=release)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        losses = [params[0].float().square().sum()]
        with torch.cuda.stream(side):
            losses += [p.float().square().sum() for p in params[1:]]
        torch.cuda.current_stream().wait_stream(side)
        with monkeypatch.context() as patch:
            spy = lambda self, event: [waits.append(self), wait_event(self, event)][1]  # noqa: E731
            patch.setattr(torch.cuda.Stream, "wait_event", spy)
            torch.stack(losses).sum().backward()
        optimizer.step()
        results.append([p.detach().cpu() for p in params])
    assert_bits(*results)
    assert waits, "no update waited"


@pytest.mark.large
def test_more_than_2_to_the_31_elements(
    kernels: str, device: torch.device, only_cuda: None
) -> None:
    """Weights beyond an int32 offset must not be left out (or others written twice)."""
    n = 2**31 + 1000
    if torch.cuda.get_device_properties(device).total_memory < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    grad = torch.ones(n, dtype=torch.bfloat16, device=device)
    grad[-1] = 3.0
    found_inf = torch.zeros((), device=device)
    counts = torch.zeros((1, 4), dtype=torch.int64, device=device)
    mixprec.unscale_([grad], torch.full((), 0.5, device=device), found_inf, counts)
    assert (grad[0].item(), grad[n // 2].item(), grad[-1].item()) == (0.5, 0.5, 1.5)
    assert mixprec.amax(grad).item() == 1.5
    sum_sq = torch.zeros(1, dtype=torch.float64, device=device)
    ops.grad_stats_([grad], None, found_inf, sum_sq, counts)
    assert sum_sq.item() == (n - 1) * 0.25 + 2.25
    assert counts.tolist() == [[0, 0, 0, 0]]
    q = mixprec.quantize(grad, "e4m3", scale=torch.ones((), device=device))
    assert q.data[-1].float().item() == 1.5
    del q
    param = torch.zeros(n, dtype=torch.bfloat16, device=device)
    steps = torch.zeros(1, device=device)
    ops.sgd_([param], [grad], [], [], steps, lr=2.0)
    assert (param[0].item(), param[n // 2].item(), param[-1].item()) == (-1.0, -1.0, -3.0)
