"""Models and training steps for tests of audit: what it finds in a step is a list of sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mixprec

D = 32
X = torch.linspace(-1, 1, 8 * D).view(8, D)
LOW, HALF = torch.bfloat16, torch.float16


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def layers(*more: nn.Module, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [part for _ in range(depth) for part in (nn.Linear(D, D), nn.GELU())]
    return nn.Sequential(*blocks, *more)


def step(
    model: nn.Module,
    region: Any = None,
    x: torch.Tensor = X,
    loss: Callable[[Any], torch.Tensor] = loss_of,
    batches: int = 1,
    optimizer: Any = None,
    scaler: Any = None,
) -> list[str]:
    """Findings of a step in which a scaler is not used."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    with mixprec.audit(model, optimizer=optimizer, scaler=scaler) as audit:
        for _ in range(batches):
            with region or nullcontext():
                value = loss(model(x))
            value.backward()
        optimizer.step()
    return audit.findings


def scaled(model: nn.Module, then: str, low: bool = True, scaler: Any = None) -> list[str]:
    """Of a step with a scaler, torch's by default. then: the calls that follow backward()."""
    scaler = scaler or torch.amp.GradScaler("cpu")
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    with mixprec.audit(model, optimizer=sgd, scaler=scaler) as audit:
        with torch.autocast("cpu", HALF, enabled=low):
            loss = loss_of(model(X))
        scaler.scale(loss).backward()
        calls = {
            "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "clip_value": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            "unscale_": lambda: scaler.unscale_(sgd),
            "step": lambda: scaler.step(sgd),
            "plain_step": sgd.step,
            "update": scaler.update,
        }
        for name in then.split():
            calls[name]()
    return audit.findings


def bf16() -> Any:
    return torch.autocast("cpu", LOW)


class Calls(nn.Module):
    """A layer, and a function of what it returns and of its own weight."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(D, D), nn.Parameter(torch.eye(D))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), self.weight)


class Head(nn.Module):
    """A body, and a head that may run outside of a region."""

    def __init__(self, outside: Any = None) -> None:
        super().__init__()
        self.body, self.head, self.outside = layers(), nn.Linear(D, D), outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        with self.outside or nullcontext():
            return self.head(x if self.outside is None else x.float())


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv, self.out, self.dtype = nn.Linear(D, 3 * D), nn.Linear(D, D), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).to(self.dtype).view(1, 8, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(8, 8, dtype=self.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(8, D).to(x.dtype))


class GroupedExperts(nn.Module):
    """Weights [E, N, K] of experts with one grouped product each, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.randn(2, D, D) / 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([4, 8], dtype=torch.int32)
        for w in (self.w1, self.w2):
            x = F.grouped_mm(x.to(w.dtype), w.transpose(-2, -1), offs=ends)
        return x


def mixture(dtype: torch.dtype | None = None) -> nn.Module:
    return layers(GroupedExperts(), nn.Linear(D, D)).to(dtype or torch.float32)


def is_linear(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Linear)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.body, self.out = nn.Linear(D, D), layers(), nn.Linear(D, D)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(self.into(x)))


class ChunkedLoss(torch.autograd.Function):
    """The mean square of x @ w.T, chunk by chunk: gradients are computed in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        grad, total = torch.zeros_like(w, dtype=dtype), torch.zeros((), dtype=torch.float32)
        grads = []
        for part in x.split(2):
            y = part @ w.t()
            total += y.float().square().sum()
            grad += (2 * y / (x.shape[0] * w.shape[0])).t() @ part
            grads.append((2 * y / (x.shape[0] * w.shape[0])) @ w)
        ctx.save_for_backward(torch.cat(grads), grad)
        return total / (x.shape[0] * w.shape[0])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * g.to(grad_x.dtype), (grad_w * g).to(grad_x.dtype), None


@contextmanager
def autocast_of_another_device() -> Iterator[None]:
    """As torch.autocast("cuda") is on a machine with a GPU; the model was left on the CPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def with_optimizer(model: nn.Module, lr: float, kind: Any = torch.optim.SGD) -> list[str]:
    return step(
        model, x=X.to(next(model.parameters()).dtype), optimizer=kind(model.parameters(), lr)
    )


def converted(model: nn.Module, recipe: str = "bf16", **options: Any) -> nn.Module:
    return mixprec.convert(model, recipe, **options)


def in_two(first: nn.Module, kind: Callable[..., nn.Module]) -> nn.Module:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, kind(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x.to(next(self.first.parameters()).dtype))
            return self.second(x.to(next(self.second.parameters()).dtype))

    return Two()


class InFloat32(nn.LayerNorm):
    """Of a 16-bit input."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self  # .half() leaves it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


def half_step(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """Of an fp16 model with masters, scaled."""
    sgd, scaler = mixprec.optim.SGD(model.half().parameters(), lr=1e-3), mixprec.GradScaler()
    with mixprec.audit(model, optimizer=sgd, scaler=scaler) as audit:
        scaler.scale(loss(model(X.half()))).backward()
        scaler.step(sgd)
        scaler.update()
    return audit.findings
