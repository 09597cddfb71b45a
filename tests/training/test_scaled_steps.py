"""optimizer.step() where scaler.step(optimizer) is meant: noticed where it is sure."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from cases import for_each
from torch import nn

import mixprec
from mixprec import GradScaler

MAKERS: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.SGD, mixprec.optim.AdamW]
MESSAGE = (
    r"step\(\) uses gradients of a loss that GradScaler.scale has multiplied: call scaler.step"
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4)).square().mean()


@for_each("make", MAKERS)
@for_each("accumulate", [1, 2])
def test_steps_with_scaled_gradients(make: Callable[..., torch.optim.Optimizer], accumulate: int):
    """one warning, at the second step; and update() says what to call"""
    model, scaler = net(), GradScaler()
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
    assert not model.weight._post_accumulate_grad_hooks
    with pytest.raises(AssertionError, match=r"No inf checks .*call scaler\.step\(optimizer\)"):
        scaler.update()


def by_scaler(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    scaler.scale(loss(model)).backward()
    scaler.step(optimizer)
    scaler.update()


def unscaled_first(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    scaler.scale(loss(model)).backward()
    scaler.unscale_(optimizer)
    optimizer.step()
    scaler.update()


def by_hand(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    scaler.scale(loss(model)).backward()
    for p in model.parameters():
        p.grad.div_(scaler.get_scale())
    optimizer.step()


def another_loss(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """As of a GAN: a scaled loss goes through the model, whose own is not scaled."""
    scaler.scale(loss(model)).backward()
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def disabled(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    GradScaler(enabled=False).scale(loss(model)).backward()
    optimizer.step()


def another_model(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    scaler.scale(loss(net())).backward()
    loss(model).backward()
    optimizer.step()


@for_each("make", MAKERS)
@for_each("step", [by_scaler, unscaled_first, by_hand, another_loss, disabled, another_model])
def test_no_false_alarm(make: Callable[..., torch.optim.Optimizer], step: Callable[..., None]):
    model, scaler = net(), GradScaler()
    scaler.scale(torch.ones(1))
    optimizer = make(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(scaler, optimizer, model)
            optimizer.zero_grad()
    assert not model.weight._post_accumulate_grad_hooks


@for_each("device", ["gpu", 65536.0, "cudaa"])
def test_a_device_that_is_none(device: object) -> None:
    with pytest.raises(ValueError, match=r"device must be None or a device of torch.*init_scale="):
        GradScaler(device)
    GradScaler("cuda:0")
