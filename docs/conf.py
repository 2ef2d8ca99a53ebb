"""Sphinx settings. Build with `python3 -m nox -s docs`, where every warning is an error."""

from __future__ import annotations

import re
from typing import Any

project = "Leto"
author = "The Leto developers"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "tests"]
html_theme = "furo"
html_title = "Leto"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_use_rtype = False
python_display_short_literal_types = True
python_maximum_signature_line_length = 88

_VALUES = {"attribute", "data", "property"}
_values: dict[str, list[str]] = {}
_LITERAL = re.compile(r"``[^`]+``|`[^`]+`")


def _inline(line: str) -> str:
    """One line of plain text with `code` in it, as reStructuredText."""
    parts, end = [], 0
    for match in _LITERAL.finditer(line):
        parts += [_escape(line[end : match.start()]), f"``{match.group().strip('`')}``\\ "]
        end = match.end()
    return "".join([*parts, _escape(line[end:])])


def _escape(text: str) -> str:
    return re.sub(r"[*|`\\]|(?<=\w)_(?!\w)", lambda match: "\\" + match.group(), text)


def _plain_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: paragraphs, `code`, numpydoc sections, indented code. Make that legal."""
    sections = any(re.fullmatch(r"-{3,}", line) for line in lines)  # napoleon reads what is indented there
    result: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ") and not sections
        if line.strip() and indented != inside:
            if result and result[-1].strip():
                result.append("")
            if indented:
                result += ["::", ""]
            inside = indented
        result.append(line if inside or re.fullmatch(r"-{3,}", line) else _inline(line))
    lines[:] = result
    if what in _VALUES:
        _values[name] = result


def _keep_colons(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undo napoleon's reading of a value's docstring as "type: description"; here a colon is a colon."""
    if what in _VALUES:
        lines[:] = _values.pop(name)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _plain_text, priority=400)  # before napoleon, which has 500
    app.connect("autodoc-process-docstring", _keep_colons, priority=600)
