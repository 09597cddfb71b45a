"""plan: what products are predicted to do to the loss, the integer program, plans of models."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from independent import assert_same_bits
from models import Model as Parts
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import mixprec
from mixprec.diagnostics.plan.program import Costs, Program, choose, costs
from mixprec.diagnostics.plan.sensitivity import Layer
from mixprec.recipes import GEMMS

FORMATS = ("mxfp4", "fp8", "bf16")


class Model(nn.Module):
    """An MLP with dropout behind a 1 x 1 convolution, and layers that no plan has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = nn.Conv2d(3, 32, 1), nn.Conv2d(3, 3, 3, padding=1)
        self.up, self.down, self.head = nn.Linear(32, 96), nn.Linear(96, 32), nn.Linear(32, 8)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.unused, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.wide(image)).flatten(2).transpose(1, 2)
        x = x + self.down(self.dropout(F.gelu(self.up(x))))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return F.cross_entropy(self.head(x.mean(1)), label)


PLANNED = {"conv": ("forward", "grad_input", "grad_weight")} | dict.fromkeys(
    ("up", "down", "head"), GEMMS
)
LEFT = ("wide", "attention", "unused")


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(16, 3, 4, 4), torch.randint(8, (16,))) for _ in range(count)]


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def planned(**options: Any) -> mixprec.Plan:
    options = {"budget": {"time": 0.6}, "formats": FORMATS, **options}
    return mixprec.plan(model(), batches(), **options)


# The integer program


def tables(
    draws: random.Random, layers: int, decades: float
) -> tuple[dict[str, Any], dict[str, Costs]]:
    harm, prices = {}, {}
    for i in range(layers):
        products = GEMMS if i else (GEMMS[0], GEMMS[2])
        harm[str(i)] = {p: {r: 10 ** -draws.uniform(0, decades) for r in FORMATS} for p in products}
        prices[str(i)] = Costs(
            {p: {r: draws.random() for r in FORMATS} for p in products},
            {p: {r: draws.random() for r in FORMATS} for p in products},
        )
    return harm, prices


def by_hand(harm: Any, prices: Any, chosen: Any) -> dict[str, float]:
    found = {"loss": 0.0, "time": 0.0, "memory": 0.0}
    for name, products in chosen.items():
        for product, recipe in products.items():
            found["loss"] += harm[name][product][recipe]
            found["time"] += prices[name].product[product][recipe]
            found["memory"] += prices[name].kept[product][recipe]
    return found


@pytest.mark.parametrize("decades", [1, 3, 16])
@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_assignments(seed: int, decades: float) -> None:
    """Of two layers, five products and three recipes: 243 assignments, three budgets each."""
    draws = random.Random(seed)
    harm, prices = tables(draws, 2, decades)
    program = Program(harm, prices)
    places = [(name, p) for name, products in harm.items() for p in products]
    every = []
    for recipes in itertools.product(FORMATS, repeat=len(places)):
        chosen: dict[str, dict[str, str]] = {name: {} for name in harm}
        for (name, product), recipe in zip(places, recipes, strict=True):
            chosen[name][product] = recipe
        values = by_hand(harm, prices, chosen)
        every.append((chosen, values))
        assert program.value("time", chosen) == pytest.approx(values["time"])
    for limited, best, share in (
        ("time", "loss", 0.3),
        ("memory", "loss", 0.2),
        ("loss", "time", 0.4),
        ("loss", "time", 0.01),
        ("time", "loss", 0.7),
    ):
        values = sorted(values[limited] for _, values in every)
        limit = values[int(share * len(values))]
        least = min(v[best] for _, v in every if v[limited] <= limit)
        for objectives in ([best], [best, "memory"]):
            found = program.solve(objectives, {limited: limit})
            assert found is not None
            assert program.value(best, found) == pytest.approx(least, rel=2e-6, abs=0)
            assert program.value(limited, found) <= limit * (1 + 1e-8)
    assert program.solve(["loss"], {"time": 0.0}) is None


# Sensitivities


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
def test_predicted_is_what_the_loss_grows_by(loss: Any) -> None:
    """With the forward product of one layer in a format, on the batches that were measured."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    )
    data = []
    for _ in range(8):
        x = torch.randn(128, 64)
        target = x[:, :8].argmax(-1) if loss is F.cross_entropy else x[:, :8].tanh()
        data.append((x, target))

    task = Parts(lambda self, x, target: loss(self.net(x), target), net=net)
    optimizer = torch.optim.AdamW(task.parameters(), 3e-3)
    for _ in range(30):
        for batch in data:
            optimizer.zero_grad()
            task(*batch).backward()
            optimizer.step()
    plan = mixprec.plan(task, data, budget={"time": 1.0}, formats=("mxfp4", "nvfp4-1x16"))

    def total(assignment: Any) -> float:
        converted = plan.replaced(assignment).apply(copy.deepcopy(task))
        with torch.no_grad():
            return sum(float(converted(*batch)) for batch in data) / len(data)

    bf16 = {name: dict.fromkeys(p["harm"], "bf16") for name, p in plan.measured.items()}
    exact = total(bf16)
    for name in plan.measured:
        for recipe in ("mxfp4", "nvfp4-1x16"):
            changed = copy.deepcopy(bf16)
            changed[name]["forward"] = recipe
            grown, predicted = (
                total(changed) - exact,
                plan.measured[name]["harm"]["forward"][recipe],
            )
            assert predicted / 6 < grown < predicted * 6, (name, recipe)


def test_as_many_passes_as_were_allowed() -> None:
    calls = []

    class Counted(Model):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            return super().forward(*args)

    done: list[tuple[int, int]] = []
    for passes in (60, 12, 7, 4):
        calls.clear()
        found = mixprec.plan(
            Counted(), batches(9), budget={"time": 0.6}, passes=passes,
            progress=lambda *args: done.append(args),
        )  # fmt: skip
        assert sum(calls) + (len(calls) - sum(calls)) / 2 <= passes  # those without backward
        assert {*found.recipes} == {*PLANNED}
        assert done[-1][0] == done[-1][1]
        harm = [row["harm"]["grad_input"]["fp8"] for row in found.measured.values()]
        assert min(harm) > 0


# Plans


def test_of_a_model() -> None:
    plan = planned()
    assert {name: tuple(row["harm"]) for name, row in plan.measured.items()} == PLANNED
    assert {*LEFT} <= {*plan.left_out}
    assert plan.predicted["time"] <= 0.6
    assert plan.predicted["loss"] == pytest.approx(
        sum(
            plan.measured[name]["harm"][product][recipe]
            for name, products in plan.assignment().items()
            for product, recipe in products.items()
        )
    )
    text = str(plan)
    assert text.startswith("plan for time <= 0.6: loss +")
    assert "left out: attention: its products are not one of an input and its weight" in text
    assert "forward in " in plan.why("down")
    assert plan.why("wide") == "wide is left out: a convolution that is not 1 x 1"
    half = planned(budget={"loss": 2 * plan.predicted["loss"]})
    assert half.predicted["loss"] <= plan.predicted["loss"] * (1 + 1e-6)
    assert half.predicted["time"] <= plan.predicted["time"] * (1 + 1e-6)
    for limits in ({"loss": plan.predicted["loss"]}, {"memory": 0.4}, {"time": 0.7, "memory": 0.5}):
        other = planned(budget=limits)
        for name, limit in limits.items():
            assert other.predicted[name] <= limit * (1 + 1e-6)
    assert planned(budget={"time": 0.597}).predicted["loss"] >= plan.predicted["loss"]


def test_time_is_that_of_the_whole_model() -> None:
    """Products of layers that are not planned stay in bf16: a limit, the headline and the shares of
    the FLOPs count them."""
    net, plan = model(), planned()
    with FlopCounterMode(display=False) as counted:
        net(*batches()[0]).backward()
    flops = sum(row["flops"] * len(row["harm"]) for row in plan.measured.values())
    attention = 7 * 2 * 16**3 * 32  # products of 16 x 16 tokens; torch does not count a CPU's
    total = counted.get_total_flops() + attention
    assert flops + plan.rest == pytest.approx(total, rel=1e-3)
    program, chosen = plan.program(), plan.assignment()
    time = (program.value("time", chosen) + plan.rest) / total
    assert plan.predicted["time"] == pytest.approx(time, rel=1e-3)
    assert f"of {total / 1e6:.1f} MFLOP are planned" in str(plan)
    with pytest.raises(ValueError, match=r"least is time 0\.59\d+; 46\.1% of the time is of"):
        planned(budget={"time": 0.5})


def test_frozen_layers_and_checkpoints() -> None:
    """Only products that run are planned; once each."""
    net = model()
    net.up.weight.requires_grad_(False)
    net.conv.requires_grad_(False)
    plan = mixprec.plan(net, batches(), budget={"time": 0.65}, formats=FORMATS)
    products = {name: tuple(row["harm"]) for name, row in plan.measured.items()}
    assert products == PLANNED | {"up": GEMMS[:2], "conv": GEMMS[:2]}
    assert _reloaded(plan).assignment() == plan.assignment()

    class Again(Model):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, *args, use_reentrant=False)

    torch.manual_seed(1)
    other = mixprec.plan(Again(), batches(), budget={"time": 0.6}, formats=FORMATS)
    assert other.measured["up"]["flops"] == planned().measured["up"]["flops"]
    assert other.recipes == planned().recipes


def _reloaded(plan: mixprec.Plan) -> mixprec.Plan:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.json")
        return mixprec.Plan.load(f"{folder}/plan.json")


def test_nothing_is_left_of_it() -> None:
    net, data = model(), batches()
    net(*data[0]).backward()
    before = copy.deepcopy(net.state_dict())
    grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    state = torch.get_rng_state()
    whole = [torch.cat(parts) for parts in zip(*data, strict=True)]
    shuffled = DataLoader(TensorDataset(*whole), batch_size=8, shuffle=True)
    mixprec.plan(net, shuffled, budget={"time": 0.6})
    with pytest.raises(ValueError, match=r"the least is time 0\.5955"):
        mixprec.plan(net, data, budget={"time": 0.1})
    assert torch.equal(state, torch.get_rng_state())
    for name, value in net.state_dict().items():
        assert_same_bits(value, before[name])
    for p, grad in zip(net.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())


def test_applied_in_the_middle_of_a_run(tmp_path: Path) -> None:
    net, data = mixprec.convert(model(), "fp8"), batches()
    optimizer = mixprec.optim.AdamW(net.parameters(), lr=1e-3)
    for batch in data:
        net(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = mixprec.plan(net, data, budget={"time": 0.6}, formats=FORMATS, optimizer=optimizer)
    assert net.up.recipe.name == "fp8"
    plan.save(tmp_path / "plan.json")
    loaded = mixprec.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    loaded.apply(net)
    assert {name: net.get_submodule(name).recipe.name for name in plan.recipes} == plan.recipes
    assert net.attention.recipe.name == "bf16"
    with mixprec.audit(net) as audit:
        net(*data[0]).backward()
    ran = {(op.module, op.decided.split()[-1]) for op in audit.ops if op.module in plan.recipes}
    assert {name for name, _ in ran} == {*plan.recipes}
    assert {recipe for _, recipe in ran} <= {*plan.recipes.values(), "recipe"}


def test_recipes_of_a_file(tmp_path: Path) -> None:
    plan = planned()
    path = tmp_path / "plan.json"

    def load(**changed: Any) -> mixprec.Plan:
        plan.save(path)
        saved = json.loads(path.read_text())
        saved["recipes"] |= changed.pop("recipes", {})
        path.write_text(json.dumps(saved | changed))
        return mixprec.Plan.load(path)

    assert "attention" in plan.left_out
    loaded = load(recipes={"attention": "fp8"})
    net = model()
    loaded.apply(net)
    assert net.attention.recipe.name == "fp8"
    assert loaded.predicted == plan.predicted
    edited = load(recipes={"up": "fp8+gw-bf16"})
    assert edited.assignment()["up"] == {
        "forward": "fp8", "grad_input": "fp8", "grad_weight": "bf16"
    }  # fmt: skip
    assert edited.predicted != plan.predicted
    assert load(recipes={"up": "BF16+gw-tensorwise"}).recipes["up"] == "bf16+gw-fp8"
    for recipe, got in (("fp8-block", "fp8-block"), ("fp8+gi-nvfp4-1x16", "nvfp4-1x16")):
        with pytest.raises(ValueError, match=f"layer 'up' must be one of .* got '{got}'"):
            load(recipes={"up": recipe})
    with pytest.raises(ValueError, match="there was no layer 'upp'"):
        load(recipes={"upp": "fp8"})
    with pytest.raises(ValueError, match="the recipe of layer 'up' must have no outliers"):
        load(recipes={"up": "mxfp4+outliers-0.1"})
    for changed in ({"version": 1}, {"more": 1}):
        with pytest.raises(ValueError, match=r"must be a file of Plan\.save, of version 3"):
            load(**changed)
    path.write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        mixprec.Plan.load(path)


def test_models_that_were_not_planned() -> None:
    plan, other = planned(), model()
    other.down = nn.Linear(90, 32)
    with pytest.raises(ValueError, match=r"'down' with a weight of shape \[32, 96\].*\[32, 90\]"):
        plan.apply(other)
    assert type(other.up) is nn.Linear
    more = model()
    more.added = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="has a layer 'added' that was not planned"):
        plan.apply(more)
    with pytest.raises(ValueError, match=r"must have a layer 'conv'.* got none of that name"):
        plan.apply(nn.Sequential(nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"budget": {"speed": 1}}, "budget must be limits of some of"),
        ({"formats": ("fp16",)}, "outliers and loss scaling, got fp16"),
        ({"formats": ("fp8-delayed",)}, "without state"),
        ({"loss": lambda y: y * math.nan}, "must be a finite number, got nan of batch 0"),
        ({"budget": {"loss": 0.0, "time": 0.5}}, "no assignment keeps loss <= 0, time <= 0.5"),
        ({"model": nn.ReLU()}, "there is no layer to plan"),
        ({"batches": []}, "batches must have at least one"),
        ({"model": Model().requires_grad_(False)}, "the loss has no gradient"),
        ({"passes": 3}, "passes must be an int of 4 or more, got 3"),
    ],
)
def test_bad_input(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        mixprec.plan(**{"model": model(), "batches": batches(), "budget": {"time": 0.6}} | options)


# Costs


def test_costs() -> None:
    chosen = choose(("nvfp4-1x16", "fp8"))
    assert [*chosen] == ["bf16", "nvfp4-1x16", "fp8"]
    layer = Layer("a", nn.Linear(4096, 4096), flops=2 * 8192 * 4096**2)
    layer.x, layer.w = 8192 * 4096, 4096**2
    layer.harm = {product: dict.fromkeys(chosen, 0.0) for product in GEMMS}
    found = costs(layer, chosen)
    assert [layer.flops / found.product["forward"][name] for name in chosen] == [1, 4, 2]
    kept = {"bf16": 2 * layer.x, "nvfp4-1x16": layer.x * 9 / 16, "fp8": layer.x}
    assert found.kept["grad_weight"] == kept
    assert found.kept["grad_input"]["bf16"] == 0.0
    assert found.kept["grad_input"]["fp8"] == layer.w
    assert set(found.kept["forward"].values()) == {0.0}
