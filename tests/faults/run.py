"""Plant each fault of the lists beside this file, one at a time, and run the tests that catch it.

    python tests/faults/run.py [TEXT ...]     TEXT: only faults whose file or why has it

A fault is a wrong line in the product: `old` in `file`, which is there once, becomes `new`, and is
put back afterwards (run it in a clone that nothing else uses). It is caught if a test of
`caught_by`, arguments of pytest, fails, with the variables `env` in its environment, if there are
any. Exits with 1 if any is not caught.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parents[2]
LIMIT = 900  # seconds for one fault: a fault may be an endless loop


def read_faults(texts: list[str]) -> list[dict[str, Any]]:
    faults = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        faults += tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [f for f in faults if all(text in f["file"] + f["why"] for text in texts)]


def run_tests(fault: dict[str, Any]) -> str:
    """ "caught", or why not."""
    tests, _, expression = fault["caught_by"].partition(" -k ")
    arguments = "-x -q -p no:cacheprovider" + (f" -k '{expression}'" if expression else "")
    command = ["make", "test", f"TESTS={tests}", f"ARGS={arguments}"]
    env = os.environ | ({"TRITON_INTERPRET": "1"} if "triton_interpreter" in tests else {})
    env |= fault.get("env", {})
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return "caught"
    if done.returncode == 0:
        return "NOT CAUGHT"
    if re.search(r"^(FAILED|Fatal Python error)|\b\d+ failed", done.stdout + done.stderr, re.M):
        return "caught"
    return "NO TEST RAN: " + (done.stdout + done.stderr).strip()[-300:]


def plant(fault: dict[str, Any]) -> str:
    path = ROOT / fault["file"]
    text = path.read_text(encoding="utf-8")
    if (count := text.count(fault["old"])) != 1:
        return f"NOT PLANTED: `old` is there {count} times"
    try:
        path.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
        return run_tests(fault)
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    faults, wrong = read_faults(sys.argv[1:]), 0
    for i, fault in enumerate(faults, 1):
        start = time.monotonic()
        outcome = plant(fault)
        wrong += outcome != "caught"
        seconds = time.monotonic() - start
        print(f"{i:3} {fault['file']}: {fault['why']}: {outcome} ({seconds:.0f} s)", flush=True)
    print(f"{len(faults) - wrong} of {len(faults)} faults are caught")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
