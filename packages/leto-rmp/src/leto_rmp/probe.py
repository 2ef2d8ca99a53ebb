"""The sacrificial helper: `python -m leto_rmp.probe` (paper section 4.2: failure localization).

The state manager has no CUDA context: a fault in one would take down the owner of all memory. What needs a
context is done here, in a process that lives for one errand: it imports pages, asks the driver about them,
reads them with a kernel (a contained ECC error kills the context of whoever reads the page, and no API
tells which page it was), overwrites or flips bytes for fault injection. It ends with its manager (end of
the stream) and at the first error.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys

from leto_rmp import probe_wire as w
from leto_rmp.driver import Device, Driver
from leto_rmp.errors import ProtocolError, RmpError
from leto_rmp.protocol import FrameReader, Message, frame
from leto_rmp.transport import receive

__all__ = ["main"]

_READ_BYTES = 1 << 20


class Pages:
    """The pages of this errand, mapped one after the other."""

    def __init__(self, driver: Driver, device: Device) -> None:
        self._driver = driver
        self._device = device
        self._base = 0
        self._size = 0
        self._mapped: dict[int, bool] = {}

    def _where(self, index: int, offset: int = 0) -> int:
        return self._base + index * self._size + offset

    def carry_out(self, task: w.Task, fds: list[int]) -> w.Answer:
        """Carry out one task inside the context; the caller closes the descriptors."""
        driver = self._driver
        match task:
            case w.Begin():
                self._size = task.page_bytes
                self._base = driver.reserve(task.pages * task.page_bytes)
                return w.Ok()
            case w.Load():
                return w.Ok(pages=tuple(self._load(task.first, task.pages, fds)))
            case w.Query():
                return w.Ok(pages=tuple(i for i in self._mapped if not driver.is_mapped(self._where(i))))
            case w.Touch():
                driver.touch(self._device.ordinal, self._where(task.first), task.count * self._size)
                return w.Ok()
            case w.Write():
                driver.write(self._where(task.index, task.offset), task.data)
                return w.Ok()
            case w.Xor():
                where = self._where(task.index, task.offset)
                old = driver.read(where, len(task.mask))
                driver.write(where, bytes(a ^ b for a, b in zip(old, task.mask, strict=True)))
                return w.Ok()
            case w.Copy():
                size = task.count * self._size
                driver.copy(self._where(task.target), self._where(task.source), size)
                return w.Ok()

    def _load(self, first: int, pages: int, fds: list[int]) -> list[int]:
        """Map handles of so many pages, accessible as one; return the pages that the driver refuses."""
        refused: list[int] = []
        start = at = first
        for fd in fds:
            try:
                self._driver.map_fd(self._where(at), pages * self._size, fd)
                self._mapped.update(dict.fromkeys(range(at, at + pages), True))
            except RmpError as error:
                print(f"leto_rmp.probe: page {at}: {error.message}", file=sys.stderr)
                refused += range(at, at + pages)
                self._access(start, at - start)
                start = at + pages
            at += pages
        self._access(start, at - start)
        return refused

    def _access(self, first: int, count: int) -> None:
        if count:
            self._driver.set_access(self._device.ordinal, self._where(first), count * self._size, True)


def _serve(sock: socket.socket, pages: Pages) -> None:
    reader = FrameReader()
    held: list[int] = []
    while True:
        data, fds, truncated = receive(sock, _READ_BYTES)
        held += fds
        if not data:
            return  # the manager is done with us, or dead
        if truncated:
            raise ProtocolError("the kernel dropped descriptors of pages: RLIMIT_NOFILE is too low")
        for payload in reader.feed(data):
            task = w.decode_task(payload)
            count = task.count if isinstance(task, w.Load) else 0
            mine, held = held[:count], held[count:]
            if len(mine) != count:
                raise ProtocolError(f"{count} descriptors were announced, {len(mine)} came")
            try:
                answer = pages.carry_out(task, mine)
            finally:
                for fd in mine:
                    os.close(fd)
            _say(sock, answer)


def _say(sock: socket.socket, message: Message) -> None:
    sock.sendall(frame(message))


def main(argv: list[str] | None = None) -> int:
    """Serve one errand; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m leto_rmp.probe", description="Reads GPU pages and may die of it."
    )
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the state manager")
    parser.add_argument("--device", required=True, help="identifier of the GPU (GPU-...)")
    arguments = parser.parse_args(argv)
    with socket.socket(fileno=arguments.fd) as sock:
        sock.set_inheritable(False)
        try:
            driver = Driver()
            device = driver.find(arguments.device)
            with driver.context(device.ordinal):
                _say(sock, w.Ok())
                _serve(sock, Pages(driver, device))
        except RmpError as error:
            code = error.details.get("code", 0)
            _say(sock, w.Bad(code=code if isinstance(code, int) else 0, message=error.message))
            return 1
        except (BrokenPipeError, ConnectionResetError):
            return 1  # the manager is gone
    return 0


if __name__ == "__main__":
    # A dead context makes the driver's own exit handlers fail or hang: leave without them.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
