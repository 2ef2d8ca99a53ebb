"""The watch process: asks NVML for the agent, which has no CUDA context and must not hang with a driver.

    python -m leto_shadow.gpu_watch FD        # answers the agent at the other end of an inherited socket
    python -m leto_shadow.gpu_watch --list    # one JSON line: the GPUs of this machine, or why there are none
    python -m leto_shadow.gpu_watch --look UUID...    # one JSON line: an answer for each of these devices

Each request is one line: what is asked ("look", or "memory", which is the cheaper question) and the devices'
UUIDs. Each answer is one JSON line, a list with an `Answer` for each device. Several devices are asked side
by side: each takes milliseconds, and a recovery waits for all of them. Whoever asks sets the deadline: a
watch that does not answer is killed, which is itself the finding. It has no CUDA context either, and ends
when its agent hangs up.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from leto_shadow.nvml import Gpu, Look, Memory, Nvml, NvmlError

__all__ = ["Answer", "Listing", "main"]

_THREADS_MAX = 16


class Answer(msgspec.Struct, frozen=True):
    """What one device said: a look or its memory, whatever was asked, or why there is none."""

    look: Look | None = None
    error: str = ""
    memory: Memory | None = None


class Listing(msgspec.Struct, frozen=True):
    """The GPUs of a machine, in NVML's order."""

    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def _answer(nvml: Nvml, kind: str, uuid: str) -> Answer:
    try:
        if kind == "memory":
            return Answer(memory=nvml.memory(uuid))
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
    return [_answer(nvml, "look", uuid) for uuid in uuids]


def _serve(sock: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when it ends
    try:
        nvml = Nvml()
        nvml.listen()
    except NvmlError as error:
        _say(sock, [Answer(error=str(error))])
        return
    _say(sock, [Answer()])
    with ThreadPoolExecutor(_THREADS_MAX, "leto-gpu") as threads, sock.makefile("rb") as questions:
        for line in questions:
            kind, *uuids = line.decode().split()
            ask = partial(_answer, nvml, kind)
            _say(sock, list(threads.map(ask, uuids) if len(uuids) > 1 else map(ask, uuids)))


def _say(sock: socket.socket, answers: Sequence[Answer]) -> None:
    sock.sendall(msgspec.json.encode(answers) + b"\n")


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
