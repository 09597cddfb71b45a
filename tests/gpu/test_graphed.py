"""mixprec.graphed: N graphed steps leave the bits of N steps; what it cannot capture it says."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from on_gpu import needs_kernels
from torch import nn

import mixprec
from mixprec import scaling
from mixprec.recipes import RECIPES

STEPS = 9
Change = Callable[["Run"], object]


@pytest.fixture(autouse=True)
def graphs(only_cuda: None) -> None:
    """All of these are about graphs."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU()
        self.down, self.drop = nn.Linear(64, 32), nn.Dropout(0.1)
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.drop(self.down(self.act(self.up(self.norm(x))))))


class Run:
    """A training run, with all that it leaves."""

    def __init__(
        self,
        device: torch.device,
        *,
        recipe: str | None = "fp8",
        dtype: torch.dtype = torch.float32,
        optimizer: Callable[[Any], Any] = lambda p: mixprec.optim.AdamW(p, lr=1e-2),
        scaler: Callable[[], Any] | None = None,
        schedule: Callable[[Any], Any] | None = None,
        micro: int = 1,
        fuse: bool = False,
        body: Callable[[Run, torch.Tensor], Any] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net()
        if recipe is not None:
            self.model = mixprec.convert(self.model, recipe, fuse=fuse)
        self.model = self.model.to(device)
        if dtype != torch.float32:
            self.model = mixprec.cast_parameters(self.model, dtype)
        self.optimizer = optimizer(self.model.parameters())
        self.scaler = scaler and scaler()
        self.scheduler = schedule and schedule(self.optimizer)
        self.dtype, self.device, self.micro = dtype, device, micro
        self.body, self.runs, self.found = body or Run.train, 0, []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.to(self.dtype)).float().square().mean() / self.micro

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def train(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        for part in x.chunk(self.micro):
            loss = self.loss(part)
            self.backward(loss)
        self.update()
        return loss

    def step(self, x: torch.Tensor) -> Any:
        self.runs += 1
        return self.body(self, x)

    def state(self) -> list[Any]:
        params = list(self.model.parameters())
        states = [t for p in params for t in self.optimizer.state.get(p, {}).values()]
        tensors = [*params, *self.model.buffers(), *states, *(p.grad for p in params)]
        found = [bits(t) if isinstance(t, torch.Tensor) else t for t in tensors]
        found += [float(group["lr"]) for group in self.optimizer.param_groups]
        if isinstance(self.optimizer, mixprec.optim.AdamW):
            norm = self.optimizer.grad_norm
            found += [None if norm is None else bits(norm), int(self.optimizer.skipped)]
            found += [self.optimizer.last_step_skipped, self.optimizer.overflow_report(self.model)]
        if self.scaler is not None:
            found += [float(self.scaler._scale), self.scaler._growth_tracker.item()]
        if isinstance(self.scaler, mixprec.GradScaler):
            found += [self.scaler.overflow_report(self.model), str(self.scaler)]
            found += [self.scaler.underflow_report(self.model), self.scaler.last_step_skipped]
        return found

    def all(
        self, step: Any, changes: dict[int, Change], bad: tuple[int, ...], steps: int = STEPS
    ) -> Run:
        generator = torch.Generator().manual_seed(1)
        for i in range(steps):
            x = torch.randn(16 * self.micro, 32, generator=generator)
            if i in bad:
                x[-1, 0] = torch.inf
            changes.get(i, lambda run: None)(self)
            result = step(x.to(self.device))
            if self.scheduler is not None:
                self.scheduler.step()
            self.found += [bits(result), self.state()]
        return self


def bits(t: torch.Tensor) -> bytes:
    flat = t.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def both(
    device: torch.device,
    changes: dict[int, Change] | None = None,
    bad: tuple[int, ...] = (1, 6),
    warmup: int = 2,
    **options: Any,
) -> Run:
    """The graphed run; after each of its calls all is as in the other one."""
    eager, run = Run(device, **options), Run(device, **options)
    eager.all(eager.step, changes or {}, bad)
    torch.manual_seed(0)
    Run(device, **options)  # leaves the random numbers where the first one began
    run.all(mixprec.graphed(run.step, warmup=warmup), changes or {}, bad)
    for i, (want, got) in enumerate(zip(eager.found, run.found, strict=True)):
        assert got == want, f"{'state' if i % 2 else 'result'} after call {i // 2}"
    return run


def scaler(**options: Any) -> Callable[[], mixprec.GradScaler]:
    return lambda: mixprec.GradScaler(init_scale=2.0**10, growth_interval=2, **options)


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe(recipe: str, device: torch.device) -> None:
    needs_kernels(recipe)
    fuse = list(RECIPES).index(recipe) % 2 == 0
    run = both(device, recipe=recipe, fuse=fuse, scaler=scaler(), schedule=cosine)
    assert run.runs == 3  # two calls without a graph, and the capture


OPTIMIZERS: dict[str, tuple[torch.dtype, Callable[[Any], Any]]] = {
    "adam, clipped": (torch.float32, lambda p: mixprec.optim.Adam(p, max_grad_norm=0.1)),
    "adamw, fp16": (torch.float16, lambda p: mixprec.optim.AdamW(p, grad_dtype=torch.float32)),
    "adamw, 8 bits": (
        torch.bfloat16,
        lambda p: mixprec.optim.AdamW(p, master_weights="remainder8", state_dtype="int8"),
    ),
    "adamw, stochastic": (
        torch.bfloat16,
        lambda p: mixprec.optim.AdamW(p, stochastic_rounding=True, state_dtype=torch.bfloat16),
    ),
    "sgd": (torch.bfloat16, lambda p: mixprec.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "lion": (torch.float32, lambda p: mixprec.optim.Lion(p, max_grad_value=1e-3)),
    "muon": (torch.bfloat16, lambda p: mixprec.optim.Muon(p, max_grad_norm=0.1)),
    "lr on the CPU": (
        torch.float32,
        lambda p: mixprec.optim.AdamW(p, lr=torch.tensor(0.1, device="cpu")),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer(name: str, device: torch.device) -> None:
    dtype, make = OPTIMIZERS[name]
    run = both(device, recipe="bf16", dtype=dtype, optimizer=make, scaler=scaler(), schedule=cosine)
    assert run.runs == 3


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("place", ["begin", "end", "outside"])
def test_accumulation(place: str, to_none: bool, device: torch.device) -> None:
    def clear(run: Run) -> None:
        (run.model if to_none else run.optimizer).zero_grad(set_to_none=to_none)

    def body(run: Run, x: torch.Tensor) -> Any:
        if place == "begin":
            clear(run)
        total = torch.zeros((), device=x.device)
        with mixprec.reuse_weights(run.model):
            for part in x.chunk(3):
                loss = run.loss(part)
                run.backward(loss)
                total += loss.detach()
        mixprec.update_scales(run.model)
        run.update()
        if place == "end":
            clear(run)
        return total

    changes = dict.fromkeys(range(STEPS), clear) if place == "outside" else {}
    options: dict[str, Any] = {"recipe": "fp8-delayed", "dtype": torch.bfloat16, "micro": 3}
    run = both(device, changes, scaler=scaler(), body=body, **options)
    assert run.runs == 3


def test_torch_amp_with_a_fused_optimizer(device: torch.device) -> None:
    """The lr is a tensor; unscale_ and clip_grad_norm_ are captured too."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        lr = torch.tensor(1e-2, device=device)
        return torch.optim.AdamW(params, lr=lr, fused=True, capturable=True)

    def body(run: Run, x: torch.Tensor) -> Any:
        run.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = run.loss(x)
        run.backward(loss)
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.update()
        return loss

    amp = lambda: torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)  # noqa: E731
    for each in (Run.train, body):
        options: dict[str, Any] = {"recipe": None, "optimizer": optimizer, "body": each}
        assert both(device, scaler=amp, schedule=cosine, **options).runs == 3


def load(run: Run) -> None:
    """A checkpoint of this moment, with other lr, into the same objects."""
    saved = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    run.scaler.load_state_dict(run.scaler.state_dict())


def set_groups(name: str, value: Any) -> Change:
    return lambda run: [group.update({name: value}) for group in run.optimizer.param_groups]


def other_weights(run: Run) -> None:
    weights = {n: p.detach() * 0.5 for n, p in run.model.named_parameters()}
    run.model.load_state_dict({**run.model.state_dict(), **weights})


def scaled_data(run: Run) -> None:
    run.model.up.weight.data = run.model.up.weight.data * 0.5


def add_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, device=run.device))]})


def write_without_a_trace(run: Run) -> None:
    run.model.up.weight.data.mul_(0.5)
    run.optimizer.reload_model_params()


def halve(optimizer: Any, *_: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)


def replace_state(run: Run) -> None:
    """Other dicts with copies in them, as code that moves states does."""
    state = run.optimizer.state
    for p, values in list(state.items()):
        state[p] = {k: v.clone() if torch.is_tensor(v) else v for k, v in values.items()}


def replace_group(run: Run) -> None:
    groups = run.optimizer.param_groups
    groups[0] = dict(groups[0], weight_decay=0.5)


# What a call that finds the change costs: runs of the step's Python; 0 if the graph stays.
CHANGES: dict[str, tuple[Change, int]] = {
    "lr": (set_groups("lr", 0.5), 0),
    "new scale": (lambda run: run.scaler.update(2.0**4), 0),
    "random numbers": (lambda run: torch.manual_seed(7), 0),
    "reports": (lambda run: (str(run.optimizer), run.scaler.overflow_report()), 0),
    "evaluation": (lambda run: (run.model.eval(), run.model.train()), 0),
    "weight_decay": (set_groups("weight_decay", 0.5), 2),
    "betas": (set_groups("betas", (0.5, 0.5)), 2),
    "a number of another library": (set_groups("weight_decay", Fraction(1, 2)), 2),
    "a hook of the optimizer": (
        lambda run: run.optimizer.register_step_pre_hook(halve) and None,
        2,
    ),
    "max_grad_norm": (lambda run: setattr(run.optimizer, "max_grad_norm", 1e-3), 2),
    "growth": (lambda run: run.scaler.set_growth_factor(4.0), 2),
    "eval": (lambda run: run.model.eval(), 2),
    "dropout": (lambda run: setattr(run.model.drop, "p", 0.5), 2),
    "frozen": (lambda run: run.model.up.requires_grad_(False), 2),
    "checkpoint": (load, 2),
    "weights below masters": (other_weights, 2),
    "data": (scaled_data, 2),
    "data in place": (write_without_a_trace, 2),
    "group": (add_group, 2),
    "another group": (replace_group, 2),
    "another list": (
        lambda run: set_groups("params", run.optimizer.param_groups[0]["params"][1:])(run),
        2,
    ),
    "another state": (replace_state, 2),
    "another layer": (lambda run: setattr(run.model, "head", copy.deepcopy(run.model.head)), 2),
    "another recipe": (lambda run: setattr(run.model.up, "recipe", "bf16"), 2),
    "hook": (lambda run: run.model.up.register_forward_hook(lambda m, args, y: y * 0.5), 2),
    "gradient": (lambda run: run.optimizer.zero_grad(), 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls(name: str, device: torch.device) -> None:
    change, runs = CHANGES[name]
    options: dict[str, Any] = {"recipe": "fp8-delayed", "dtype": torch.bfloat16}
    run = both(device, {5: change}, scaler=scaler(), schedule=cosine, **options)
    assert run.runs == 3 + runs


def test_gradients_that_a_step_adds_to(device: torch.device) -> None:
    """They are found where the last call left them, or the call runs as it is."""

    def body(run: Run, x: torch.Tensor) -> Any:
        loss = run.loss(x)
        loss.backward()
        return loss

    clear: Change = lambda run: (run.optimizer.step(), run.optimizer.zero_grad())  # noqa: E731
    in_place: Change = lambda run: (  # noqa: E731
        run.optimizer.step(),
        run.optimizer.zero_grad(set_to_none=False),
    )
    for how in (clear, in_place):
        both(device, dict.fromkeys((2, 4, 6, 8), how), bad=(), dtype=torch.bfloat16, body=body)


def test_gradients_of_the_last_call_or_of_other_code(device: torch.device) -> None:
    """An update that begins a step reads gradients, which the step then replaces."""

    def late(run: Run, x: torch.Tensor) -> Any:
        run.optimizer.step()
        run.optimizer.zero_grad()
        loss = run.loss(x)
        loss.backward()
        return loss

    def last(run: Run, x: torch.Tensor) -> Any:
        loss = run.loss(x)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    first: Change = lambda run: run.loss(torch.ones(16, 32, device=device)).backward()  # noqa: E731
    with pytest.warns(UserWarning, match="because grad changes"):
        assert both(device, {0: first}, bad=(), body=late).runs == STEPS
    both(device, dict.fromkeys(range(STEPS), first), bad=(), body=last)
    both(device, {2: first, 6: first}, bad=(), body=last)


def test_blocks_around_a_call(device: torch.device) -> None:
    def body(run: Run, x: torch.Tensor) -> Any:
        with mixprec.autocast("bf16") if run.runs_in_bf16 else nullcontext():
            return step(x)

    found = []
    for graph in (False, True):
        run = Run(device, recipe="fp8")
        step = mixprec.graphed(run.step, warmup=1) if graph else run.step
        in_bf16 = {i: lambda run, i=i: setattr(run, "runs_in_bf16", i > 4) for i in range(STEPS)}
        run.all(lambda x, run=run: body(run, x), in_bf16, bad=())
        found.append(run.found)
    assert found[0] == found[1]
    assert run.runs == 4


@pytest.mark.filterwarnings("error")
def test_what_changes_in_each_call_is_named(device: torch.device) -> None:
    one_cycle = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40)  # noqa: E731
    with pytest.warns(UserWarning, match=r"because AdamW.param_groups\[0\].betas changes") as found:
        both(device, schedule=one_cycle)
    assert [Path(warning.filename) for warning in found] == [Path(__file__)]

    def body(run: Run, x: torch.Tensor) -> Any:
        run.model.count = getattr(run.model, "count", 0) + 1
        return run.train(x * run.model.count)

    with pytest.warns(UserWarning, match="because Net.count changes"):
        assert both(device, body=body).runs == STEPS


def test_consecutive_skips_are_seen(device: torch.device) -> None:
    reports: list[list[Any]] = []
    make = scaler(max_consecutive_skips=2, on_max_skips=reports.append)
    both(device, bad=(4, 5, 6, 7), scaler=make)
    assert len(reports) == 4
    assert reports[:2] == reports[2:]
    run = Run(device, scaler=scaler(max_consecutive_skips=2))
    with pytest.raises(RuntimeError, match="the last 2 updates were all skipped"):
        run.all(mixprec.graphed(run.step), {}, bad=(5, 6))
    assert len(run.found) == 12


def test_a_monitor_measures_steps_that_run_as_they_are(device: torch.device) -> None:
    found = []
    for graph in (False, True):
        run = Run(device, recipe="fp8")
        step = mixprec.graphed(run.step) if graph else run.step
        with mixprec.stats.Monitor(run.model, every=4) as monitor:
            run.all(step, dict.fromkeys(range(1, STEPS), lambda run: monitor.step()), bad=())
        found.append((run.found, monitor.records))
    assert found[0] == found[1]
    assert run.runs < STEPS


def test_compressed_tensors_have_new_random_numbers(device: torch.device) -> None:
    def body(run: Run, x: torch.Tensor) -> Any:
        run.optimizer.zero_grad()
        with mixprec.compress_saved("int4"):
            loss = run.loss(x)
        loss.backward()
        return loss, [p.grad for p in run.model.parameters()]

    run, x = Run(device, recipe="bf16", body=body), torch.randn(128, 32, device=device)
    run.model.eval()
    step = mixprec.graphed(run.step, warmup=1)
    results = [step(x) for _ in range(5)]
    assert run.runs == 2
    assert len({bits(loss) for loss, _ in results}) == 1
    assert len({bits(torch.cat([g.flatten() for g in grads])) for _, grads in results}) == 5


def refused_body(kind: str) -> Callable[[Run, torch.Tensor], Any]:
    def body(run: Run, x: torch.Tensor) -> Any:
        if kind == "lr":
            run.optimizer.param_groups[0]["lr"] = 0.5
        if kind == "write":
            x.mul_(2)
        region = torch.autocast("cuda", torch.bfloat16, cache_enabled=kind == "autocast")
        with region if kind == "inside" else nullcontext():
            loss = run.train(x)
        if kind == "scheduler":
            run.scheduler.step()
        if kind == "sync" and loss.item() > 1e9:
            return None
        if kind == "draw":
            loss = loss * torch.rand(()).item()
        if kind == "seed":
            torch.cuda.manual_seed(7)
        if kind == "nested":
            mixprec.graphed(lambda y: y * 2)(loss.detach())
        return {"number": loss.item, "cpu": loss.cpu}.get(kind, lambda: loss)()

    return body


REFUSED = {
    "sync": "step cannot be captured: .*wait for the device",
    "lr": "it sets lr",
    "write": "must not write to its inputs",
    "scheduler": "it calls a learning rate scheduler",
    "number": "must return tensors on the GPU or None, got [0-9.]+",
    "cpu": "must return tensors on the GPU or None, got .*cpu",
    "draw": "it draws random numbers on the CPU",
    "seed": "it calls torch.cuda.manual_seed, .*preserve_rng_state=False",
    "nested": "step must not call a graphed function",
    "release_gradients": "release_gradients=True decides on the host",
    "scaler": "the scale of a GradScaler is on the CPU",
    "reuse_weights": "enter it inside",
    "autocast": "enter it inside, or with cache_enabled=False",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind: str, device: torch.device) -> None:
    def optimizer(params: Any) -> Any:
        return mixprec.optim.SGD(params, release_gradients=kind == "release_gradients")

    schedule = cosine if kind == "scheduler" else None
    options: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule}
    run = Run(device, recipe="bf16", body=refused_body(kind), **options)
    around: Any = nullcontext()
    if kind == "reuse_weights":
        run.body, around = Run.loss, mixprec.reuse_weights(run.model)
    if kind == "autocast":
        around = torch.autocast("cuda", torch.bfloat16)
    if kind == "scaler":
        run.scaler = mixprec.GradScaler()
        run.scaler.scale(torch.ones(()))
        run.body = lambda run, x: run.scaler.scale(run.loss(x))
    step, x = mixprec.graphed(run.step, warmup=1), torch.randn(16, 32, device=device)

    def two_steps() -> None:
        with around:
            step(x)
            run.found = run.state()
            step(x)

    with pytest.raises((RuntimeError, ValueError), match=REFUSED[kind]):
        two_steps()
    if kind in ("sync", "lr"):  # what was not captured has changed nothing
        assert run.state() == run.found
        run.train(x)
        assert run.state() != run.found


def test_two_graphs_add_to_the_same_gradients(device: torch.device) -> None:
    def gradients(wrap: Callable[[Any], Any]) -> list[bytes]:
        w = nn.Parameter(torch.ones(4, device=device))
        w.grad = torch.zeros_like(w)
        steps = [wrap(lambda x, by=by: (w * x * by).sum().backward()) for by in (1, 3)]
        found = []
        for i in range(8):
            steps[i % 2](torch.full((4,), 0.1 * i, device=device))
            found.append(bits(w.grad))
        return found

    assert gradients(lambda step: mixprec.graphed(step, warmup=1)) == gradients(lambda step: step)


def test_containers_and_functions_of_modules(device: torch.device) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.act(super().forward(x)) * self.factors[0] * self.named["by"]
            for layer in self.layers.values():
                y = layer(y)
            return y * self.nested["all"][0]["by"] / len(self.kinds)

    def run(wrap: Callable[[Any], Any]) -> list[bytes]:
        torch.manual_seed(0)
        model = Scaled(4, 4).to(device)
        model.act, model.factors, model.named = torch.relu, [1.0], {"by": 1.0}
        model.nested, model.kinds = OrderedDict(all=[{"by": 1.0}]), {"one"}
        model.layers = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Softplus()})
        step, x, found = wrap(lambda x: model(x).sum()), torch.ones(2, 4, device=device), []
        changes = {
            3: lambda: model.factors.__setitem__(0, 2.0),
            6: lambda: model.named.update(by=3.0),
            9: lambda: setattr(model, "act", torch.tanh),
            12: lambda: model.nested["all"][0].update(by=5.0),
            15: lambda: model.kinds.add("two"),
            18: lambda: model.nested["all"][0].update(by=0.0),
            21: lambda: model.nested["all"][0].update(by=-0.0),
            24: lambda: model.nested["all"][0].update(by=2.0),
            27: lambda: model.layers.update({"a": model.layers.pop("a")}),
            30: lambda: setattr(model, "act", partial(torch.clamp, max=0.1)),
            33: lambda: setattr(model, "act", partial(torch.clamp, max=0.2)),
        }
        for i in range(36):
            changes.get(i, lambda: None)()
            found.append(bits(step(x)))
        return found

    assert run(lambda step: mixprec.graphed(step, warmup=1)) == run(lambda step: step)


def test_what_a_capture_would_repeat_or_hide(device: torch.device) -> None:
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.number += 1
            return super().forward(x) * self.number

    torch.manual_seed(0)
    model = Counts(4, 4)
    model.number = torch.zeros(())  # on the CPU, where no replay counts
    model = model.to(device)
    x, plain = torch.ones(2, 4, device=device), copy.deepcopy(model)
    step = mixprec.graphed(lambda x: model(x).sum(), warmup=1)
    want = [bits(plain(x).sum()) for _ in range(5)]
    with pytest.warns(UserWarning, match="step runs without a graph, because a tensor on the CPU"):
        found = [bits(step(x)) for _ in range(5)]
    assert found == want

    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    norm = mixprec.graphed(
        lambda x, m, v: nn.functional.batch_norm(x, m, v, training=True), warmup=1
    )
    with pytest.raises(ValueError, match="must not write to its inputs"):
        norm(torch.randn(8, 4, device=device), mean, var)

    optimizer = mixprec.optim.SGD(model.parameters(), lr=0.1)

    def reads_lr(x: torch.Tensor) -> Any:
        loss = plain(x).sum()
        optimizer.step()
        return loss * optimizer.param_groups[0]["lr"]

    plain.number = torch.zeros((), device=device)
    step = mixprec.graphed(reads_lr, warmup=1)
    step(x)
    with pytest.raises(RuntimeError, match="lr is an FP64 tensor in it"):
        step(x)

    def fails(x: torch.Tensor) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("its own")
        return x * 2

    step = mixprec.graphed(fails, warmup=1)
    step(x)
    with pytest.raises(KeyError, match="its own"):
        step(x)


def test_automatic_updates_are_a_setting(device: torch.device) -> None:
    change: Change = lambda run: scaling.set_automatic_updates(False)  # noqa: E731
    back: Change = lambda run: scaling.set_automatic_updates(True)  # noqa: E731
    try:
        both(device, {4: change, 7: back}, recipe="fp8-delayed", dtype=torch.bfloat16)
    finally:
        scaling.set_automatic_updates(True)


def test_constants_are_compared_by_type_and_sign(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    for first, other in ((1, True), (1, 1.0), (0.0, -0.0)):
        step = mixprec.graphed(lambda x, k: x * k, warmup=1)
        for _ in range(3):
            step(x, first)
        with pytest.raises(ValueError, match=r"inputs\[1\] must be"):
            step(x, other)
    step = mixprec.graphed(lambda x, k: x * k, warmup=1)
    assert all(step(x, float("nan")).isnan().all() for _ in range(3))


def test_inputs(device: torch.device) -> None:
    def step(batch: dict[str, Any], flag: bool) -> Any:
        return [None, {"sum": batch["x"] + batch["y"][0] if flag else batch["x"]}]

    x, y = (torch.randn(4, 3, device=device) for _ in "xy")
    graphed = mixprec.graphed(step, warmup=1)
    results = [graphed({"x": x * i, "y": (y,)}, flag=True) for i in range(4)]
    for i, (nothing, found) in enumerate(results):
        assert nothing is None
        assert bits(found["sum"]) == bits(x * i + y)
    for other, message in (
        ({"x": x[:2], "y": (y,)}, r"inputs\[0\] must be .*\[4, 3\].* as in the first call, got"),
        ({"x": x.double(), "y": (y,)}, "got .*float64"),
        ({"x": x.t().contiguous().t(), "y": (y,)}, r"got .*\(1, 4\)"),
        ({"x": x.cpu(), "y": (y,)}, "got .*cpu"),
        ({"x": x.clone().requires_grad_(), "y": (y,)}, "got .*True"),
        ({"x": x, "y": [y]}, "must be nested as"),
    ):
        with pytest.raises(ValueError, match=message):
            graphed(other, flag=True)
    with pytest.raises(ValueError, match=r"inputs\[2\] must be True as in the first call"):
        graphed({"x": x, "y": (y,)}, flag=False)
    for first, message in (
        (x.clone().requires_grad_(), "must need no gradient"),
        (x[:, :1].expand(4, 3), "must be dense"),
        ((x, y.cpu()), "must be on cuda:0 as another one, got one on cpu"),
        ((x, object()), "must be a tensor, got object"),
    ):
        with pytest.raises(ValueError, match=message):
            mixprec.graphed(lambda x: x)(first)


def test_what_a_replay_costs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 20 calls of Python, beside those that Dynamo and mixprec.stats add once something has
    imported them, and one of the dispatcher for each input, result and new lr."""
    monkeypatch.delitem(sys.modules, "mixprec.stats", raising=False)
    run = Run(device, scaler=scaler(), schedule=cosine)
    step = mixprec.graphed(lambda x, y: run.step(x + y))
    x, y = (torch.randn(16, 32, device=device) for _ in "xy")
    for _ in range(6):
        step(x, y)
    run.scheduler.step()
    calls: list[str] = []

    def look(frame: Any, event: str, _: Any) -> None:
        outer, names = frame, []
        while outer is not None:
            names.append(outer.f_code.co_filename)
            outer = outer.f_back
        if any(name.endswith("device/aten.py") for name in names) or "torch/_dynamo" in names[0]:
            return
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    with (
        patch.object(torch.cuda.CUDAGraph, "replay", lambda graph: None),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        with torch.autograd.profiler.profile() as profile:
            step(x, y)
        run.scheduler.step()
        sys.setprofile(look)
        step(x, y)
        sys.setprofile(None)
    assert len(calls) <= 20, "\n".join(calls)
    called = [e.name for e in profile.function_events if e.cpu_parent is None]
    assert called == ["aten::copy_", "aten::copy_", "aten::fill_", "aten::clone"]
