"""The vision models that are measured, from torchvision or timm, whichever is installed.

Dropout and stochastic depth are off, so that the losses of two precisions can be compared. A
rehearsal takes 64 x 64 pixels, and a ViT of two blocks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from . import gpu
from .registry import NotMeasured

CLASSES = 1000


def side() -> int:
    """Height and width of the images."""
    return 64 if gpu.REHEARSAL else 224


@dataclass(frozen=True)
class Model:
    """make: how each package that has it makes it, best first. batch: images a step when timed.
    lr: at which it learns from the first step on. channels_last: its and its images' format."""

    make: dict[str, Callable[[ModuleType], nn.Module]]
    batch: int
    lr: float
    channels_last: bool


def _torchvision(name: str, **options: float) -> Callable[[ModuleType], nn.Module]:
    return lambda package: getattr(package.models, name)(num_classes=CLASSES, **options)


def _timm(name: str, **options: bool) -> Callable[[ModuleType], nn.Module]:
    return lambda package: package.create_model(name, num_classes=CLASSES, **options)


def _torchvision_vit(package: ModuleType) -> nn.Module:
    depth = {"num_layers": 2} if gpu.REHEARSAL else {"num_layers": 24}
    sizes = {"patch_size": 16, "num_heads": 16, "hidden_dim": 1024, "mlp_dim": 4096}
    return package.models.VisionTransformer(
        image_size=side(), num_classes=CLASSES, **depth, **sizes
    )


def _timm_vit(package: ModuleType) -> nn.Module:
    options = {"depth": 2} if gpu.REHEARSAL else {}
    return package.create_model(
        "vit_large_patch16_224", num_classes=CLASSES, img_size=side(), **options
    )


MODELS = {
    "resnet50": Model(
        {"torchvision": _torchvision("resnet50"), "timm": _timm("resnet50", zero_init_last=False)},
        *(256, 3e-4, True),
    ),
    "efficientnet_b0": Model(
        {
            "torchvision": _torchvision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0),
            "timm": _timm("efficientnet_b0"),
        },
        *(256, 3e-4, True),
    ),
    # timm's attention is made of nn.Linear, all of which convert reaches; torchvision's is
    # nn.MultiheadAttention, which hands its weights to torch's own function.
    "vit_l_16": Model({"timm": _timm_vit, "torchvision": _torchvision_vit}, 64, 1e-4, False),
}


def find(name: str) -> tuple[str, Callable[[], nn.Module]]:
    """Where the model comes from, "timm 1.0.9", and a function that makes it in FP32 on the device,
    always with the same weights. NotMeasured if no package that has it can be imported."""
    model, reasons = MODELS[name], []
    for package, make in model.make.items():
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            reasons.append(f"{package} is not installed ({error})")
        except Exception as error:  # built for another torch, which only its import tells
            first = (str(error).splitlines() or [""])[0]
            reasons.append(f"{package} cannot be imported ({type(error).__name__}: {first[:200]})")
        else:
            source = f"{package} {getattr(module, '__version__', 'of unknown version')}"
            return source, _maker(model, make, module)
    raise NotMeasured("; ".join(reasons))


def _maker(
    model: Model, make: Callable[[ModuleType], nn.Module], package: ModuleType
) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        with gpu.DEVICE:  # 300 million random numbers take seconds on a CPU
            one = make(package)
        if model.channels_last:
            one = one.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return one

    return made


Batch = tuple[torch.Tensor, torch.Tensor]


def images(name: str, count: int, dtype: torch.dtype, seed: int = 0) -> Batch:
    """Random images [count, 3, side, side] in the model's memory format, and labels [count]."""
    generator = gpu.generator(seed)
    shape = (count, 3, side(), side())
    x = torch.randn(shape, generator=generator, device=gpu.DEVICE)  # in FP32: the same in any dtype
    labels = torch.randint(CLASSES, (count,), generator=generator, device=gpu.DEVICE)
    last = MODELS[name].channels_last
    order = torch.channels_last if last else torch.contiguous_format
    return x.to(dtype, memory_format=order), labels
