"""The Pythons of this machine."""

import os
import subprocess

# What the make above set is not for the programs that this one starts.
DROP = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in DROP} | {"MIXPREC_BUILD": "cpu"}


class Unavailable(Exception):
    """The reason that something does not run here."""


def output(*command: object) -> str:
    """What a command prints; nothing if it fails or is not there."""
    words = [str(word) for word in command]
    try:
        run = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
    except OSError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def interpreter(version: str) -> str:
    """A Python of this version: on PATH, of pyenv, or of uv."""
    found = [f"python{version}"]
    for name in output("pyenv", "versions", "--bare").split():
        if name.startswith(f"{version}."):
            found.append(f"{output('pyenv', 'prefix', name)}/bin/python")
    found.append(output("uv", "python", "find", "--no-python-downloads", version))
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in found:  # a program of this name may be a stand-in that only prints an error
        if python and output(python, "-c", asked) == version:
            return python
    raise Unavailable(f"no Python {version} on PATH, in pyenv or in uv")
