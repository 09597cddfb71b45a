"""make versions: make test with each pair of Python and torch, in an environment of its own.

    make versions                       every pair
    make versions ARGS="3.13-2.15 ..."  these pairs; the others stay as they were found before

The environments stay under build/versions/, with the output of the last make test beside each.
The result is bench/results/cpu/versions.json, and the table of docs/install.md. A pair of which pip
has no torch, or this machine no Python, is "not run", with the reason.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from pythons import ENVIRONMENT, Unavailable, interpreter, output

from mixprec.bench import report, results
from mixprec.bench.environment import commit

# From the oldest that is promised to the newest that there is, as Python-torch; of torch, the
# newest release that begins so.
PAIRS = ("3.10-2.11", "3.11-2.13", "3.12-2.15", "3.13-2.15", "3.14-2.15")

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / results.CPU / "versions.json"
FOLDER = ROOT / "build" / "versions"
COMMIT = commit() or ""  # asked now, for the first result changes a file
SHOWN = ("python", "torch", "processor", "commit", "date")


def packages_of_tests() -> list[str]:
    """What the extra "test" of pyproject.toml installs."""
    listed = importlib.metadata.requires("mixprec") or ()
    marked = (re.fullmatch(r"""(.+?)(?:;| and) extra == "test\"""", one) for one in listed)
    return [one[1] for one in marked if one]


def install(python: str, torch: str, folder: Path) -> Path:
    """The interpreter of an environment with this torch, made or brought up to date."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", folder], check=True, env=ENVIRONMENT)
    pip = [inside, "-m", "pip", "install", "-q", "--upgrade", "--disable-pip-version-check"]
    tools = ["setuptools", "wheel", "pybind11", "ninja"]
    # In one call: torch asks for one version of triton, and the tests for any.
    packages = [f"torch=={torch}.*", *tools, *packages_of_tests()]
    done = subprocess.run([*pip, *packages], capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode:
        errors = re.findall(r"^ERROR: (.+)", done.stderr, re.M)
        raise Unavailable(f"pip: {errors[0] if errors else done.stderr.strip()[-200:]}")
    return inside


def counts(text: str) -> dict[str, Any]:
    """The numbers in the output of make test: zeros where it ended before pytest did."""
    lines = re.findall(r"^.*\d+ (?:passed|failed|error).* in .*s.*$", text, re.M)
    last = lines[-1] if lines else ""
    found = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    took = re.search(r"^make test: (\d+) s", text, re.M)
    return {
        "passed": found.get("passed", 0),
        "failed": found.get("failed", 0) + found.get("error", 0),
        "skipped": found.get("skipped", 0),
        "seconds": int(took[1]) if took else None,
    }


def make_test(inside: Path, log: Path) -> dict[str, Any]:
    """What became of make test."""
    command = ["make", "test", f"PYTHON={inside}", "TESTS=", "ARGS=-q"]
    with log.open("w") as out:
        done = subprocess.run(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT
        )
    status = "failed" if done.returncode else "passed"
    return {"status": status, **counts(log.read_text(errors="replace"))}


def where(inside: Path) -> dict[str, str]:
    """The versions, the machine and the source that a pair is tested with."""
    program = (
        "import json; from mixprec.bench.environment import environment; "
        f"found = environment(quick=False); print(json.dumps({{k: found[k] for k in {SHOWN}}}))"
    )
    key = output(inside, ROOT / ".ci" / "environment.py", "key")
    site = ROOT / "build" / "ext" / key / "site"
    command = [str(inside), "-c", program]
    env = ENVIRONMENT | {"PYTHONPATH": str(site), "MIXPREC_COMMIT": COMMIT}
    return json.loads(subprocess.check_output(command, text=True, env=env, cwd=FOLDER))


def not_run(pair: str, reason: str) -> dict[str, Any]:
    return {"pair": pair, "status": "not run", "reason": reason}


def run(pair: str) -> dict[str, Any]:
    """The row of a pair."""
    python, torch = pair.split("-")
    log = FOLDER / f"{pair}.log"
    try:
        print(f"{pair}: installing", flush=True)
        inside = install(interpreter(python), torch, FOLDER / pair)
    except Unavailable as reason:
        print(f"{pair}: not run: {reason}", flush=True)
        return not_run(pair, str(reason))
    print(f"{pair}: make test, its output is in {log.relative_to(ROOT)}", flush=True)
    row = {"pair": pair, **make_test(inside, log), **where(inside)}
    print(f"{pair}: {report.outcome(row)}", flush=True)
    return row


def main(*chosen: str) -> int:
    if unknown := set(chosen) - set(PAIRS):
        sys.exit(f"versions: must be of {' '.join(PAIRS)}, got {' '.join(sorted(unknown))}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = {row["pair"]: row for row in results.read_json(FILE)["rows"]} if FILE.exists() else {}
    for pair in chosen or PAIRS:
        rows[pair] = run(pair)
        # After each, since all of them take an hour.
        listed = [rows.get(one, not_run(one, "not asked for")) for one in PAIRS]
        results.write_json(FILE, {"rows": listed})
        report.write(ROOT)
    return int(any(rows[pair]["status"] == "failed" for pair in chosen or PAIRS))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
