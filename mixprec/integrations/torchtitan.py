"""torchtitan: a converter for `model_registry` that makes the layers of its models mixprec's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..nn.convert import convert
from ..recipes import Recipe

try:
    from torchtitan.protocols.model import ModelConfigConverter
except ImportError as error:
    raise ImportError(
        "mixprec.integrations.torchtitan needs torchtitan 0.3 or later: pip install torchtitan"
    ) from error

__all__ = ["MixprecConverter"]


class MixprecConverter(ModelConfigConverter):
    """`convert` of the model as soon as torchtitan has built it, before it is split and compiled.

        model_spec=model_registry("8B", converters=[MixprecConverter.Config(recipe="fp8")])

    In the config: recipe, a name; overrides, other recipes by pattern of path, None to leave layers
    as they are ({"lm_head": None}); fuse. They are those of `convert`. Parameters stay FP32, and
    torchtitan's FSDP2 gathers them in `training.mixed_precision_param`.

    ValueError for a recipe that needs what torchtitan's training loop does not call: "fp16" a
    GradScaler, "fp8-delayed" `update_scales`. Loss scaling, masters and the optimizers of mixprec
    are for training loops of one's own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        recipe: str = "fp8"
        overrides: dict[str, str | None] = field(default_factory=dict)
        fuse: bool = False

    def __init__(self, config: Config) -> None:
        for name in filter(None, (config.recipe, *config.overrides.values())):
            recipe = Recipe.parse(name)
            if recipe.is_delayed or recipe.needs_loss_scaling:
                needed = "mixprec.update_scales" if recipe.is_delayed else "a mixprec.GradScaler"
                raise ValueError(
                    f"MixprecConverter: recipe must be one without state, got {name!r}: it needs "
                    f"{needed} in each step, which torchtitan does not call"
                )
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Change the class of this config of a model to one that converts what it builds."""
        kind, config = type(model_config), self.config

        def build(self: Any, **kwargs: Any) -> Any:
            model = kind.build(self, **kwargs)
            return convert(model, config.recipe, overrides=config.overrides, fuse=config.fuse)

        content = {"__slots__": (), "build": build, "__module__": kind.__module__}
        model_config.__class__ = type(kind.__name__, (kind,), content)
        return model_config
