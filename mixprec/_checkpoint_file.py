"""The file of a checkpoint: plain data with a checksum, read completely or refused; and the states
of the random generators of torch, Python and NumPy as such data."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import random
import secrets
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from ._local_gradients import is_sharded


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Call write(temporary) to create a file in the folder of `path`, then rename it to `path`.

    If that fails (a full disk, Ctrl-C), `path` is unchanged and no temporary file is left; only a
    process that is killed leaves `.NAME.*.tmp`. When this returns, the file survives a crash of the
    machine.
    """
    target = Path(path)
    if target.exists() and not target.is_file():  # a device or a pipe: not to be renamed over
        write(target)
        return
    # A random name: process ids may be equal on two machines that share the folder.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            try:
                os.fsync(file.fileno())  # a full disk may be noticed only when caches are flushed
            except OSError as error:
                error.filename = os.fspath(path)  # which a file number does not tell
                raise
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder, nor can Windows
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


FORMAT, VERSION = "mixprec checkpoint", 1

# The types that torch.load(weights_only=True) restores. A subclass (a NumPy float, a namedtuple)
# would be saved as a reference to its class, which it rejects.
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.Size)
_LISTS, _DICTS = (list, tuple), (dict, OrderedDict, Counter)


def check_plain(place: str, value: Any) -> None:
    """ValueError, naming the place, for what torch.load(weights_only=True) would not restore."""
    kind = type(value)
    if is_sharded(value):
        raise ValueError(
            f"save_checkpoint: {place} is a DTensor, of which each rank has a part; save sharded "
            "models and their optimizers with torch.distributed.checkpoint"
        )
    if kind in _TENSORS:
        if value.is_meta:
            raise ValueError(f"save_checkpoint: {place} is on the meta device and has no values")
    elif kind in _LISTS:
        for i, item in enumerate(value):
            check_plain(f"{place}[{i}]", item)
    elif kind in _DICTS:
        for key, item in value.items():
            if type(key) not in _VALUES:
                raise ValueError(
                    f"save_checkpoint: the keys of {place} must be strings or numbers, got {key!r}"
                )
            check_plain(f"{place}[{key!r}]", item)
    elif kind not in _VALUES:
        raise ValueError(
            f"save_checkpoint: {place} must be a tensor, a number, a string, or a list or dict of "
            f"such, got {kind.__module__}.{kind.__qualname__}"
        )


def write(checkpoint: dict[str, Any], path: Path) -> None:
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        with open(path, "wb") as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # the reason: torch went on to close its archive
            raise error.__context__ from None
        raise
    finally:
        set_crc32_options(before)


def read(path: str | os.PathLike[str], where: str) -> dict[str, Any]:
    with open(path, "rb") as file:  # open once: another process may replace the file
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
                # The folder attribute is not covered by the checksum: torch would read nothing and
                # leave the tensor uninitialized.
                folders = [e.filename for e in archive.infolist() if e.external_attr & 0x10]
            if damaged is not None or folders:
                raise ValueError(f"{damaged or folders[0]} is not what its checksum says")
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{where} is no checkpoint that save_checkpoint wrote: it holds more than plain "
                "data, such as code that runs when it is read, and was not loaded"
            ) from error
        except Exception as error:
            raise ValueError(f"{where} is damaged or no checkpoint: {error}") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        held = f"a {type(checkpoint).__name__}"
        if isinstance(checkpoint, dict) and checkpoint:
            held += f" with {', '.join(map(repr, [*checkpoint][:3]))}"
        raise ValueError(
            f"{where} is no checkpoint that save_checkpoint wrote: it holds {held}; a state dict "
            "that torch.save wrote is for model.load_state_dict(torch.load(path))"
        )
    version = checkpoint.get("version")
    if version != VERSION:
        raise ValueError(
            f"{where} has version {version!r}, and this mixprec reads {VERSION}; a newer mixprec "
            "has written it"
        )
    if missing := {"step", "extra", "rng", "classes"} - checkpoint.keys():
        raise ValueError(f"{where} is damaged: it holds no {', '.join(sorted(missing))}")
    rng = checkpoint["rng"]
    if not isinstance(checkpoint["classes"], dict):
        raise ValueError(f"{where} is damaged: classes must be a dict")
    if rng is not None and not (isinstance(rng, dict) and isinstance(rng.get("cuda"), list)):
        raise ValueError(f"{where} is damaged: rng must hold the states of cpu and cuda")
    return checkpoint


# Python's and NumPy's generator are both MT19937, and the state of both is written as that of
# Python's random.getstate(): (3, 624 words and the position in them, the second normal number of a
# pair or None).


def random_states() -> dict[str, Any]:
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


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """The states at the beginning of the block are those after it."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def check_random_states(where: str, states: Any) -> None:
    """ValueError unless `set_random_states` can restore the states."""
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


def set_random_states(states: dict[str, Any]) -> None:
    """Restore states that `random_states` returned and `check_random_states` let pass."""
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
