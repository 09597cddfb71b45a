"""Which GPUs a list of architectures in the form of TORCH_CUDA_ARCH_LIST builds code for."""

from __future__ import annotations

import re

_ARCH = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


def _covers(arch: str, capability: tuple[int, int]) -> bool:
    found = _ARCH.fullmatch(arch)
    if found is None:
        return True  # a name such as Hopper, which torch resolves
    built, kind = (int(found[1]), int(found[2])), found[3]
    if kind == "a":  # instructions of this architecture only
        return capability == built
    same_family = capability[0] == built[0] and capability[1] >= built[1]
    return same_family or (found[4] is not None and kind == "" and capability >= built)


def why_not(archs: str, capability: tuple[int, int]) -> str | None:
    """None if code built for `archs` ("8.0;9.0a;12.0+PTX") runs on a GPU of `capability`.

    Code for X.Y runs on X.Z with Z >= Y; "a" only on X.Y itself; "+PTX" on X.Y and all later ones.
    None if `archs` is empty (not recorded).
    """
    names = re.split(r"[;\s]+", archs.strip())
    if names == [""] or any(_covers(name, capability) for name in names):
        return None
    gpu = ".".join(map(str, capability))
    return (
        f"the CUDA kernels were built for {', '.join(names)}, and this GPU is {gpu}; to build them "
        f"for it, set TORCH_CUDA_ARCH_LIST={gpu}"
    )
