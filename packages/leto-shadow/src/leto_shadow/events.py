"""The event log of a job: `events.jsonl` in its run directory, one JSON object a line.

Role: agents append what happens (promotions, failures, recoveries, metrics); `leto status`, the demo's
display and tests read along. A line is one `write` on an O_APPEND descriptor, so that lines of several agents
never mix; a reader copes with a line that is still being written, and counts lines that are no events instead
of stopping.

Every event has "t" (Unix seconds), "mono" (CLOCK_MONOTONIC seconds of that host) and "event" (its name).
Non-finite floats become null, as JSON has no word for them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

__all__ = ["MAX_LINE_BYTES", "Event", "EventReader", "EventWriter", "read_events"]

MAX_LINE_BYTES = 256 * 1024
"""Longest line that is written; a reader skips longer ones."""

Event = dict[str, Any]

_READ_BYTES = 1024 * 1024


class EventWriter:
    """Append events to a file that several processes may share. Use as a context manager or call `close`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)

    def write(self, event: str, **fields: Any) -> Event:
        """Append one event and return it. Raises ValueError if it is too long, TypeError if it is no JSON."""
        record: Event = {"t": time.time(), "mono": time.monotonic(), "event": event, **fields}
        line = msgspec.json.encode(record) + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"event {event!r} of {len(line)} bytes is above the limit of {MAX_LINE_BYTES}")
        written = os.write(self._fd, line)
        if written != len(
            line
        ):  # disk full in mid-line: end the torn line so that the next one stays readable
            os.write(self._fd, b"\n")
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes written; is the disk full?")
        return record

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventReader:
    """Read a growing event file from its beginning; each `poll` returns the complete events that are new."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.skipped = 0
        """Lines that were no events so far (torn or foreign)."""
        self._offset = 0
        self._partial = bytearray()
        self._overlong = False

    def poll(self) -> list[Event]:
        """Return new events in file order; an empty list if there are none or the file does not exist yet."""
        events: list[Event] = []
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - the with statement below closes it
        except FileNotFoundError:
            return events
        with file:
            file.seek(self._offset)
            while data := file.read(_READ_BYTES):
                self._offset += len(data)
                self._take(data, events)
        return events

    def _take(self, data: bytes, events: list[Event]) -> None:
        *complete, rest = data.split(b"\n")
        for piece in complete:
            line = bytes(self._partial) + piece
            self._partial.clear()
            overlong, self._overlong = self._overlong, False
            if overlong:
                continue  # counted when it grew too long
            self._decode(line, events)
        if self._overlong:
            return
        self._partial += rest
        if len(self._partial) > MAX_LINE_BYTES:
            self._overlong = True
            self._partial.clear()
            self.skipped += 1

    def _decode(self, line: bytes, events: list[Event]) -> None:
        if not line.strip():
            return
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.skipped += 1
            return
        if (
            isinstance(record, dict)
            and isinstance(record.get("event"), str)
            and all(isinstance(record.get(clock, 0.0), int | float) for clock in ("t", "mono"))
        ):
            events.append(record)
        else:
            self.skipped += 1


def read_events(path: str | Path) -> list[Event]:
    """All complete events of a file."""
    return EventReader(path).poll()
