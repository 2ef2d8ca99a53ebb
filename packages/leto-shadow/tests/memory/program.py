"""A process that uses the simulated device as PyTorch uses a real one: caching allocator, threads, graph
captures.

Reads one JSON command a line, answers one JSON value a line. Started with the hook preloaded where it is to
have it.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import sys
import threading
from typing import Any

fake = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL(None)  # the global scope: the preloaded cudaMalloc comes first, as for libc10_cuda
held_by_gil = ctypes.PyDLL(None)
RELAXED = 2


class OutOfMemoryError(Exception):
    """What PyTorch raises."""


class Allocator:
    """The order of events of PyTorch's caching allocator, without splitting."""

    def __init__(self) -> None:
        self.cached: list[tuple[int, int]] = []
        self.used: dict[int, int] = {}
        self.flushes = 0

    def malloc(self, size: int, library: Any = cuda, *, flush: bool = True) -> int:
        for index, (pointer, has) in enumerate(self.cached):
            if has == size:
                del self.cached[index]
                self.used[pointer] = size
                return pointer
        found = self.raw(size, library)
        if found is None and flush:
            self.flush()
            found = self.raw(size, library)
        if found is None:
            raise OutOfMemoryError
        self.used[found] = size
        return found

    def raw(self, size: int, library: Any = cuda) -> int | None:
        pointer = ctypes.c_void_p()
        if library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
            cuda.cudaGetLastError()
            return None
        assert cuda.cudaPeekAtLastError() == 0, "a successful allocation left an error behind"
        assert pointer.value is not None
        return pointer.value

    def free(self, size: int) -> None:
        pointer = next(one for one, has in self.used.items() if has == size)
        self.cached.append((pointer, self.used.pop(pointer)))

    def flush(self) -> None:
        self.flushes += 1
        while self.cached:
            cuda.cudaFree(ctypes.c_void_p(self.cached.pop()[0]))


allocator = Allocator()


def attempt(command: dict[str, Any]) -> Any:
    match command["do"]:
        case "attach":
            cuda.leto_oom_attach(command["fd"], command["wait_ms"], int(command.get("eager", False)))
            return True
        case "malloc":
            library = held_by_gil if command.get("gil") else cuda
            try:
                allocator.malloc(command["size"], library, flush=command.get("flush", True))
            except OutOfMemoryError:
                return "OutOfMemoryError"
            return "ok"
        case "raw":
            return allocator.raw(command["size"]) is not None
        case "free":
            return allocator.free(command["size"])
        case "flush":
            return allocator.flush()
        case "capture":
            cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
            return True
        case "info":
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
            return {"free": free.value, "total": total.value, "flushes": allocator.flushes}
        case "calls":
            cuda.leto_oom_calls.restype = ctypes.c_uint64
            return cuda.leto_oom_calls()
        case "fork":
            read, write = os.pipe()
            if (pid := os.fork()) == 0:
                allocator.cached.clear()
                os.write(write, json.dumps(attempt(command["then"])).encode())
                os._exit(0)
            os.waitpid(pid, 0)
            return json.loads(os.read(read, 4096))
        case other:
            raise ValueError(other)


class Worker(threading.Thread):
    """A thread of its own for commands with the same ``thread``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            command = self.commands.get()
            say({"thread": command["thread"], "result": attempt(command)})


lock = threading.Lock()


def say(value: Any) -> None:
    with lock:
        print(json.dumps(value), flush=True)


workers: dict[int, Worker] = {}
for line in sys.stdin:
    command = json.loads(line)
    number = command.get("thread")
    if number is None:
        say(attempt(command))
    else:
        workers.setdefault(number, Worker()).commands.put(command)
