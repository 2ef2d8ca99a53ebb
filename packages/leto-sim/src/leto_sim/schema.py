"""Declarative checks of a TOML or JSON table: type, range, choices, unknown names.

Role: the one place that turns raw tables into checked values, so that every complaint names the field, the
value and the range (appendix C takes its inputs from profiles; a typing error there must not become a
plausible figure). Knows nothing of training.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leto_sim.errors import ProfileError

__all__ = ["REQUIRED", "Choice", "Flag", "Number", "Spec", "Table", "Tables", "Text", "check_table"]


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()
"""Default of a field that must be given."""


@dataclass(frozen=True)
class Number:
    """A finite number in [minimum, maximum] (open at the minimum if ``above``); ``integer`` refuses
    fractions.
    """

    minimum: float
    maximum: float
    default: Any = REQUIRED
    integer: bool = False
    above: bool = False

    def describe(self) -> str:
        kind = "an integer" if self.integer else "a number"
        return f"{kind} in {'(' if self.above else '['}{self.minimum:g}, {self.maximum:g}]"

    def check(self, path: str, value: Any, source: str) -> Any:
        wrong = ProfileError(path, value, self.describe(), source)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise wrong
        if self.integer and value != int(value):
            raise wrong
        if value < self.minimum or value > self.maximum or (self.above and value == self.minimum):
            raise wrong
        return int(value) if self.integer else float(value)


@dataclass(frozen=True)
class Text:
    """A non-empty string."""

    default: Any = REQUIRED

    def describe(self) -> str:
        return "a non-empty string"

    def check(self, path: str, value: Any, source: str) -> Any:
        if not isinstance(value, str) or not value.strip():
            raise ProfileError(path, value, self.describe(), source)
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few strings."""

    options: tuple[str, ...]
    default: Any = REQUIRED

    def describe(self) -> str:
        return "one of " + ", ".join(repr(o) for o in self.options)

    def check(self, path: str, value: Any, source: str) -> Any:
        if not isinstance(value, str) or value not in self.options:
            raise ProfileError(path, value, self.describe(), source)
        return value


@dataclass(frozen=True)
class Flag:
    """true or false."""

    default: Any = REQUIRED

    def describe(self) -> str:
        return "true or false"

    def check(self, path: str, value: Any, source: str) -> Any:
        if not isinstance(value, bool):
            raise ProfileError(path, value, self.describe(), source)
        return value


@dataclass(frozen=True)
class Table:
    """A nested table; ``optional`` means that it may be absent (then its value is None)."""

    fields: Mapping[str, Spec]
    optional: bool = False

    def describe(self) -> str:
        return "a table with " + ", ".join(self.fields)


@dataclass(frozen=True)
class Tables:
    """An array of tables with at least ``at_least`` entries, at most 4096."""

    fields: Mapping[str, Spec]
    at_least: int = 0

    def describe(self) -> str:
        return f"at least {self.at_least} and at most 4096 tables with " + ", ".join(self.fields)


Spec = Number | Text | Choice | Flag | Table | Tables


def check_table(
    fields: Mapping[str, Spec], data: Any, path: str = "", source: str = "profile"
) -> dict[str, Any]:
    """Return ``data`` checked against ``fields``, with defaults filled in.

    Raises ProfileError naming the dotted field, the value found and the range expected; an unknown name is
    an error too (with the nearest known one), because a misspelt field would silently take its default.
    """
    if not isinstance(data, Mapping):
        raise ProfileError(path or "(root)", data, "a table", source)
    for name in data:
        if name not in fields:
            near = difflib.get_close_matches(str(name), list(fields), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = "a field among " + ", ".join(sorted(fields))
            raise ProfileError(_join(path, str(name)), data[name], known + hint, source)
    return {name: _value(spec, data, name, path, source) for name, spec in fields.items()}


def _value(spec: Spec, data: Mapping[str, Any], name: str, path: str, source: str) -> Any:
    here = _join(path, name)
    if isinstance(spec, Table):
        if name not in data:
            if spec.optional:
                return None
            raise ProfileError(here, None, spec.describe(), source)
        return check_table(spec.fields, data[name], here, source)
    if isinstance(spec, Tables):
        rows = data.get(name, [])
        if not isinstance(rows, list) or not spec.at_least <= len(rows) <= 4096:
            raise ProfileError(here, rows if name in data else None, spec.describe(), source)
        return [check_table(spec.fields, row, f"{here}[{i}]", source) for i, row in enumerate(rows)]
    if name not in data:
        if spec.default is REQUIRED:
            raise ProfileError(here, None, spec.describe(), source)
        return spec.default
    return spec.check(here, data[name], source)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
