"""optimizer.step() where scaler.step(optimizer) is meant: noticed where it is sure."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import for_each
from torch import nn

import mixprec
from mixprec import GradScaler

MAKERS = [torch.optim.SGD, mixprec.optim.AdamW]
MESSAGE = (
    r"step\(\) uses gradients of a loss that GradScaler.scale has multiplied: call scaler.step"
)


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4)).square().mean()


@for_each("make", MAKERS)
@for_each("accumulate", [1, 2])
def test_steps_with_scaled_gradients(make: Any, accumulate: int) -> None:
    """one warning, at the second step; and update() says what to call"""
    model, scaler = nn.Linear(4, 4), GradScaler()
    optimizer = make(model.parameters(), lr=1e-9)

    def iteration() -> None:
        for _ in range(accumulate):
            scaler.scale(loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iteration()
        with pytest.warns(UserWarning, match=MESSAGE):
            iteration()
        iteration()
    with pytest.raises(AssertionError, match=r"No inf checks .*call scaler\.step\(optimizer\)"):
        scaler.update()


@for_each("make", MAKERS)
@for_each("way", ["scaler", "unscale_", "by hand", "another loss", "disabled", "another model"])
def test_no_false_alarm(make: Any, way: str) -> None:
    model, scaler = nn.Linear(4, 4), GradScaler()
    scaler.scale(torch.ones(1))
    optimizer = make(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            scales = GradScaler(enabled=False) if way == "disabled" else scaler
            scales.scale(loss(nn.Linear(4, 4) if way == "another model" else model)).backward()
            if way == "by hand":
                for p in model.parameters():
                    p.grad.div_(scaler.get_scale())
            elif way in ("another loss", "another model"):  # as of a GAN
                optimizer.zero_grad()
                loss(model).backward()
            elif way == "unscale_":
                scaler.unscale_(optimizer)
            scaler.step(optimizer) if way == "scaler" else optimizer.step()
            if way in ("scaler", "unscale_"):
                scaler.update()
            optimizer.zero_grad()


@for_each("device", ["gpu", 65536.0, "cudaa"])
def test_a_device_that_is_none(device: object) -> None:
    with pytest.raises(ValueError, match=r"device must be None or a device of torch.*init_scale="):
        GradScaler(device)
    GradScaler("cuda:0")
