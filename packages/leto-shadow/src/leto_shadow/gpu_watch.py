"""The watch process: asks NVML for the agent, which has no CUDA context and must not hang with a driver.

    python -m leto_shadow.gpu_watch FD        # answers the agent at the other end of an inherited socket
    python -m leto_shadow.gpu_watch --list    # one JSON line: the GPUs of this machine, or why there are none
    python -m leto_shadow.gpu_watch --look UUID...    # one JSON line: an answer for each of these devices

Each request is one line, a device's UUID; each answer one JSON line. Whoever asks sets the deadline: a watch
that does not answer is killed, which is itself the finding. It has no CUDA context either, and ends when
its agent hangs up.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence

import msgspec

from leto_shadow.nvml import Gpu, Look, Nvml, NvmlError

__all__ = ["Answer", "Listing", "main"]


class Answer(msgspec.Struct, frozen=True):
    """The answer to one question: a look, or why there is none."""

    look: Look | None = None
    error: str = ""


class Listing(msgspec.Struct, frozen=True):
    """The GPUs of a machine, in NVML's order."""

    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def _answer(nvml: Nvml, uuid: str) -> Answer:
    try:
        return Answer(nvml.look(uuid))
    except NvmlError as error:
        return Answer(error=str(error))


def _list() -> Listing:
    try:
        return Listing(tuple(Nvml().gpus()))
    except NvmlError as error:
        return Listing(error=str(error))


def _look(uuids: Sequence[str]) -> list[Answer]:
    try:
        nvml = Nvml()
    except NvmlError as error:
        return [Answer(error=str(error)) for _ in uuids]
    return [_answer(nvml, uuid) for uuid in uuids]


def _serve(sock: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when it ends
    try:
        nvml = Nvml()
        nvml.listen()
    except NvmlError as error:
        sock.sendall(msgspec.json.encode(Answer(error=str(error))) + b"\n")
        return
    sock.sendall(msgspec.json.encode(Answer()) + b"\n")
    with sock.makefile("rb") as questions:
        for line in questions:
            sock.sendall(msgspec.json.encode(_answer(nvml, line.decode().strip())) + b"\n")


def main(argv: Sequence[str]) -> int:
    """Serve one agent, or list the devices."""
    if list(argv) == ["--list"]:
        print(msgspec.json.encode(_list()).decode())
        return 0
    if argv[:1] == ["--look"]:
        print(msgspec.json.encode(_look(argv[1:])).decode())
        return 0
    with socket.socket(fileno=int(argv[0])) as sock:
        sock.set_inheritable(False)
        _serve(sock)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
