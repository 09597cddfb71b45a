"""Adapters where their package is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules[{name!r}] = None  # as if it were not installed
import mixprec.integrations
try:
    import mixprec.integrations.{name}
except ImportError as error:
    print(error)
assert not {{"accelerate", "transformers", "lightning", "peft"}} & {{
    name for name, module in sys.modules.items() if module is not None
}}
"""


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_an_absent_package_breaks_only_its_adapter(name: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"mixprec.integrations.{name} needs ")
    assert done.stdout.count("\n") == 1
