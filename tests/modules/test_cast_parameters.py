"""cast_parameters: which parameters and buffers it casts, and what stays."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from cases import for_each, normal
from test_convert import Tied
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

import mixprec
from mixprec.nn import known_norms
from mixprec.nn._content import content_of

LOW = torch.bfloat16


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_cast_and_norms_stay(dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4), nn.LayerNorm(4)
    )
    model[3].weight.requires_grad_(False)
    model[4].to(dtype)  # becomes FP32
    ids = [id(p) for p in model.parameters()]
    want = {fqn: p.detach().to(dtype) for fqn, p in model.named_parameters()}
    assert mixprec.cast_parameters(model, dtype) is model
    assert [id(p) for p in model.parameters()] == ids
    for fqn, p in model.named_parameters():
        if fqn[0] in "14":
            assert p.dtype == torch.float32, fqn
        else:
            assert torch.equal(p, want[fqn]), fqn
    assert not model[3].weight.requires_grad
    y = model(normal((2, 3, 4, 4), dtype))
    assert y.dtype == dtype
    y.sum().backward()
    assert model[1].weight.grad.dtype == torch.float32


def test_casting_keeps_ties_gradients_and_goes_back() -> None:
    model = mixprec.convert(Tied(), "fp8")
    model(torch.arange(10)).sum().backward()
    grad = model.head.weight.grad.clone()
    mixprec.cast_parameters(model, LOW)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype == LOW
    assert torch.equal(model.head.weight.grad, grad.to(LOW))
    assert model(torch.arange(10)).dtype == LOW
    mixprec.cast_parameters(model, torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    integers = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.int8), False)])
    assert mixprec.cast_parameters(integers, LOW)[0].dtype == torch.int8
    layer = mixprec.cast_parameters(nn.Linear(2, 2, device="meta"), LOW)
    assert (layer.weight.is_meta, layer.weight.dtype) == (True, LOW)


@for_each(
    "dtype, words",
    [
        (torch.bfloat16, ["bfloat16", "bf16", "torch.bfloat16"]),
        (torch.float16, ["float16", "fp16", "half", "torch.float16"]),
        (torch.float32, ["float32", "fp32", "torch.float32"]),
    ],
)
def test_words_for_dtypes(dtype: torch.dtype, words: list[str]) -> None:
    for word in words:
        model = nn.Linear(2, 2, dtype=torch.float64)
        assert mixprec.cast_parameters(model, word).weight.dtype == dtype
        frozen = nn.Sequential(nn.Linear(2, 2))
        if dtype != torch.float32:
            mixprec.freeze(frozen, compute_dtype=word)
            assert frozen[0].compute_dtype == dtype
        if dtype != torch.float16:
            optimizer = mixprec.optim.AdamW(model.parameters(), state_dtype=word)
            model(torch.ones(2, dtype=dtype)).sum().backward()
            optimizer.step()
            assert optimizer.state[model.weight]["exp_avg"].dtype == dtype
    low = nn.Linear(2, 2, dtype=torch.bfloat16)
    mixprec.optim.AdamW(low.parameters(), grad_dtype="fp32")
    low(torch.ones(2, dtype=torch.bfloat16)).sum().backward()
    assert low.weight.grad.dtype == torch.float32


def test_errors() -> None:
    for wrong in (torch.float8_e4m3fn, "int8", None, ["bf16"]):
        with pytest.raises(ValueError, match=r'dtype must be .*"bfloat16", "bf16"'):
            mixprec.cast_parameters(nn.Linear(2, 2), wrong)
    with pytest.raises(TypeError, match=r"cast_parameters: model must be a torch.nn.Module"):
        mixprec.cast_parameters(torch.zeros(2), LOW)
    block = Block()
    for option in ("keep_fp32", "buffers"):
        match = rf"cast_parameters: {option} has 'routr\.\*', which mat"
        with pytest.raises(ValueError, match=match):
            mixprec.cast_parameters(block, LOW, **{option: ["routr.*"]})
        with pytest.raises(TypeError, match=f"{option} must be a list of patterns"):
            mixprec.cast_parameters(block, LOW, **{option: "router.*"})
    assert block.router.weight.dtype == torch.float32


class LlamaRMSNorm(nn.Module):
    """The user's own, which may be anything: only its name is that of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class AbnormalHead(LlamaRMSNorm):
    """Has the letters in its name."""


class NormalizedLinear(nn.Linear):
    """Has a matrix for a weight."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = LlamaRMSNorm(4), nn.Linear(4, 2)
        self.mixed, self.batch_norm = NormalizedLinear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("inv_freq", torch.ones(2))
        self.register_buffer("attn_mask", torch.ones(2))


def test_torchs_norms_stay_and_those_that_only_have_the_name_are_cast_and_listed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    block = Block()
    block.head, block.other = AbnormalHead(4), AbnormalHead(4)
    with caplog.at_level(logging.INFO, "mixprec"):
        mixprec.cast_parameters(block, LOW, keep_fp32=["other.*"])
    assert {p.dtype for p in block.batch_norm.parameters()} == {torch.float32}
    assert block.other.weight.dtype == torch.float32
    for module in (block.mixed, block.norm, block.head):
        assert {p.dtype for p in module.parameters()} == {LOW}
        assert not module._forward_hooks
    assert {b.dtype for b in block.buffers() if b.is_floating_point()} == {torch.float32}
    vectors, buffers = caplog.messages
    assert "cast to bfloat16: 1 LlamaRMSNorm, 1 AbnormalHead; " in vectors
    assert "stay in FP32: inv_freq [2], attn_mask [2]; " in buffers
    caplog.clear()
    mixprec.cast_parameters(Block(), LOW, keep_fp32=["norm.*"], buffers=["inv_freq", "attn_mask"])
    mixprec.cast_parameters(Block(), torch.float32)
    assert not caplog.messages


class Scaled(nn.LayerNorm):
    """Multiplies by its weight in another way than torch does, and returns the mean too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, x.float().mean()


def test_subclasses_of_torchs_norms_return_the_dtype_of_their_input() -> None:
    norm = mixprec.cast_parameters(mixprec.cast_parameters(Scaled(4), LOW), LOW)
    assert len(norm._forward_hooks) == 1
    for dtype in (LOW, torch.float32):
        assert [y.dtype for y in norm(torch.ones(2, 4, dtype=dtype))] == [dtype, dtype]


NORMS_OF_TRANSFORMERS = """
llama/LlamaRMSNorm gemma/GemmaRMSNorm detr/DetrFrozenBatchNorm2d afmoe/AfmoeRMSNorm
gemma3n/Gemma3nRMSNorm helium/HeliumRMSNorm moshi/MoshiRMSNorm t5/T5LayerNorm
mamba2/MambaRMSNormGated qwen3_next/Qwen3NextRMSNormGated kimi_linear/KimiLinearRMSNormGated
cohere/CohereLayerNorm
"""


@pytest.mark.slow
def test_every_known_norm_is_in_transformers_and_owns_vectors() -> None:
    pytest.importorskip("transformers")
    entries = [*NORMS_OF_TRANSFORMERS.split(), *known_norms._CLASSES.split()]
    kinds = []
    for entry in entries:
        *where, name = entry.split("/")
        path = f"transformers.models.{where[0]}.modeling_{where[-1]}"
        kinds.append(getattr(importlib.import_module(path), name))
    config = SimpleNamespace(hidden_size=8, head_dim=8, num_key_value_heads=2, eps=1e-6)
    config.input_size = 8
    norms = []
    for kind in kinds:
        parameters = list(inspect.signature(kind).parameters.values())
        needed = [p.name for p in parameters if p.default is p.empty] or [parameters[0].name]
        given = {"config": config, "feature_dims": (4,)}
        norms.append(kind(*(given.get(name, 8) for name in needed)))
        own = [*norms[-1].parameters(recurse=False), *norms[-1].buffers(recurse=False)]
        assert {t.dim() for t in own if t.numel() > 1} == {1}, kind
    assert {content_of(kind).digest for kind in kinds} >= known_norms._CONTENTS
    model = mixprec.cast_parameters(nn.ModuleList(norms), LOW)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# Models with buffers: what trains after .bfloat16() trains after cast_parameters


def mean_loss(model: nn.Module) -> float:
    """Of three steps, in whose forward passes spectral norms change their buffers."""
    torch.manual_seed(1)
    total = 0.0
    for x in torch.randn(3, 16, 2, 16):
        loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad.to(p.dtype))
        model.zero_grad()
        total += loss.item() / 3
    return total


KINDS: dict[str, tuple[Callable[..., nn.Module], Callable[[], nn.Module]]] = {
    "spectral_norm": (parametrizations.spectral_norm, lambda: nn.Conv1d(2, 8, 3)),
    "spectral_norm by hooks": (spectral_norm, lambda: nn.Conv1d(2, 8, 3)),
    "spectral_norm of a linear layer": (spectral_norm, lambda: nn.Linear(16, 16)),
    "pruning": (lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda: nn.Conv1d(2, 8, 3)),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated")
@for_each("kind", list(KINDS))
@for_each("convert", [False, True])
def test_weights_computed_with_buffers(kind: str, convert: bool) -> None:
    wrap, layer = KINDS[kind]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(wrap(layer()), nn.LeakyReLU(), nn.Flatten())

    model, want = make(), mean_loss(make().bfloat16())
    if convert:
        mixprec.convert(model, "bf16")
    names = [name for name, _ in model.named_buffers()]
    got = mean_loss(mixprec.cast_parameters(model, LOW))
    assert abs(got - want) < 0.02 * want
    assert [name for name, _ in model.named_buffers()] == names
    mixprec.cast_parameters(model, torch.float32)
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert mean_loss(model) > 0


@for_each("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_a_loss_with_class_weights_is_in_fp32(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": nn.Linear(8, 4), "loss": kind(torch.rand(4) + 0.5)})
    x, target = torch.randn(16, 8), torch.randint(4, (16,))
    for _ in range(2):
        mixprec.cast_parameters(model, LOW)
    assert len(model["loss"]._forward_pre_hooks) == 1
    logits = model["head"](x.bfloat16())
    loss = model["loss"](logits, target)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, model["loss"](logits.float(), target))
    loss.backward()
    assert model["head"].weight.grad.dtype == LOW


class Positions(nn.Module):
    """A position encoding of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pe", torch.randn(4, 8))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x + self.pe


def test_buffers_that_make_activations_fp32_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Module:
        layer = mixprec.convert(nn.Linear(8, 8), "fp8-delayed")
        frozen, _ = mixprec.freeze(nn.Sequential(nn.Linear(8, 8)))
        return nn.Sequential(Positions(), nn.Linear(8, 8), nn.BatchNorm1d(4), layer, frozen)

    x = torch.randn(2, 4, 8, dtype=LOW)
    with caplog.at_level(logging.INFO, "mixprec"):
        left = mixprec.cast_parameters(model(), LOW)
        told = [line for line in caplog.messages if "buffers" in line]
        cast = model()
        cast[0].same = nn.Sequential(Positions())
        cast[0].same[0].pe = cast[0].pe
        mixprec.cast_parameters(cast, LOW, buffers=["0.same.0.pe"])
        mixprec.cast_parameters(model(), torch.float32)
    assert told == [line for line in caplog.messages if "buffers" in line]
    assert len(told) == 1
    assert "buffers that stay in FP32: 0.pe [4, 8]; " in told[0]
    assert left[0](x).dtype == torch.float32
    assert cast(x).dtype == LOW
    assert cast[0].same[0].pe is cast[0].pe
