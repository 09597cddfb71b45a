"""What the other tests here rely on, of a GPU and of the fake device: that work which waits
for the device is refused where it must be, and that a capture runs nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

import mixprec


def test_a_capture_records_and_a_replay_runs(device: torch.device, only_cuda: None) -> None:
    x = torch.full((1000,), 3.0, device=device)
    mixprec.amax(x)  # compared with its reference, and loaded
    x.mul_(1.0)
    total, graph = torch.zeros((), device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(2.0)
        total.add_(mixprec.amax(x))
    assert (x[0].item(), total.item()) == (3.0, 0.0)
    for want in (6.0, 18.0):
        graph.replay()
        assert total.item() == want


def test_waiting_in_a_capture_is_an_error(only_cuda: None) -> None:
    """In a process of its own: torch's allocator does not get over it."""
    program = """
import torch
x = torch.ones(10, device="cuda")
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
except RuntimeError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "refused: CUDA error" in done.stdout, done.stdout + done.stderr


def test_a_host_sync_is_noticed(device: torch.device, only_cuda: None) -> None:
    x = torch.ones(10, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for waits in (x[0].item, x.cpu, lambda: x.tolist()):
            with pytest.raises(RuntimeError, match="synchronizing"):
                waits()
        (x + 1).copy_(x, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_events_tell_how_much_time_has_passed(device: torch.device, only_cuda: None) -> None:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    first.synchronize()
    time.sleep(0.05)
    last.record()
    last.synchronize()
    assert 40 < first.elapsed_time(last) < 5000
