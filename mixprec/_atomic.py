"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let write(temporary) make a file beside `path`, then rename it to `path`.

    Whatever goes wrong, a full disk or Ctrl-C, `path` is as it was and no temporary file is left.
    """
    target = Path(path)
    if target.exists() and not target.is_file():  # a device or a pipe: not to be renamed over
        write(target)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # a full disk may show only when the data leaves the cache
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
