"""What make asks the Python environment that runs this: `key`, `packages NAME ...`, `extra NAME`.

key: tells builds for different interpreters and torches apart. packages: which of them are not
there, in one line. extra: what an extra of mixprec installs.
"""

import hashlib
import importlib.metadata as metadata
import importlib.util
import sys

MODULES = {
    "pytest_xdist": "xdist",
}  # where it is not the name of the package


def key() -> None:
    about = repr((sys.executable, sys.version, metadata.version("torch")))
    print(hashlib.sha256(about.encode()).hexdigest()[:12])


def packages(*names: str) -> None:
    found = {n: importlib.util.find_spec(MODULES.get(n, n)) is not None for n in names}
    lack = [name.replace("_", "-") for name in names if not found[name]]
    if found.get("setuptools") and int(metadata.version("setuptools").split(".")[0]) < 64:
        lack.append("'setuptools>=64'")
    if lack:
        words = " ".join(lack)
        sys.exit(
            f"missing in this environment: {words}. Run: {sys.executable} -m pip install {words}"
        )


def extra(name: str) -> None:
    marker = f'; extra == "{name}"'
    wanted = [r for r in metadata.requires("mixprec") or () if r.endswith(marker)]
    print(*(r.removesuffix(marker) for r in wanted))


{"key": key, "packages": packages, "extra": extra}[sys.argv[1]](*sys.argv[2:])
