"""compress_saved around models: how far gradients move, and what it composes with."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from cases import for_each
from layer_cases import equal, gradients, model_and_batch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import mixprec

Gradients = dict[str, torch.Tensor]


def compressed(
    model: nn.Module,
    x: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
    seed: int | None = 0,
) -> Gradients:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with mixprec.compress_saved("int8", seed=seed):
            return (run or model)(x)

    return gradients(model, x, inside)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_keeps_its_inputs(reentrant: bool) -> None:
    """The forward pass that it computes again has no reason to be right on average."""
    model, x = model_and_batch()
    model = mixprec.convert(model, "bf16").bfloat16()

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x * 2, use_reentrant=reentrant)

    x = x.bfloat16()
    plain = gradients(model, x, run)
    assert equal(compressed(model, x, run), plain)
    with mixprec.compress_saved({"0": "int8"}, model=torch.nn.Sequential(model)):  # not the loss
        assert equal(gradients(model, x, run), plain), "backward inside of the block"


def test_without_gradients_nothing_happens_and_nothing_is_left_on_tensors() -> None:
    model, x = model_and_batch()
    before = torch.get_rng_state()
    with mixprec.compress_saved("int4"), torch.no_grad():
        made = model(x) * 2
    assert torch.equal(before, torch.get_rng_state())
    compressed(model, x)
    for t in (*model.parameters(), made):
        assert not vars(t), "torch.save would store it"


@for_each(
    "bits, has_model, message",
    [
        ("int2", False, 'must be "int8", "int4", 8 or 4, got \'int2\''),
        ({"*": 3}, True, "got 3"),
        ({"*.head": 8}, True, r"match no module of the model: \['\*.head'\]"),
        ({"*": 8}, False, "need model="),
    ],
)
def test_errors(bits: Any, has_model: bool, message: str) -> None:
    model, _ = model_and_batch()
    with (
        pytest.raises(ValueError, match=message),
        mixprec.compress_saved(bits, model=model if has_model else None),
    ):
        raise AssertionError("entered")
    if has_model or isinstance(bits, str):
        with pytest.raises(ValueError, match=message):
            mixprec.convert(model, "bf16", saved=bits)
    with pytest.raises(ValueError, match="seed must be an int"):
        mixprec.compress_saved(8, seed=2**63).__enter__()


def test_backward_twice() -> None:
    model, x = model_and_batch()
    with mixprec.compress_saved("int8", seed=0):
        loss = model(x).square().mean()
    params = list(model.parameters())
    first = torch.autograd.grad(loss, params, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, params)))


def test_patterns_in_several_threads() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    mixprec.convert(model, "bf16", saved={"0": 4, "1": None})
    with ThreadPoolExecutor(4) as pool:
        inputs = [torch.randn(64, 64) for _ in range(200)]
        assert len(list(pool.map(lambda x: model(x).sum().backward(), inputs))) == 200


def test_convert_runs_the_model_compressed_until_unconvert() -> None:
    model, x = model_and_batch()
    plain = mixprec.convert(copy.deepcopy(model), "bf16")
    mixprec.convert(model, "bf16", saved="int8")

    def drawn(run: Callable[..., Gradients], model: nn.Module) -> Gradients:
        torch.manual_seed(1)
        return run(model, x)

    expected = drawn(partial(compressed, seed=None), plain)
    twin = copy.deepcopy(model)
    for m in (model, twin, pickle.loads(pickle.dumps(model))):
        assert equal(drawn(gradients, m), expected)
    assert twin.forward.__self__.module is twin
    assert model.state_dict().keys() == plain.state_dict().keys()
    mixprec.convert(twin, "bf16")
    assert equal(gradients(twin, x), gradients(plain, x))
    with pytest.raises(ValueError, match="recipe must be"):
        mixprec.convert(model, "fp9")
    assert equal(drawn(gradients, model), expected)
    mixprec.unconvert(model)
    assert "forward" not in vars(model)
    assert type(model[0].attention.proj) is nn.Linear


def test_compiled_code_saves_as_ever() -> None:
    """In one graph, which each further block uses again."""
    model, x = model_and_batch()
    plain = mixprec.convert(copy.deepcopy(model), "bf16")
    converted = mixprec.convert(copy.deepcopy(plain), "bf16", saved="int8")
    counter = CompileCounterWithBackend("aot_eager")

    def inside(x: torch.Tensor) -> torch.Tensor:
        with mixprec.compress_saved("int8"):
            return plain(x)

    cases = (
        (plain, plain, compressed),
        (plain, inside, gradients),
        (converted, converted, gradients),
    )
    for i, (owner, function, measure) in enumerate(cases):
        run = torch.compile(function, backend=counter, fullgraph=True)
        for _ in range(2):
            assert equal(measure(owner, x, run), gradients(plain, x))
        assert counter.frame_count == i + 1


def test_compiled_code_in_16_bits_keeps_what_it_saves() -> None:
    compiled = torch.compile(lambda x: torch.log(x * 1.0).sum(), backend="aot_eager")
    x = (torch.rand(8192) + 1e-3).bfloat16().requires_grad_()
    with mixprec.compress_saved("int8"):
        compiled(x + 0).backward()
    torch.testing.assert_close(x.grad, (1 / x.detach().float()).bfloat16())


def test_a_shallow_copy_runs_compressed() -> None:
    model = mixprec.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), "fp8",
                            saved="int8")  # fmt: skip
    x, grads = torch.randn(128, 64), []
    for each in (model, copy.copy(model)):
        torch.manual_seed(1)
        (grad,) = torch.autograd.grad(each(x).square().sum(), model[0].weight)
        grads.append(grad)
    assert torch.equal(*grads)
