"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path


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
