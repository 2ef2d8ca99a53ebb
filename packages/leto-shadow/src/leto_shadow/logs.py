"""Log lines of agents and trainers: words for people, or JSON lines that say which rank and generation.

Role in the whole: `leto run --log-format json`. Everything is logged through Python's `logging` (loggers
``leto_shadow.*`` and ``leto_rmp``); this module decides what a line looks like. In a trainer with JSON lines,
what the script prints and what it logs by itself become lines of the same form, so that a shipper of logs
needs to know one form only. (What a library in C writes to the descriptors stays as it is.)

A JSON line has "t" (Unix seconds), "level", "message", then where it comes from: "job", "node", and for a
trainer "rank", "role", "generation" (null before its promotion), "iteration" and "pid".
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import msgspec

__all__ = ["FORMATS", "LOG_FORMAT_VARIABLE", "LineStream", "adopt_output", "as_json", "set_up"]

FORMATS = ("text", "json")

LOG_FORMAT_VARIABLE = "LETO_LOG_FORMAT"
"""Environment variable by which an agent tells its trainers."""

_LINE_CHARS_MAX = 64 * 1024

Fields = Callable[[], Mapping[str, Any]]


def as_json(level: str, message: str, where: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """Return one line, without its end. Values that JSON has no word for become text; a field of an event
    that has the name of one of the line's own gets the prefix ``event_``."""
    message = message.encode("utf-8", "backslashreplace").decode()  # names of files may hold any bytes
    record = {"t": time.time(), "level": level, "message": message, **where}
    for name, value in more.items():
        record[f"event_{name}" if name in ("t", "level", "message") else name] = value
    return msgspec.json.encode(record, enc_hook=repr).decode()


class _JsonFormatter(logging.Formatter):
    def __init__(self, where: Fields) -> None:
        super().__init__()
        self._where = where

    def format(self, record: logging.LogRecord) -> str:
        more: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        return as_json(
            record.levelname.lower(),
            record.getMessage(),
            self._where(),
            {**more, **getattr(record, "fields", {})},
        )


def set_up(form: str, where: Fields, stream: TextIO | None = None) -> None:
    """Send the lines of this package and of leto-rmp to standard error, in one of `FORMATS`.

    ``where`` is asked for the fields of each JSON line. A second call replaces what the first one did.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_JsonFormatter(where) if form == "json" else logging.Formatter("leto: %(message)s"))
    for name in ("leto_shadow", "leto_rmp"):
        logger = logging.getLogger(name)
        for old in [one for one in logger.handlers if isinstance(one, logging.StreamHandler)]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


class LineStream(io.TextIOBase):
    """Stands in for `sys.stdout` or `sys.stderr`: each line that is printed becomes a JSON line.

    A line without an end is written when the stream is flushed: a killed trainer's last words must be in its
    log. Line and descriptor are written at once, so that lines of threads and processes never mix.
    """

    def __init__(self, name: str, original: TextIO, where: Fields) -> None:
        self._name = name
        self._original = original
        self._where = where
        self._level = "warning" if name == "stderr" else "info"
        self._partial = ""
        self._lock = threading.RLock()  # a signal handler may print while its thread prints

    def write(self, text: str) -> int:
        """Write the lines that are complete, keep the rest."""
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
            for line in lines:
                self._put(line)
            while len(self._partial) > _LINE_CHARS_MAX:
                self._put(self._partial[:_LINE_CHARS_MAX])
                self._partial = self._partial[_LINE_CHARS_MAX:]
        return len(text)

    def flush(self) -> None:
        """Write what has no end yet."""
        with self._lock:
            line, self._partial = self._partial, ""
            if line:
                self._put(line)

    def _put(self, line: str) -> None:
        if line:
            text = as_json(self._level, line, self._where(), {"stream": self._name})
            os.write(self._original.fileno(), text.encode() + b"\n")

    def fileno(self) -> int:
        """The descriptor behind it."""
        return self._original.fileno()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def buffer(self) -> Any:
        """For scripts that write bytes: they go to the log as they are."""
        return self._original.buffer


def adopt_output(where: Fields) -> None:
    """In a trainer: make everything that Python prints or logs a JSON line."""
    stdout, stderr = sys.stdout, sys.stderr
    stdout.flush()
    stderr.flush()
    sys.stdout, sys.stderr = LineStream("stdout", stdout, where), LineStream("stderr", stderr, where)
    set_up("json", where, stderr)
    root = logging.getLogger()
    if not root.handlers:  # a script that configures logging itself keeps its own form, one line in "message"
        handler = logging.StreamHandler(stderr)
        handler.setFormatter(_JsonFormatter(where))
        root.addHandler(handler)
