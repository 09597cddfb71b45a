"""What the optimizers refuse: settings, options, gradients, params, and states that do not fit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import name
from optimizers import KINDS, Kind, Run, assert_same, kinds, parameters, set_grads, through_a_file

from mixprec.optim import SGD, Adam, AdamW, Lion, Muon

ALL = (AdamW, Adam, SGD, Lion, Muon)
NUMBER, LR = "must be a finite number, 0 or more", "lr must be a number or a tensor of one fp32 or "
BAD: list[tuple[tuple[type, ...], dict[str, Any], str]] = [
    (ALL, {"lr": -1.0}, f"lr {NUMBER}, got -1.0"),
    ((AdamW, SGD), {"lr": math.nan}, "lr must be"),
    ((AdamW, SGD), {"lr": math.inf}, "lr must be"),
    ((AdamW, SGD), {"lr": torch.ones(2)}, LR),
    ((AdamW, SGD), {"lr": torch.tensor(1)}, LR),
    (ALL, {"weight_decay": math.nan}, f"weight_decay {NUMBER}"),
    ((AdamW, Adam), {"betas": (1.0, 0.9)}, r"betas\[0\] must be a number in \[0, 1\), got 1.0"),
    ((AdamW,), {"betas": (0.9, -0.1)}, r"betas\[1\] must be"),
    ((AdamW, Lion), {"betas": (0.9,)}, "betas must be"),
    ((AdamW, Muon), {"eps": -1e-8}, "eps must be"),
    ((SGD,), {"momentum": -0.1}, f"momentum {NUMBER}, got -0.1"),
    ((SGD,), {"momentum": torch.tensor(0.9)}, f"momentum {NUMBER}, got a tensor"),
    ((SGD,), {"dampening": math.nan}, f"dampening {NUMBER}, got nan"),
    ((SGD,), {"nesterov": True}, "nesterov needs a momentum above 0 and no dampening, got momentu"),
    ((SGD,), {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs a momentum"),
    ((Muon,), {"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
    ((Muon,), {"ns_steps": 2.5}, r"ns_steps must be an int in \[0, 100\), got 2.5"),
    ((Muon,), {"ns_coefficients": (1, 2)}, r"ns_coefficients must be three numbers, got \(1, 2\)"),
    ((Muon,), {"adjust_lr_fn": "new"}, "adjust_lr_fn must be one of None, 'original', 'match_rms_"),
    ((Muon,), {"ns_dtype": "fp16"}, "ns_dtype must be one of 'bf16', 'fp8', got 'fp16'"),
    ((AdamW, SGD), {"max_grad_norm": -1.0}, "max_grad_norm must be positive"),
]


@pytest.mark.parametrize(("ours", "settings", "message"), BAD, ids=str)
def test_bad_settings(ours: tuple[type, ...], settings: dict, message: str) -> None:
    """In the constructor, in a group of its own, and in a state dict."""
    for kind in ours:
        with pytest.raises(ValueError, match=f"^{kind.__name__}: {message}"):
            kind(parameters(), **settings)
        optimizer = kind(parameters(shapes=[(3, 5)]))
        with pytest.raises(ValueError, match=f"^{kind.__name__}: {message}"):
            optimizer.add_param_group({"params": parameters(), **settings})
        assert len(optimizer.param_groups) == 1
        state = optimizer.state_dict()
        state["param_groups"] = [{**state["param_groups"][0], **settings}]
        with pytest.raises(ValueError, match=f"^{kind.__name__}.load_state_dict: {message}"):
            optimizer.load_state_dict(state)


def test_options_of_all_groups_are_refused_in_one() -> None:
    group = {"params": parameters(), "seed": 1, "grad_dtype": torch.float32}
    for make in (lambda: AdamW([group]), lambda: AdamW(parameters()).add_param_group(group)):
        with pytest.raises(ValueError, match="a group must not have grad_dtype, seed: "):
            make()
    AdamW([{"params": parameters(), "max_grad_norm": 1.0, "own_key": 3}])
    AdamW([{"params": parameters(), "seed": 1}], seed=1)  # as ZeroRedundancyOptimizer gives it


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"differentiable": True}, "differentiable must be False"),
    (
        {"master_weights": "bf16"},
        'master_weights must be "auto", "fp32", "remainder16", "remainder8" or No',
    ),
    ({"master_weights": True}, "master_weights must be"),
    ({"state_dtype": "bf8"}, r'state_dtype must be torch.float32 \("fp32"\), .* \("bf16"\) or "i'),
    ({"state_dtype": torch.float16}, "state_dtype must be"),
    ({"stochastic_rounding": 1}, "stochastic_rounding must be True or False"),
    ({"stochastic_rounding": True, "master_weights": "fp32"}, "stochastic_rounding is for"),
    ({"stochastic_rounding": True, "master_weights": "remainder16"}, "stochastic_rounding is"),
    ({"seed": -1}, r"seed must be an int in \[0, 2\^63\), got -1"),
    ({"seed": 2**63}, "seed must be"),
    ({"seed": 0.5}, "seed must be"),
    ({"grad_dtype": torch.bfloat16}, r'grad_dtype must be torch.float32 \("fp32"\) or None'),
    ({"grad_dtype": "bf16"}, "grad_dtype must be"),
    ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, got 0.0"),
    ({"max_grad_norm": math.nan}, "max_grad_norm must be positive, got nan"),
    ({"max_grad_value": -1.0}, "max_grad_value must be positive, got -1.0"),
    ({"max_grad_norm": 1.0, "max_grad_value": 1.0}, "give max_grad_norm or max_grad_value, no"),
]


def test_bad_options() -> None:
    for kind in ALL:
        ignores = kind in (AdamW, Adam, SGD)  # those of torch that have no effect here
        for options, message in BAD_OPTIONS[0 if ignores else 1 :]:
            with pytest.raises(ValueError, match=f"^{kind.__name__}: {message}"):
                kind(parameters(torch.bfloat16), **options)
    for kind in (AdamW, Adam):
        who = kind.__name__
        match = f"^{who}: amsgrad must be False, got True: .*; torch.optim.{who} keeps it$"
        with pytest.raises(ValueError, match=match):
            kind(parameters(), amsgrad=True)
        with pytest.raises(ValueError, match=match):
            kind([{"params": parameters(), "amsgrad": True}])
    with pytest.raises(TypeError):  # torch.optim.SGD has none either
        SGD(parameters(), capturable=True)


@kinds
def test_sparse_gradients_and_params_of_other_dtypes_are_refused(kind: Kind) -> None:
    who = kind.ours.__name__
    table = torch.nn.Embedding(4, 2, sparse=True)
    run = Run(kind, [torch.nn.Parameter(torch.ones(2)), table.weight])
    first = f"^{who}: gradients must be dense, .*sparse=False"
    for message in (first, r"grads\[.\] must be a dense tensor"):  # and after a step that was dense
        before = run.copies()
        set_grads(run.params, 0)
        table.weight.grad = torch.zeros(4, 2).to_sparse()
        with pytest.raises(ValueError, match=message):
            run.optimizer.step()
        assert_same(run.tensors()[: len(before)], before)
        run.train()
    for dtype in (torch.complex64, torch.int32):
        p = torch.nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
        message = f"^{who}: params must be fp32, bf16, fp16 or fp64"
        with pytest.raises(ValueError, match=message) as error:
            kind([p])
        told = p.is_complex() and who in ("AdamW", "Adam", "SGD")
        assert (f"torch.optim.{who} takes complex ones" in str(error.value)) == told
    with pytest.raises(ValueError, match=f"^{who}: params must be dense, got layout torch.spars"):
        kind([torch.nn.Parameter(torch.eye(2).to_sparse())])


THEIRS = "AdamW Adam SGD Muon RAdam NAdam Adamax Adagrad RMSprop Rprop ASGD Adadelta Adafactor"
OTHERS = (*ALL, *(getattr(torch.optim, word) for word in THEIRS.split()))


@pytest.mark.parametrize("kind", ALL, ids=name)
def test_a_checkpoint_of_another_optimizer_is_refused(kind: type) -> None:
    for other in OTHERS:
        theirs, run = (Run(k, parameters(shapes=[(3, 5), (4, 6)]), lr=0.01) for k in (other, kind))
        theirs.train().set(lr=0.02)
        state = through_a_file(theirs.optimizer.state_dict())
        if kind.__name__ == other.__name__:
            run.train().optimizer.load_state_dict(state)
            assert run.optimizer.param_groups[0]["lr"] == 0.02
            continue
        message = f"^{kind.__name__}.load_state_dict: .*(another optimizer|AdamW decouples it)"
        assert_refused(run.train(), state, message)


def assert_refused(run: Run, state: dict[str, Any], message: str) -> None:
    """Which changes nothing."""
    before, groups = run.copies(), run.optimizer.state_dict()["param_groups"]
    with pytest.raises(ValueError, match=message):
        run.optimizer.load_state_dict(state)
    assert_same(run.tensors(), before)
    assert run.optimizer.state_dict()["param_groups"] == groups
    run.train()


def entry(param: int = 3, **values: Any) -> Callable[[dict], object]:
    return lambda state: state["state"][param].update(values)


def group(**values: Any) -> Callable[[dict], object]:
    return lambda state: state["param_groups"][0].update(values)


def damage(moment: str) -> list[tuple[Callable[[dict], object], str]]:
    """Param 3 has 129 elements, param 6 has moments in 8 bits."""
    ones, codes, scale = torch.ones(129), f"{moment}_scale must be float32", f"{moment}_scale"
    cases = [
        (lambda s: s.pop("state"), "keys state and param_groups"),
        (lambda s: s.pop("param_groups"), "keys state and param_groups"),
        (lambda s: s.update(param_groups=[{}]), "a list of param groups"),
        (lambda s: s.update(param_groups=[0]), "a list of param groups"),
        (lambda s: s.update(state={0: 5}), "a dict per param"),
        (lambda s: s.update(state=[]), "a dict per param"),
        (group(lr=torch.tensor([0.1, 0.1])), "lr must be"),
        *((entry(step=x), "step must be") for x in (-1.0, 0.5, math.nan, 2.0**24, ones[:2])),
        (entry(**{moment: torch.zeros(1)}), f"{moment} must be a tensor of shape"),
        (entry(**{moment: [0.0] * 129}), f"{moment} must be a tensor of shape"),
        (entry(**{moment: ones.double()}), f"{moment} must have dtype"),
        (entry(**{moment: ones.int()}), f"{moment} must have dtype"),
        (entry(master=ones[:5]), "master must be a tensor of shape"),
        (entry(max_exp_avg_sq=ones), "a state must hold .*another optimizer"),
        (entry(acc_delta=ones), "a state must hold .*another optimizer"),
        (entry(6, **{scale: torch.ones(36)}), rf"{codes} .*one per 256 elements .*\(36,\)"),
        (entry(6, **{scale: torch.ones(18).half()}), f"{codes} .*got float16"),
        (entry(6, **{scale: None}), f"{codes} .*got None"),
        (entry(6, **{moment: torch.zeros(3).byte()}), f"{moment} must be a tensor of shape"),
    ]
    if moment == "exp_avg":
        cases += [
            (lambda s: s["state"][3].pop("exp_avg_sq"), "a state must hold step, exp_avg, exp_a"),
            (group(amsgrad=True), "amsgrad must be False"),
        ]
    return cases


@pytest.mark.parametrize("kind", [KINDS["AdamW"], KINDS["nesterov"]], ids=str)
def test_a_damaged_state_is_refused_and_changes_nothing(kind: Kind) -> None:
    run = Run(kind, [*parameters(), *parameters(shapes=[(65, 70)])], state_dtype="int8").train(2)
    cases = damage("momentum_buffer" if kind.ours is SGD else "exp_avg")
    cases = [(change, f"^{kind}.load_state_dict: .*{message}") for change, message in cases]
    cases += [  # which torch refuses
        (lambda s: s["param_groups"][0]["params"].pop(), "loaded state"),
        (lambda s: s["param_groups"].append(dict(s["param_groups"][0])), "loaded state"),
    ]
    for change, message in cases:
        state = copy.deepcopy(run.optimizer.state_dict())
        change(state)
        assert_refused(run, state, message)


R16: dict[str, Any] = {"master_weights": "remainder16"}
NONE: dict[str, Any] = {"master_weights": None}
STOCHASTIC: dict[str, Any] = {"stochastic_rounding": True}
PLACES: list[tuple[torch.dtype, dict, torch.dtype, dict, str]] = [
    # (param, options of the writer, param, options of the reader, message)
    (torch.bfloat16, {}, torch.bfloat16, R16, "holds a master, .* a bfloat16 param"),
    (torch.bfloat16, {}, torch.bfloat16, NONE, "a master, .*master_weights=None"),
    (torch.bfloat16, {}, torch.bfloat16, STOCHASTIC, "a master, .*stochastic_rounding=True"),
    (torch.float16, {}, torch.float16, NONE, "holds a master, .* a float16 param"),
    (torch.bfloat16, R16, torch.bfloat16, {}, "holds a remainder, .* bfloat16 param"),
    (torch.bfloat16, R16, torch.bfloat16, NONE, "a remainder"),
    (torch.bfloat16, R16, torch.float16, R16, "holds a remainder, .* a float16 param"),
]


@kinds
def test_masters_and_remainders_without_a_place_are_refused(kind: Kind) -> None:
    for wrote_dtype, wrote, reads_dtype, reads, held in PLACES:
        state = Run(kind, wrote_dtype, **wrote).train().optimizer.state_dict()
        run = Run(kind, reads_dtype, **reads)
        message = rf"load_state_dict: the state .*{held}.*delete the key"
        with pytest.raises(ValueError, match=message):
            run.optimizer.load_state_dict(state)
        assert not run.optimizer.state
        for s in state["state"].values():  # as it says
            s.pop("master", None)
            s.pop("remainder", None)
        run.optimizer.load_state_dict(state)
        run.train()


@kinds
def test_wrong_dtypes_of_masters_are_refused(kind: Kind) -> None:
    for key, mix, wrong in (
        ("remainder", R16, torch.int32),
        ("remainder", R16, torch.float32),
        ("master", {}, torch.bfloat16),
        ("master", {}, torch.float64),
    ):
        run = Run(kind, torch.bfloat16, **mix).train()
        state = copy.deepcopy(run.optimizer.state_dict())
        state["state"][3][key] = state["state"][3][key].to(wrong)
        assert_refused(run, state, rf"load_state_dict: {key} must have dtype .*, got")
