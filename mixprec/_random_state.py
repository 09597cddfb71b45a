"""The states of the random generators of torch, Python and NumPy, as plain data."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Python's and NumPy's generator are both MT19937, and the state of both is written as that of
# Python's random.getstate(): (3, 624 words and the position in them, the second normal number of a
# pair or None).


def get() -> dict[str, Any]:
    """The states of torch's generators, of Python's and, if it is in use, of numpy.random's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = {"cpu": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}
    if numpy_random := sys.modules.get("numpy.random"):
        state = numpy_random.get_state(legacy=False)
        kind = state["bit_generator"]
        if kind != "MT19937":
            raise ValueError(
                f"save_checkpoint: numpy.random must use its default generator, MT19937, got {kind}"
                "; pass rng=False and save the states in extra"
            )
        words = (*state["state"]["key"].tolist(), state["state"]["pos"])
        states["numpy"] = (3, words, state["gauss"] if state["has_gauss"] else None)
    return states


@contextmanager
def restored() -> Iterator[None]:
    """The states at the beginning of the block are those after it."""
    states = get()
    try:
        yield
    finally:
        put(states)


def check(where: str, states: Any) -> None:
    """ValueError unless `put` can restore the states."""
    if states is None:
        raise ValueError(f"{where} holds no state of random generators; pass rng=False")
    devices = torch.cuda.device_count()
    if len(states["cuda"]) not in (0, devices):
        raise ValueError(
            f"{where} holds the random generators of {len(states['cuda'])} CUDA devices, and here "
            f"are {devices}; pass rng=False to go on with other random numbers"
        )
    try:
        torch.Generator().set_state(states.get("cpu"))
        for i, one in enumerate(states["cuda"]):
            torch.Generator(f"cuda:{i}").set_state(one)
        for name in ("python", "numpy"):
            if name in states:  # older files have neither
                random.Random().setstate(states[name])  # NumPy would take any position
                if not isinstance(states[name][2], (float, type(None))):
                    raise TypeError(f"the state of {name} must end in a float or None")
    except Exception as error:
        raise ValueError(f"{where}: rng: {error}") from error


def put(states: dict[str, Any]) -> None:
    """Restore states that `get` returned and `check` let pass."""
    torch.set_rng_state(states["cpu"])
    for i, one in enumerate(states["cuda"]):
        torch.cuda.set_rng_state(one, i)
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        try:  # imported, because the run that goes on may import it later only
            numpy_random = importlib.import_module("numpy.random")
        except ImportError:
            return
        _, words, normal = states["numpy"]
        numpy_random.set_state(
            ("MT19937", words[:-1], words[-1], normal is not None, normal or 0.0)
        )
