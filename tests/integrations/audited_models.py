"""Small models with random weights, for tests of audit: how each is made, and its batch.

A case returns a module and the mapping of its arguments. `loss_of` makes a number of what it
returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

X = torch.linspace(-1, 1, 2 * 6 * 16).view(2, 6, 16)
IDS = torch.arange(12).view(2, 6) % 9


class Recurrent(nn.Module):
    """A classifier of sequences."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(9, 16), kind(16, 8, batch_first=True, **options)
        self.head = nn.Linear(8 * (1 + self.rnn.bidirectional), 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0][:, -1])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=2, dilation=2, padding=2),
            nn.GroupNorm(2, 8),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 9)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        return self.head(self.core(src, tgt))


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Blocks(nn.Module):
    """Blocks that each run in a checkpoint. (A reentrant one has no gradients if its input has
    none.)"""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        self.blocks, self.reentrant = nn.ModuleList([block(), block()]), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for each in self.blocks:
            x = x + checkpoint(each, x, use_reentrant=self.reentrant)
        return self.last(x)


class Reused(nn.Module):
    """One layer three times, once under another name, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 16), nn.Linear(16, 16)
        self.again, self.head = self.layer, nn.Linear(16, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embedding(ids))
        return self.head(self.again(self.layer(x).relu()))


class Product(torch.autograd.Function):
    """x @ w, whose backward pass is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.flatten(0, -2).t() @ g.flatten(0, -2)


class Multiplied(nn.Module):
    """A product of its own parameter, in a Function, beside one of einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.eye(16) + 0.1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.w.to(x.dtype)  # for autocast: a Function gets what the layer before returns
        return torch.einsum("bsd,de->bse", Product.apply(x, w), self.v)

    def by_hand(self, x: torch.Tensor) -> int:
        return 2 * 2 * x.numel() * 16


class Hooked(nn.Module):
    """A user's own hooks: before a layer, after it, in backward, and on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.one.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.two.register_forward_hook(lambda _, args, out: out + 1)
        self.three.register_full_backward_hook(lambda _, before, after: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        if x.requires_grad:
            x.register_hook(lambda g: g * 2)
        return self.three(self.two(x))


class Stacked(nn.Module):
    """Stacked weights, one product for each expert and its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(2, 1), self.weight, strict=True)
        return torch.cat([part @ w.t() for part, w in parts], 1)

    def by_hand(self, x: torch.Tensor) -> int:
        return 2 * x.numel() * 16


Case = tuple[nn.Module, dict[str, torch.Tensor]]
IMAGE = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
MODULES: dict[str, Callable[[], Case]] = {
    "Transformer": lambda: (Seq2Seq(), {"src": X, "tgt": X[:, :4]}),
    "LSTM": lambda: (Recurrent(nn.LSTM, num_layers=2), {"ids": IDS}),
    "GRU": lambda: (Recurrent(nn.GRU, bidirectional=True), {"ids": IDS}),
    "CNN": lambda: (Convolutions(), {"x": IMAGE}),
    "checkpoint": lambda: (Blocks(False), {"x": X}),
    "reentrant": lambda: (Blocks(True), {"x": X}),
    "reused and tied": lambda: (Reused(), {"ids": IDS}),
    "Function": lambda: (nn.Sequential(block(), Multiplied(), nn.Linear(16, 3)), {"input": X}),
    "hooks": lambda: (Hooked(), {"x": X}),
    "stacked": lambda: (nn.Sequential(block(), Stacked(), nn.Linear(16, 3)), {"input": X}),
}


Batch = dict[str, Any]
TOKENS = torch.arange(48).view(2, 24) % 90
TEXT: Batch = {"input_ids": TOKENS, "labels": TOKENS}
PIXELS = torch.linspace(-1, 1, 6 * 1024).view(2, 3, 32, 32)
IMAGES: Batch = {"pixel_values": PIXELS, "labels": torch.tensor([0, 1])}
MELS: Batch = {"input_features": torch.linspace(-1, 1, 512).view(2, 8, 32), "labels": TOKENS}
SOUND: Batch = {"input_values": torch.linspace(-1, 1, 400).view(2, 200), "labels": TOKENS[:, 1:5]}
PAIRS: Batch = {"input_ids": TOKENS, "pixel_values": PIXELS, "return_loss": True}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 0}
ENCODER_DECODER = {
    **HEADS,
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
}
TWO_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
FAMILIES: dict[str, tuple[str, dict[str, Any], Batch]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, TEXT),
    "Mistral": ("MistralForCausalLM", GROUPED, TEXT),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "Phi3": ("Phi3ForCausalLM", {}, TEXT),
    "Gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "GPTNeoX": ("GPTNeoXForCausalLM", {}, TEXT),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}, TEXT),
    "OPT": ("OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}, TEXT),
    "Bloom": ("BloomForCausalLM", {"n_head": 4, "n_layer": 2}, TEXT),
    "Mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}, TEXT),
    "Qwen3Moe": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32},
        TEXT,
    ),
    "Mamba": ("MambaForCausalLM", {"state_size": 4, "expand": 2}, TEXT),
    "Rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": 32}, TEXT),
    "Bert": ("BertForMaskedLM", {}, TEXT),
    "Roberta": ("RobertaForMaskedLM", {}, TEXT),
    "Electra": ("ElectraForMaskedLM", {"embedding_size": 32}, TEXT),
    "Deberta": (
        "DebertaV2ForMaskedLM",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        TEXT,
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "decoder_start_token_id": 0},
        TEXT,
    ),
    "Bart": ("BartForConditionalGeneration", ENCODER_DECODER, TEXT),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16},
        MELS,
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        {
            **{"conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [2, 2]},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "mask_time_prob": 0.0},
            "num_conv_pos_embedding_groups": 2,
        },
        SOUND,
    ),
    "CLIP": (
        "CLIPModel",
        {
            "text_config": {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 32},
            "vision_config": {**SIZES, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        PAIRS,
    ),
    "ViT": ("ViTForImageClassification", {"image_size": 32, "patch_size": 8}, IMAGES),
    "ConvNext": ("ConvNextForImageClassification", {**TWO_STAGES, "num_stages": 2}, IMAGES),
    "ResNet": (
        "ResNetForImageClassification",
        {**TWO_STAGES, "embedding_size": 8, "layer_type": "basic"},
        IMAGES,
    ),
}


def of_transformers(name: str) -> tuple[nn.Module, Batch]:
    kind, more, batch = FAMILIES[name]
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**{**SIZES, **more})), batch


def of_diffusers(name: str) -> tuple[nn.Module, Batch]:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 8}
    image, at = torch.linspace(-1, 1, 256).view(1, 4, 8, 8), torch.tensor([3])
    channels = {"in_channels": 4, "out_channels": 4}
    if name == "UNet2D":
        down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
        model = diffusers.UNet2DModel(
            down_block_types=down, up_block_types=up, attention_head_dim=4, layers_per_block=1,
            **blocks, **channels,
        )  # fmt: skip
        return model, {"sample": image, "timestep": at}
    if name == "AutoencoderKL":
        model = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            **blocks, **channels,
        )  # fmt: skip
        return model, {"sample": image}
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4, dropout=0.0,
    )  # fmt: skip
    return model, {"hidden_states": image, "timestep": at, "class_labels": torch.tensor([1])}


DIFFUSERS = ("UNet2D", "AutoencoderKL", "DiT")
MODELS: dict[str, Callable[[str], tuple[nn.Module, Batch]]] = {
    **dict.fromkeys(FAMILIES, of_transformers),
    **dict.fromkeys(DIFFUSERS, of_diffusers),
    **dict.fromkeys(MODULES, lambda name: MODULES[name]()),
}


def make(name: str) -> tuple[Any, Batch]:
    torch.manual_seed(0)
    model, batch = MODELS[name](name)
    return model.train(), batch


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model computes, or the mean square of what it returns."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    output = getattr(output, "sample", output)
    return (output[0] if isinstance(output, tuple) else output).float().square().mean()
