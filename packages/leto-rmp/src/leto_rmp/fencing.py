"""Writer fencing (I-4): one writer, and generations only ever grow.

The manager took the writer's pidfd itself, so fencing survives the agent: generation g + 1 becomes the
writer only after g's process has ended, or has said that it will not write any more. Pure but for
the question whether a process has ended, which is asked at the moment of the decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from leto_rmp.errors import NotWriter, StaleGeneration, WriterAlive

__all__ = ["Writer", "WriterFence"]


@dataclass
class Writer:
    """The newest writer. `connection` is opaque; `pidfd` is owned by whoever made this record."""

    connection: object
    pid: int
    generation: int
    pidfd: int
    released: bool = False


class WriterFence:
    """Decides who may write."""

    def __init__(self, gone: Callable[[int], bool]) -> None:
        self._gone = gone
        self.writer: Writer | None = None
        self.generation_min = 0
        self.newest = -1

    def state(self) -> str:
        """Return "none", "alive", "dead" or "released"."""
        if self.writer is None:
            return "none"
        if self._gone(self.writer.pidfd):
            return "dead"
        return "released" if self.writer.released else "alive"

    def alive(self) -> bool:
        """Return whether somebody may be writing at this moment."""
        return self.state() == "alive"

    def _check_generation(self, generation: int) -> None:
        oldest = max(self.newest + 1, self.generation_min)
        if generation < oldest:
            raise StaleGeneration(
                f"generation {generation} is from the past: expected {oldest} or newer. Ask the agent for "
                "the current generation",
                expected=oldest,
                found=generation,
            )

    def _check_gone(self, generation: int) -> None:
        if self.alive():
            assert self.writer is not None
            raise WriterAlive(
                f"generation {generation} cannot write yet: process {self.writer.pid}, writer of generation "
                f"{self.writer.generation}, has neither ended nor released. End it, or let it call release()",
                pid=self.writer.pid,
                generation=self.writer.generation,
            )

    def holds(self, connection: object) -> bool:
        """Return whether this connection is the current, unreleased writer."""
        return self.writer is not None and self.writer.connection is connection and not self.writer.released

    def admit(self, connection: object, pid: int, generation: int, pidfd: int) -> Writer | None:
        """Make the connection the writer; return the previous writer, whose pidfd may be closed now.

        Asking again for what one already has changes nothing.
        """
        if self.holds(connection) and self.writer is not None and self.writer.generation == generation:
            return None
        self._check_generation(generation)
        self._check_gone(generation)
        previous = self.writer
        self.writer = Writer(connection, pid, generation, pidfd)
        self.newest = generation
        return previous

    def check_writer(self, connection: object, generation: int | None) -> None:
        """Raise unless the connection is the current writer; `generation`: what it last wrote under."""
        if self.holds(connection):
            if self.writer is not None and self.writer.generation < self.generation_min:
                self._check_generation(self.writer.generation)
            return
        if generation is not None and generation < max(self.newest, self.generation_min):
            self._check_generation(generation)
        raise NotWriter(
            "only the current writer may do this: call become_writer() with the current generation"
        )

    def release(self, connection: object, generation: int | None) -> None:
        """Note that the writer will not write any more. Releasing twice is harmless."""
        if self.writer is not None and self.writer.connection is connection:
            self.writer.released = True
            return
        self.check_writer(connection, generation)

    def fence(self, generation: int) -> None:
        """Refuse everything older than `generation` from now on."""
        if generation < max(self.newest, self.generation_min):
            self._check_generation(generation)
        self.generation_min = max(self.generation_min, generation)
