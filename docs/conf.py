"""The documentation site: `make docs`. All of it works without a network."""

import re
from importlib.metadata import version as installed
from typing import Any

project = "mixprec"
author = "the mixprec authors"
release = version = installed("mixprec")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_heading_anchors = 3  # links such as recipes.md#fused-layers, as they work on a Git server
nb_execution_mode = "off"  # make notebooks has run them
html_theme = "furo"
html_title = f"mixprec {release}"
html_extra_path = ["explorer.html"]
html_show_sphinx = False
html_static_path, html_css_files = ["static"], ["site.css"]
smartquotes = False  # they are strings of Python
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # those of torch
# Pages of adapters are built where their packages are not installed.
autodoc_mock_imports = ["accelerate", "lightning", "torchtitan", "transformers"]

# Files of the source that pages link to. The site does not have them: only their names stay.
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./(?:mixprec|examples|bench|csrc)/?[^)]*)\)")


def without_files(app: Any, page: str, source: list[str]) -> None:
    source[0] = OUTSIDE.sub(r"\1", source[0])


def as_text(line: str) -> str:
    """What reStructuredText would take for markup stands for itself, but for `names`."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A docstring is plain text: what is indented in it, but for list items, is code or a table."""
    found: list[str] = []
    block = item = False
    for line in lines:
        if line and not line.startswith("  "):
            found += ["", as_text(line)] if block or (item and line[0] != "-") else [as_text(line)]
            block, item = False, line.startswith("- ")
        elif line and not item:
            found += [] if block else ["", ".. code-block:: text", ""]
            found.append(f"    {line}")
            block = True
        else:
            found.append(as_text(line))
    lines[:] = found


def setup(app: Any) -> None:
    app.connect("source-read", without_files)
    app.connect("autodoc-process-docstring", docstring)
