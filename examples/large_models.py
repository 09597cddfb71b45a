"""ResNet-50, EfficientNet-B0 and ViT-L/16 from torchvision or timm, with random weights.

They take the images of image_data.py, resized to 224 x 224 and repeated over three channels.
Dropout and stochastic depth are off, so that the losses of two precisions can be compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

SIDE = 224


class MissingPackageError(Exception):
    """Neither torchvision nor timm can be imported; the message is one sentence for the user."""


def _torchvision(name: str, **options: float) -> Callable[[ModuleType, int], nn.Module]:
    return lambda package, classes: getattr(package.models, name)(num_classes=classes, **options)


def _timm(name: str, **options: bool) -> Callable[[ModuleType, int], nn.Module]:
    return lambda package, classes: package.create_model(name, num_classes=classes, **options)


# For each model, how a package makes it; the first package that can be imported is used. For ViT
# that is timm: its attention is made of nn.Linear, all of which mixprec.convert replaces, while
# torchvision's nn.MultiheadAttention passes its weights to a function of torch.
LARGE_MODELS = {
    "resnet50": {
        "torchvision": _torchvision("resnet50"),
        "timm": _timm("resnet50", zero_init_last=False),
    },
    "efficientnet_b0": {
        "torchvision": _torchvision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0),
        "timm": _timm("efficientnet_b0"),
    },
    "vit_l": {
        "timm": _timm("vit_large_patch16_224"),
        "torchvision": _torchvision("vit_l_16"),
    },
}


class Resized(nn.Module):
    """model(images), of grayscale images [N, 1, side, side], as RGB of 224 x 224."""

    def __init__(self, model: nn.Module, channels_last: bool) -> None:
        super().__init__()
        self.model = model
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=self.memory_format)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear")
        images = images.expand(-1, 3, -1, -1).contiguous(memory_format=self.memory_format)
        return self.model(images)


def make(name: str, classes: int) -> nn.Module:
    """The model in FP32. MissingPackageError if no package that has it can be imported."""
    reasons = []
    for package, make_model in LARGE_MODELS[name].items():
        try:
            module = importlib.import_module(package)
        except Exception as error:  # also a torchvision that was built for another torch
            reasons.append(f"{package}: {next(iter(str(error).splitlines()), 'no message')}")
        else:
            return Resized(make_model(module, classes), channels_last=name != "vit_l")
    raise MissingPackageError(
        f"--model {name} needs torchvision or timm ({'; '.join(reasons)}): pip install torchvision"
    )
