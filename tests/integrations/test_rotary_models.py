"""convert(fuse=True): rotary positions of transformers in one pass, where the function is known."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import profile

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mixprec  # noqa: E402
from mixprec.functional import _one_pass  # noqa: E402
from mixprec.nn import _scope  # noqa: E402
from mixprec.nn._replaced import replaced_of  # noqa: E402
from mixprec.nn._scope import RotaryForward  # noqa: E402
from mixprec.testing import sqnr  # noqa: E402

B, H, T, D = 2, 4, 7, 16


def tables(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.outer(torch.arange(T) + 3.0, 0.1 ** torch.linspace(0, 2, D // 2))
    return tuple(f(angle).repeat(1, 2)[None].to(dtype) for f in (torch.cos, torch.sin))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was rotated in one pass."""
    seen: list[torch.Tensor] = []
    rotated = _one_pass.rotated
    monkeypatch.setattr(_one_pass, "rotated", lambda *a: seen.append(a[0]) or rotated(*a))
    return seen


@pytest.mark.parametrize("entry", ["llama", "gemma3", "qwen3", "dbrx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_samples", [False, True])
def test_one_pass_has_the_bits_of_the_function(
    entry: str, dtype: torch.dtype, of_samples: bool, calls: list[torch.Tensor]
) -> None:
    """With FP32 tables: values of 16 bits become FP32. Also a table for each sample, whose halves
    differ."""
    given = tables()
    if of_samples:
        given = tuple(torch.cat([x, x.flip(1)]) for x in given)
        given[0][0, 3, D - 1] += 0.25
        given[1][1, 2, 3] -= 0.25
    module: Any = importlib.import_module(f"transformers.models.{entry}.modeling_{entry}")
    function = module.apply_rotary_pos_emb
    ends = []
    for rotate in (function, _scope._in_one_pass(function)):
        torch.manual_seed(0)
        q, k = (torch.randn(B, T, h, D).to(dtype).transpose(1, 2) for h in (H, 1))
        y = rotate(q.requires_grad_(), k.requires_grad_(), *given)
        (y[0].square().sum() + y[1].exp().sum()).backward()
        ends.append([*y, q.grad, k.grad])
        assert y[0].stride() == q.stride()
    expected, got = ends
    assert all(map(torch.equal, expected[:2], got[:2]))
    # Gradients of the function are rounded twice, and added.
    for theirs, ours in zip(expected[2:], got[2:], strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs) or dtype != torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    assert len(calls) == 4  # of q and k, forward and backward


def _given() -> dict[str, Any]:
    cos, sin = tables()
    q, k = torch.randn(B, H, T, D), torch.randn(B, 1, T, D)
    return {"q": q, "k": k, "cos": cos, "sin": sin, "more": ()}


def _rows(a: dict[str, Any]) -> None:
    a["q"], a["k"], a["more"] = a["q"].transpose(1, 2), a["k"].transpose(1, 2), (2,)


OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "heads behind positions": _rows,
    "tables of another dtype": lambda a: a.update(cos=a["cos"].double(), sin=a["sin"].double()),
    "16-bit values and tables of other 16 bits": lambda a: a.update(
        q=a["q"].half(), k=a["k"].half(), cos=a["cos"].bfloat16(), sin=a["sin"].bfloat16()
    ),
    "tables with a gradient": lambda a: a["cos"].requires_grad_(),
    "another number of positions": lambda a: a.update(q=a["q"][:, :, :1], k=a["k"][:, :, :1]),
    "fp64": lambda a: a.update({n: x.double() for n, x in a.items() if n != "more"}),
    "a complex sample": lambda a: a.update(q=a["q"].to(torch.complex64)),
    "a subclass": lambda a: a.update(q=a["q"].as_subclass(type("Own", (torch.Tensor,), {}))),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_the_kernel_does_not_compute_is_left_to_the_function(
    what: str, calls: list[torch.Tensor]
) -> None:
    function = importlib.import_module(
        "transformers.models.llama.modeling_llama"
    ).apply_rotary_pos_emb
    given = _given()
    OTHERS[what](given)
    *tensors, more = given.values()
    expected = function(*tensors, *more)
    got = _scope._in_one_pass(function)(*tensors, *more)
    assert all(map(torch.equal, expected, got))
    assert [y.dtype for y in got] == [y.dtype for y in expected]
    assert not calls


def llama() -> tuple[Any, torch.Tensor]:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config), torch.randint(0, 100, (2, 12))


def step(model: Any, tokens: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(input_ids=tokens, labels=tokens, **options)
    y.loss.backward()
    return [y.logits, *(p.grad.clone() for p in model.parameters())]


def test_a_model_has_the_bits_that_it_has_without(
    calls: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = llama()
    fused = mixprec.convert(copy.deepcopy(model), "bf16", fuse=True)
    kinds = [type(replaced_of(m)) for m in fused.modules()]
    assert kinds.count(RotaryForward) == 2
    packed = torch.tensor([[*range(5), *range(7)], [*range(7), *range(5)]])
    options: list[dict[str, Any]] = [{}, {"use_cache": True}, {"position_ids": packed}]
    options.append({"attention_mask": torch.ones_like(tokens).index_fill(1, tokens[0, :1] % 12, 0)})
    got = [step(fused, tokens, **more) for more in options]
    assert len(calls) == 4 * 8
    fused.gradient_checkpointing_enable()
    got.append(step(fused.train(), tokens))
    fused.gradient_checkpointing_disable()
    monkeypatch.setattr(_scope, "_ROTARY", "")
    for mine, more in zip(got, [*options, {}], strict=True):
        assert all(map(torch.equal, mine, step(fused, tokens, **more))), [*more]
    mixprec.unconvert(fused)
    assert not any("forward" in vars(m) for m in fused.modules())


def replaced(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (2 * q, k))


def half_replaced(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rotate_half", torch.zeros_like)


def decorated(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = module.LlamaAttention.forward

    @functools.wraps(forward)
    def other(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, 2 * hidden_states, *args, **kwargs)

    monkeypatch.setattr(module.LlamaAttention, "forward", other)


@pytest.mark.parametrize("change", [replaced, half_replaced, decorated])
@pytest.mark.parametrize("before", [True, False])
def test_functions_that_another_library_replaced_are_used(
    change: Any, before: bool, monkeypatch: pytest.MonkeyPatch, calls: list[torch.Tensor]
) -> None:
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    model, tokens = llama()
    first = mixprec.convert(copy.deepcopy(model), "bf16", fuse=True)
    before_change = step(first, tokens)
    calls.clear()
    change(module, monkeypatch)
    fused = mixprec.convert(model, "bf16", fuse=True) if before else first
    got = step(fused, tokens)
    assert not torch.equal(got[0], before_change[0])
    assert not calls


def test_deprecated_names_of_arguments_are_still_renamed() -> None:
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    forward = module.LlamaAttention.forward
    raw, renamed = _scope._undecorated(forward)
    assert raw is inspect.unwrap(forward)
    fused = mixprec.convert(llama()[0], "bf16", fuse=True)
    attention, x = fused.model.layers[0].self_attn, torch.randn(2, T, 64)
    cos, sin = tables()
    for name in renamed:
        cache = transformers.DynamicCache()
        attention(x, position_embeddings=(cos, sin), attention_mask=None, **{name: cache})
        assert cache.get_seq_length() == T


def test_a_model_in_torchs_autocast_runs_fused() -> None:
    model, tokens = llama()
    fused = mixprec.convert(copy.deepcopy(model), "bf16", fuse=True)
    mixprec.convert(model, "bf16")
    with profile() as p, torch.autocast("cpu", torch.bfloat16):
        got = step(fused, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, tokens)
    ran = {e.key for e in p.key_averages()}
    for op in ("attention", "rotary", "norm_quantize", "act_quantize"):
        assert f"mixprec::{op}" in ran
    assert got[0].dtype == expected[0].dtype
    for theirs, ours in zip(expected, got, strict=True):
        assert float(sqnr(theirs, ours)) > 25
