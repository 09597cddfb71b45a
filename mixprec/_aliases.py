"""Module paths of earlier versions: `import mixprec.stats` gives mixprec.diagnostics.stats."""

from __future__ import annotations

import sys

ALIASES = {
    "autocast": "nn.autocast",
    "compare": "diagnostics.compare",
    "convert": "nn.convert",
    "filters": "nn.filters",
    "grad_scaler": "amp.grad_scaler",
    "operands": "functional.operands",
    "report": "diagnostics.report",
    "reuse": "nn.reuse_weights",
    "stats": "diagnostics.stats",
}


def install(package: str) -> None:
    """Make the old paths importable. The modules of the table must have been imported."""
    for old, new in ALIASES.items():
        before, now = f"{package}.{old}", f"{package}.{new}"
        for name in [n for n in sys.modules if n == now or n.startswith(now + ".")]:
            sys.modules[before + name.removeprefix(now)] = sys.modules[name]
        top = sys.modules[package]
        if not hasattr(top, old):  # mixprec.compare is the function
            setattr(top, old, sys.modules[now])
