"""convert(invariant=True): the same bits whatever is beside a token, or an error that says why."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import mixprec
from mixprec.formats import E2M1
from mixprec.functional._exact_rows import matmul
from mixprec.recipes import RECIPES

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 96, "hidden_size": 96, "intermediate_size": 157, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": {"head_dim": 20},
    "Gemma3ForCausalLM": {"head_dim": 20, "sliding_window": 7},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make(name: str, recipe: str, low: bool = False) -> Any:
    torch.manual_seed(0)
    kind: Any = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES, **KINDS[name]))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4)
    mixprec.convert(model, recipe, invariant=True)
    return mixprec.cast_parameters(model, torch.bfloat16) if low else model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 96, (3, 18), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[0, :5] = mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("recipe", "low"), [("bf16", True), ("mxfp8", False)])
def test_every_way_to_run_a_model_has_the_same_bits(name: str, recipe: str, low: bool) -> None:
    model = make(name, recipe, low).eval()
    report = mixprec.invariance(model, batch())
    assert all(case.gap == 0 for case in report), str(report)


def test_sampling_and_training_after_steps() -> None:
    model = make("LlamaForCausalLM", "fp8-rowwise", True)
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(3):
        torch.manual_seed(seed)
        start = batch()
        sampled = model.eval().generate(
            **start, max_new_tokens=20, do_sample=True, temperature=0.8, top_k=20,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        text = sampled.sequences
        mask = torch.cat([start["attention_mask"], torch.ones(3, 20, dtype=torch.long)], 1)
        places = (mask.cumsum(1) - 1).clamp_min(0)
        logits = model.train()(text, attention_mask=mask, position_ids=places).logits
        assert torch.equal(logits[:, 17:-1], torch.stack(sampled.logits, 1))
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def written_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x + 0
    functional.silu(y, inplace=True)
    return y


class Calls(nn.Module):
    """A layer, then a function of torch."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(40, 40), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


W = torch.randn(7, 40, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "function",
    [
        functional.silu,
        functional.gelu,
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda x: functional.linear(x, W, torch.ones(7)),
        lambda x: x @ W.t(),
        lambda x: torch.matmul(W, x.mT),
        lambda x: x.softmax(-1),
        lambda x: (x[..., :5] * 3).softmax(dim=-1),
        lambda x: x.bfloat16().abs().add(1).rsqrt(),
        lambda x: x.bfloat16().abs().add(1) ** -0.5,
        lambda x: x.pow(2) + x**3,
        lambda x: (x @ W.t()).mul_(2),
        written_in_place,
        lambda x: x @ torch.ones(40),
        lambda x: functional.scaled_dot_product_attention(*(x.unsqueeze(1),) * 3),
    ],
)
def test_functions_between_layers(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Calls(function)
    x = torch.randn(6, 37, 40)
    plain = model(x)
    mixprec.convert(model, "fp16", invariant=True)
    y = model(x)
    torch.testing.assert_close(y, plain, atol=0.02, rtol=0.02)
    for first, last in ((0, 1), (2, 5), (5, 6)):
        assert torch.equal(model(x[first:last]), y[first:last])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (torch.sigmoid, "sigmoid is not invariant: torch computes the last elements"),
        (lambda x: torch.sigmoid_(x + 0), "sigmoid_ is not invariant"),
        (lambda x: x.abs().pow_(-0.5), "pow_ is not invariant"),
        (lambda x: x.abs().rsqrt_(), "rsqrt_ is not invariant"),
        (lambda x: x.abs() ** 1.7, "pow.* is not invariant: torch computes the last elements"),
        (lambda x: x.softmax(0), "softmax is not invariant: only along the last dimension"),
        (lambda x: torch.einsum("bi,ni->bn", x, W), "einsum is not invariant: torch chooses"),
        (lambda x: torch.addmm(torch.ones(7), x, W.t()), "addmm"),
        (functional.dropout, "dropout is not invariant: it draws at random; set its p, 0.5"),
        (
            lambda x: functional.batch_norm(x, None, None, training=True),
            "the mean and the variance",
        ),
        (lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "with dropout"),
    ],
)
def test_other_functions_are_refused_by_name(
    function: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    model = mixprec.convert(Calls(function), "bf16", invariant=True)
    with pytest.raises(RuntimeError, match=said):
        model(torch.randn(3, 40))
    mixprec.convert(model, "bf16")
    model(torch.randn(3, 40))


def test_experts_left_to_torch_are_refused() -> None:
    torch.manual_seed(0)
    kind = transformers.MixtralForCausalLM
    model = kind(kind.config_class(**SIZES, **KINDS["MixtralForCausalLM"])).eval()
    mixprec.convert(model, "bf16", overrides={"*.experts": None}, invariant=True)
    with pytest.raises(RuntimeError, match="grouped_mm is not invariant"):
        model(**batch())


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_is_invariant_or_refused(recipe: str) -> None:
    model, x = nn.Linear(160, 24), torch.randn(9, 160) * torch.logspace(-3, 3, 9)[:, None]
    shared = {"fp8", "fp8-delayed", "nvfp4", "nvfp4-1x16", "nvfp4-4over6", "quartet2"}
    if recipe in shared:
        with pytest.raises(ValueError, match="invariant=True is not possible"):
            mixprec.convert(model, recipe, invariant=True)
        return
    mixprec.convert(model, recipe, invariant=True)
    y = model(x)
    for first, last in ((0, 1), (3, 5), (8, 9)):
        assert torch.equal(model(x[first:last]), y[first:last])


MX32 = dict.fromkeys(("x_granularity", "w_granularity", "g_granularity"), "mx/32x32")
SQUARES = mixprec.Recipe("squares", E2M1, E2M1, E2M1, **MX32)


@pytest.mark.parametrize(
    ("recipe", "model", "said"),
    [
        ("fp8", nn.Linear(8, 8), "recipe fp8: x has a scale of all of x"),
        ("fp8-delayed", nn.Linear(8, 8), "delayed scales are those of earlier steps"),
        ("nvfp4-1x16", nn.Linear(8, 8), "x has an FP32 scale of all its rows"),
        (SQUARES, nn.Linear(8, 8), "recipe squares: 32 rows of x share a scale"),
        ("bf16", nn.Conv2d(3, 4, 3), "Conv2d: its kernel depends on the sizes"),
        (
            "bf16",
            nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)),
            "1, LSTM: its products are torch's",
        ),
        (
            "bf16",
            nn.Sequential(nn.Linear(8, 8), nn.GRUCell(8, 8)),
            "1, GRUCell: its products are torch's",
        ),
    ],
)
def test_what_cannot_be_converted(recipe: str, model: nn.Module, said: str) -> None:
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=said):
        mixprec.convert(model, recipe, invariant=True)
    assert [type(m) for m in model.modules()] == kinds
    assert "forward" not in vars(model)


def test_it_is_of_the_model_and_ends() -> None:
    model = mixprec.convert(Calls(torch.relu), "bf16", invariant=True, saved="int8")
    x = torch.randn(9, 40)
    y = model(x)
    for other in (copy.deepcopy(model), copy.copy(model)):
        assert torch.equal(other(x), y)
    model.function = torch.sigmoid
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match="sigmoid"):
            other(x)
    with mixprec.autocast("fp8"), pytest.raises(RuntimeError, match="all of x"):
        model(x)
    with mixprec.use_backend("reference"), pytest.raises(RuntimeError, match="backend reference"):
        model(x)
    mixprec.unconvert(model)
    assert "forward" not in vars(model)
    assert model(x).shape == (9, 40)
    with pytest.raises(TypeError, match="invariant must be True or False"):
        mixprec.convert(model, "bf16", invariant=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5, 33), (33, 9)),
        ((2, 3, 5, 33), (3, 33, 9)),
        ((4, 5, 7), (7, 2)),
        ((70, 2300), (2300, 65)),
    ],
)
def test_products_and_their_gradients(
    dtype: torch.dtype, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    a, b = (torch.randn(shape).to(dtype).requires_grad_() for shape in (left, right))
    y, want = matmul(a, b), a.double() @ b.double()
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want, atol=a.shape[-1] * tolerance, rtol=tolerance)
    g = torch.randn_like(y)
    for got, ref in zip(
        torch.autograd.grad(y, (a, b), g),
        torch.autograd.grad(want, (a, b), g.double()),
        strict=True,
    ):
        torch.testing.assert_close(got, ref, atol=99 * tolerance, rtol=4 * tolerance)
    assert torch.equal(matmul(a[..., :1, :], b), y[..., :1, :])
    assert not matmul(a, b).mul_(2)._is_view()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_order_does_not_depend_on_where_keys_stand(dtype: torch.dtype) -> None:
    """Shifted by hidden keys, over the borders of tiles, in a window, and alone."""
    q, k, v = (torch.randn(2, h, 230, 24).to(dtype) for h in (4, 2, 2))
    run = torch.ops.mixprec.attention.default
    sees = torch.ones(230, 230, dtype=torch.bool).tril().triu(-140)[None, None]
    whole = run(q, k, v, False, 0.2, sees, True)
    exact = run(q, k, v, False, 0.2, sees)
    torch.testing.assert_close(whole[0], exact[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(whole[1], exact[1], atol=1e-4, rtol=1e-4)
    full = run(q, k, v, True, 0.2, None, True)[0]
    assert torch.equal(full[:, :, :140], whole[0][:, :, :140])
    for row in (0, 95, 96, 139, 150, 229):
        first = max(row - 140, 0)
        part = slice(first, row + 1)
        one = q[:, :, row : row + 1], k[:, :, part], v[:, :, part]
        assert torch.equal(run(*one, False, 0.2, None, True)[0], whole[0][:, :, row : row + 1])
    for pad in (1, 7, 100):
        longer = [functional.pad(x, (0, 0, pad, 3), value=1.0) for x in (q, k, v)]
        mask = functional.pad(sees, (pad, 3, pad, 3), value=False)
        shifted = run(*longer, False, 0.2, mask, True)[0]
        assert torch.equal(shifted[:, :, pad:-3], whole[0])
