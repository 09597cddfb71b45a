"""`python -m mixprec COMMAND ...`."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "audit": ("diagnostics.audit", "which precision each product of a model really has"),
    "bench": ("bench.__main__", "measure every op against its baselines"),
    "env": ("env", "versions, machine, what each op runs on"),
}


def main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name not in COMMANDS:
        lines = [f"  {command:8}{help}" for command, (_, help) in COMMANDS.items()]
        print("usage: python -m mixprec COMMAND ...", *lines, sep="\n")
        return 0 if name in ("-h", "--help") else 2
    module = import_module(f".{COMMANDS[name][0]}", "mixprec")
    result: int = module.main(arguments[1:]) or 0
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
