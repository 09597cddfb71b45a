"""Settings, options, gradients and params that the optimizers refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optimizers import Kind, Run, assert_same, kinds, parameters, set_grads

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


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"differentiable": True}, "differentiable must be False"),
    ({"master_weights": "bf16"}, 'master_weights must be "auto", "fp32", "remainder16" or No'),
    ({"master_weights": True}, "master_weights must be"),
    ({"state_dtype": "bfloat16"}, "state_dtype must be torch.float32, torch.bfloat16 or "),
    ({"state_dtype": torch.float16}, "state_dtype must be"),
    ({"stochastic_rounding": 1}, "stochastic_rounding must be True or False"),
    ({"stochastic_rounding": True, "master_weights": "fp32"}, "stochastic_rounding is for"),
    ({"stochastic_rounding": True, "master_weights": "remainder16"}, "stochastic_rounding is"),
    ({"seed": -1}, r"seed must be an int in \[0, 2\^63\), got -1"),
    ({"seed": 2**63}, "seed must be"),
    ({"seed": 0.5}, "seed must be"),
    ({"grad_dtype": torch.bfloat16}, "grad_dtype must be torch.float32 or None"),
    ({"grad_dtype": "float32"}, "grad_dtype must be"),
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
