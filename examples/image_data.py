"""Small labelled images, without any download: glyphs of matplotlib's fonts.

Digits and capital letters of the 21 text fonts that matplotlib brings, thinned or thickened,
rotated, sheared, scaled, blurred and with noise. For each character, some fonts are used for the
held-out set only, so it has shapes that are in no training image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
    *("DejaVuSansMono-BoldOblique", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic"),
    *("DejaVuSerif-BoldItalic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic"),
    *("STIXGeneralBolIta", "cmb10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TILE, SIDE = 64, 28  # pixels of a rendered glyph and of an image
HELD_OUT_FONTS = 4  # different ones for each character
TRAIN, HELD_OUT = 20_000, 10_000


class DataError(Exception):
    """The data set is not available; the message is one sentence for the user."""


@dataclass(frozen=True)
class Images:
    """images: fp32 [n, 1, side, side], of mean 0 and variance 1 over all; labels: int64 [n].

    sources: int64 [n], which drawing an image was made from; none is in both sets.
    """

    classes: str
    train: tuple[torch.Tensor, torch.Tensor]
    held_out: tuple[torch.Tensor, torch.Tensor]
    train_sources: torch.Tensor
    held_out_sources: torch.Tensor

    @property
    def side(self) -> int:
        return self.train[0].shape[-1]


def render() -> torch.Tensor:
    """Each character in each font, ink 1 on 0, centred: fp32 [fonts, characters, TILE, TILE]."""
    try:
        import matplotlib
        from matplotlib.ft2font import FT2Font
    except ImportError as error:
        raise DataError(f"the glyphs need matplotlib ({error}): pip install matplotlib") from error
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    atlas = torch.zeros(len(FONTS), len(CHARACTERS), TILE, TILE)
    for tiles, name in zip(atlas, FONTS, strict=True):
        try:
            font = FT2Font(str(folder / f"{name}.ttf"))
        except OSError as error:
            raise DataError(f"matplotlib has no font {name}: reinstall it") from error
        font.set_size(44, 72)  # pixels at 72 dots per inch: the widest, a bold W, has 52
        for tile, character in zip(tiles, CHARACTERS, strict=True):
            font.set_text(character)
            font.draw_glyphs_to_bitmap(antialiased=True)
            glyph = torch.tensor(font.get_image()).float() / 255  # a copy: the font reuses it
            height, width = glyph.shape
            top, left = (TILE - height) // 2, (TILE - width) // 2
            tile[top : top + height, left : left + width] = glyph
    return atlas


def uniform(generator: torch.Generator, n: int, low: float, high: float) -> torch.Tensor:
    return low + (high - low) * torch.rand(n, generator=generator)


def draw(glyphs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random deformation of each of glyphs [n, 1, TILE, TILE]: fp32 [n, 1, SIDE, SIDE]."""
    n = len(glyphs)
    # The affine map from image to tile coordinates: rotation, shear, scale, translation.
    angle = uniform(generator, n, -0.2, 0.2)
    shear = uniform(generator, n, -0.15, 0.15)
    wide, high = uniform(generator, n, 0.65, 0.9), uniform(generator, n, 0.65, 0.9)
    cos, sin = angle.cos(), angle.sin()
    move = [uniform(generator, n, -0.06, 0.06) for _ in range(2)]
    rows = [wide * cos, wide * (shear * cos - sin), move[0]]
    rows += [high * sin, high * (shear * sin + cos), move[1]]
    affine = torch.stack(rows, dim=1).view(n, 2, 3)
    grid = F.affine_grid(affine, [n, 1, SIDE, SIDE], align_corners=False)
    images = F.grid_sample(glyphs, grid, align_corners=False)

    def mix(a: torch.Tensor, b: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return torch.lerp(a, b, share.view(n, 1, 1, 1))

    blurred = F.avg_pool2d(images, 3, stride=1, padding=1)
    images = mix(images, blurred, uniform(generator, n, 0.0, 1.0))
    noise = torch.randn(images.shape, generator=generator)
    contrast = uniform(generator, n, 0.5, 1.0).view(n, 1, 1, 1)
    return contrast * images + uniform(generator, n, 0.0, 0.15).view(n, 1, 1, 1) * noise


def glyph_images(train: int = TRAIN, held_out: int = HELD_OUT, seed: int = 0) -> Images:
    """`train` and `held_out` images, all from `seed`. DataError without matplotlib."""
    generator = torch.Generator().manual_seed(seed)
    atlas = render().unsqueeze(2)
    thin = -F.max_pool2d(-atlas.flatten(0, 1), 3, stride=1, padding=1).view_as(atlas)
    thick = F.max_pool2d(atlas.flatten(0, 1), 3, stride=1, padding=1).view_as(atlas)
    weights = torch.stack((atlas, (atlas + thin) / 2, thick))
    fonts, characters = atlas.shape[:2]
    # Fonts in a random order for each character: the last few are held out.
    order = torch.rand(characters, fonts, generator=generator).argsort(dim=1)

    def sample(n: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        labels = torch.arange(n) % characters  # as many of each
        font = order[labels, torch.randint(first, end, (n,), generator=generator)]
        weight = torch.randint(len(weights), (n,), generator=generator)
        images = torch.empty(n, 1, SIDE, SIDE)
        for part in torch.arange(n).split(2000):  # one tile an image: all at once is 1 GB
            tiles = weights[weight[part], font[part], labels[part]]
            images[part] = draw(tiles, generator)
        return images, labels, font * characters + labels

    cut = fonts - HELD_OUT_FONTS
    x, y, sources = sample(train, 0, cut)
    x_held_out, y_held_out, sources_held_out = sample(held_out, cut, fonts)
    mean, std = x.mean(), x.std()
    sets = ((x - mean) / std, y), ((x_held_out - mean) / std, y_held_out)
    return Images(CHARACTERS, *sets, sources, sources_held_out)


@lru_cache(maxsize=1)
def load() -> Images:
    """The glyphs, made once per process."""
    return glyph_images()


class Batches:
    """`count` batches (images, labels) of `batch` samples each, in random order from `seed`.

    Epoch after epoch, each with its own order; the same at each iteration.
    """

    def __init__(
        self, data: tuple[torch.Tensor, torch.Tensor], batch: int, count: int, seed: int
    ) -> None:
        self.data, self.count = data, count
        generator = torch.Generator().manual_seed(seed)
        n = len(data[1])
        epochs = -(-count * batch // n)
        order = torch.cat([torch.randperm(n, generator=generator) for _ in range(epochs)])
        self.order = order[: count * batch].view(count, batch)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= i < self.count:  # ends a for loop over the batches
            raise IndexError(i)
        images, labels = self.data
        return images[self.order[i]], labels[self.order[i]]
