"""How Sphinx builds these pages: `make docs`. Nothing is fetched, and a warning is an error."""

from __future__ import annotations

import inspect
import re
from typing import Any

from sphinx.application import Sphinx

import zero

project = "zero"
author = "the zero project"
copyright = author
release = zero.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "alabaster"
html_theme_options = {"page_width": "70em", "sidebar_width": "14em"}
html_show_sphinx = False
html_static_path = ["_static"]
html_js_files = ["find.js"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # the signatures are long enough without
autodoc_member_order = "bysource"
suppress_warnings = ["misc.highlighting_failure"]  # the JSON blocks may be parts of an object


ENDS = re.compile(r"(Returns?|Raises|Yields) ")  # how a sentence begins that is of the whole, and of no argument


def setup(app: Sphinx) -> None:
    """Let docstrings be read as the plain text that they are."""
    app.connect("autodoc-process-docstring", as_restructured_text)


def as_restructured_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring's `code`, indented programs, and sentences that begin with a parameter's name into RST."""
    try:
        parameters = set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        parameters = set()
    out: list[str] = []
    after_blank, item = True, False
    for line in (part for whole in lines for part in sentences(whole, parameters)):
        named = argument(line, parameters)
        if named:
            out += [] if item else [""]
            out.append(f"- ``{named[1]}``: {escaped(line[named.end() :])}")
            item = True
        elif line.startswith("    ") and not item:
            out += ["::", ""] if after_blank and not (out and out[-1].startswith("    ")) else []
            out.append(line)
        else:
            ends = item and ENDS.match(line)
            out += [""] if ends else []
            item = item and bool(line) and not ends
            out.append(f"  {escaped(line.strip())}" if item else escaped(line))
        after_blank = not line
    lines[:] = out


def sentences(line: str, parameters: set[str]) -> list[str]:
    """A line, divided where a sentence inside it begins with a parameter's name, or is of none."""
    begins = (found.end() for found in re.finditer(r"[.;] ", line))
    at = [begin for begin in begins if argument(line[begin:], parameters) or ENDS.match(line, begin)]
    return [line[begin:end] for begin, end in zip([0, *at], [*at, None], strict=True)]


def argument(line: str, parameters: set[str]) -> re.Match[str] | None:
    """The names of parameters that a line begins with, and the colon after them."""
    named = re.match(r"([\w, *]+):(?:\s+|$)", line)
    return named if named and set(re.findall(r"\w+", named[1])) <= parameters else None


def escaped(text: str) -> str:
    """The same text for docutils: what stands in backticks is code, and nothing else has a meaning."""
    return re.sub(r"(`[^`]+`)|([*_|\\])", lambda found: f"`{found[1]}`" if found[1] else f"\\{found[2]}", text)
