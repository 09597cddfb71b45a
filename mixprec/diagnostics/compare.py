"""compare: train one task with several recipes; report the loss, speed and memory of each."""

from __future__ import annotations

import gc
import platform
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from .. import _masters, ops
from .._checkpoint_file import random_states_kept
from ..amp.grad_scaler import GradScaler
from ..nn.cast import cast_parameters
from ..nn.convert import convert
from ..ops._dispatch import simulation
from ..ops.block_operands import check_not_simulated
from ..optim import AdamW
from ..recipes import Recipe
from .plan.result import Plan
from .report import KINDS, Report, Row
from .training_run import TrainingRun, torch_formats
from .writers import Progress

Batches = Iterable[Any] | Callable[[], Iterable[Any]]


def compare(
    make_model: Callable[[], nn.Module],
    batches: Batches,
    recipes: Sequence[Recipe | str | Plan] | Recipe | str | Plan = ("fp32", "bf16", "fp16", "fp8"),
    *,
    validation: Batches | None = None,
    steps: int | None = None,
    lr: float = 1e-3,
    schedule: Callable[[int], float] | None = None,
    weight_decay: float = 1e-2,
    max_grad_norm: float | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    make_scaler: Callable[[], torch.amp.GradScaler] | None = None,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    fuse: bool = False,
    cast_inputs: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
    count: Callable[[Any], int] | None = None,
    unit: str = "samples",
    loss_name: str = "loss",
    loss_factor: float = 1.0,
    progress: Callable[[str, int, int | None, float], None] | None = None,
    sqnr: bool = False,
    simulate: str | None = None,
) -> Report:
    """Train the same task once per recipe, from the same seed and data order, and report.

    make_model() returns a new model at each call, whose forward returns the scalar loss, or an
    output with output.loss or output["loss"]. A model itself is refused: the second recipe would go
    on from what the first one learned. batches: the data of one run: a list, a DataLoader, or a
    function that returns an iterable; a batch is a tuple or list of forward's arguments, a dict (or
    another mapping) of its keyword arguments, or one tensor. steps: the maximum number of batches
    (None: all). validation: batches whose mean loss is measured at the end of a run and compared;
    without them, the training loss of the last tenth of the steps. recipes:

        "fp32"           the plain model: torch's Linear, FP32 parameters
        "bf16", "fp16"   mixprec.convert, parameters of that dtype, FP32 masters in the optimizer
        "fp8"            mixprec.convert, bf16 parameters, FP32 masters
        a Recipe         as the one above with the same formats; with outliers, these are chosen
                         by the first batches, before training
        a Plan           Plan.apply, parameters and masters as with "fp8"

    fp16 trains with a mixprec.GradScaler, or with the scaler that make_scaler() returns.
    module_filter_fn(module, fqn) excludes layers from the conversion, and fuse fuses what it can,
    as in `mixprec.convert`.
    cast_inputs: floating-point tensors of a batch are cast to the parameters' dtype.

    The optimizer is mixprec.optim.AdamW with lr, weight_decay and max_grad_norm, or the one that
    make_optimizer(model) returns; schedule(step), step = 0, 1, ..., multiplies its learning rates.
    count(batch) returns how many units (named by `unit`) a batch holds; if None, the size of the
    first dimension of its first tensor. loss_name and loss_factor: how the report shows losses.
    progress(recipe, step, steps, loss) is called after each step; None: a line on stderr says it,
    where that is a terminal.

    sqnr: after each complete run, measure every layer with a recipe in one forward and backward
    pass over the last batch, with the final weights and without an optimizer step. The signal to
    quantization noise ratio, 20 log10(||ref|| / ||ref - got||) in dB, is that of the casts of x, w
    and g (the gradient of the layer's output), and of y, grad_input and grad_weight against the
    FP32 products of the same x, w and g: the error of this layer only, without that of preceding
    layers. Off by default, because each layer is run again in the recipe and in FP32, and every x
    and g is kept. Timings, memory figures and losses are not affected. See `Report.sqnr_table` and
    `Report.suggest_overrides`.

    simulate: on a CPU, compute the GEMMs of the layers with a recipe as this GPU: "v100", "a100",
    "ada", "hopper" or "blackwell", or "h100", "4090" and so on (see `mixprec.simulate`). ValueError
    if it has no instructions for the formats of one of the recipes.

    A run whose loss is Inf or NaN ten times in a row is stopped, which its status reports. Ctrl-C
    stops the comparison: the report holds the results so far, and report.interrupted is true.
    Raises ValueError if the batches are not the same for each recipe or the loss is not one number,
    TypeError if make_model is no function or returns one model twice, or if batches can be read
    only once. Random states are restored.
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(
            "compare: make_model must be a function that makes a new model for each recipe, as in "
            f"compare(lambda: MyModel(), ...), got {type(make_model).__name__}"
        )
    device = torch.device(device)
    if make_optimizer is not None and max_grad_norm is not None:
        raise ValueError("compare: max_grad_norm must be given to your own optimizer, not here")
    for name, value in (("batches", batches), ("validation", validation)):
        if isinstance(value, Iterator):
            raise TypeError(
                f"compare: {name} must be readable once per recipe (a list, a DataLoader, or a "
                f"function that returns an iterable), got {type(value).__name__}"
            )
    if isinstance(recipes, (str, Recipe, Plan)):
        recipes = (recipes,)
    chosen = [_parsed(r) for r in recipes]
    block: AbstractContextManager[Any] = nullcontext()
    if simulate is not None:
        block = ops.simulate(simulate)
        simulate = block.arch
        for one in (r for row in chosen for r in _recipes(row)):
            if one.is_block:
                check_not_simulated(simulate)
            simulation.check(simulate, one.x.dtype)  # those of w and g are of its kind
    report = Report(unit, loss_name, loss_factor)
    report.rows = [Row("fp32" if r is None else r.name) for r in chosen]  # a plan has one, too
    names = [row.recipe for row in report.rows]
    if len(set(names)) != len(names):
        raise ValueError(f"compare: recipes must have different names, got {names}")
    report.environment = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    report.options = {"recipes": names, "seed": seed, "max_steps": steps}
    if simulate is not None:
        report.options["simulate"] = simulate
    if make_optimizer is None:
        report.options |= {"lr": lr, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        return AdamW(params, lr, weight_decay=weight_decay, max_grad_norm=max_grad_norm)

    made: WeakSet[nn.Module] = WeakSet()

    def prepare(row: Row, recipe: Recipe | Plan | None) -> TrainingRun:
        model, scaler = make_model(), None
        if not isinstance(model, nn.Module) or model in made:
            got = "the model of the recipe before" if model in made else type(model).__name__
            raise TypeError(
                "compare: make_model must return a new torch.nn.Module at each call, as in "
                f"compare(lambda: MyModel(), ...), got {got}"
            )
        made.add(model)
        model = model.to(device)
        if recipe is None:
            row.expected = dict.fromkeys(KINDS, torch_formats(torch.float32))
        elif isinstance(recipe, Plan):
            row.expected = _formats(Recipe.parse("bf16"))
            named = recipe.recipes.items()
            row.expected_in = {name: _formats(Recipe.parse(r)) for name, r in named}
            cast_parameters(recipe.apply(model), torch.bfloat16)
        else:
            row.expected = _formats(recipe)
            model = convert(model, recipe, module_filter_fn, fuse=fuse)
            cast_parameters(model, torch.float16 if recipe.needs_loss_scaling else torch.bfloat16)
            if recipe.needs_loss_scaling:
                scaler = make_scaler() if make_scaler else GradScaler(device.type)
        optimizer = (make_optimizer or adamw)(model)
        _masters.attach()
        for p in model.parameters():
            if "optimizer" not in (_masters.known(p) or {}):  # else one of ours updates it
                _masters.forget(p)
        run = TrainingRun(row, model, optimizer, scaler, device, cast_inputs, count)
        if isinstance(recipe, Recipe) and recipe.outliers:
            run.choose_outliers(_read(batches, steps)[0])
        return run

    if device.type == "cuda":
        torch.cuda.init()  # its generators have states from then on
    try:
        with random_states_kept(), torch.enable_grad(), block:
            for row, recipe in zip(report.rows, chosen, strict=True):
                _seed_all(seed)
                run = prepare(row, recipe)
                _seed_all(seed)  # a DataLoader that shuffles draws its order from here
                data, length = _read(batches, steps)
                try:
                    with Progress() as line:
                        shown = progress or _progress(line, report)
                        run.train(data, length, schedule, shown, report.rows[0].data)
                finally:
                    run.finish()
                if sqnr and row.status == "complete":
                    row.status = "interrupted in measuring SQNR"  # until it is over
                    run.measure_sqnr()
                    row.status = "complete"
                if validation is not None and row.status == "complete":
                    row.status = "interrupted in validation"  # until it is over
                    row.validation_loss = run.validate(_read(validation, None)[0])
                    row.status = "complete"
                # Collect before the next model is created, so that only one is in memory: models
                # and optimizers with hooks contain reference cycles.
                del run
                gc.collect()
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _progress(line: Progress, report: Report) -> Callable[[str, int, int | None, float], None]:
    def show(recipe: str, step: int, steps: int | None, loss: float) -> None:
        of = "" if steps is None else f" of {steps}"
        value = f"{report.loss_name} {loss * report.loss_factor:.4g}"
        line.show(f"compare: {recipe}, step {step}{of}, {value}")

    return show


def _parsed(recipe: Recipe | str | Plan) -> Recipe | Plan | None:
    if isinstance(recipe, Plan):
        return recipe
    return None if recipe == "fp32" else Recipe.parse(recipe)


def _recipes(one: Recipe | Plan | None) -> list[Recipe]:
    """Of all products of all layers."""
    if one is None:
        return []
    recipes = [one] if isinstance(one, Recipe) else [Recipe.parse(r) for r in one.recipes.values()]
    return [recipe.product(name) for recipe in recipes for name in KINDS]


def _formats(recipe: Recipe) -> dict[str, str]:
    """Of the operands of each product."""
    return {k: " x ".join(f.name for f in getattr(recipe, k)) for k in KINDS}


def _read(batches: Batches, steps: int | None) -> tuple[Iterable[Any], int | None]:
    """The batches of one run, and their number if it is known."""
    data = batches() if callable(batches) else batches
    try:
        length = len(data)  # type: ignore[arg-type]
    except TypeError:
        return data, steps
    return data, length if steps is None else min(steps, length)


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(seed % 2**32)
