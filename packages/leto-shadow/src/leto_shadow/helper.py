"""The helper process of node rank 0: what needs torch, or runs a user's function, stays out of the agent.

It hosts the TCPStore of each world (cases 7 and 8: a store of its own, on a port that the kernel chooses) and
calls the decision function. So the agent starts in a fraction of a second, never blocks on an import, and a
decision that hangs runs into a deadline instead of stopping the heartbeat. Each decision has a thread of its
own: the recovery that follows one that hangs needs a store and another decision. It ends with its agent.

    python -m leto_shadow.helper FD MODULE:FUNCTION SCRIPT_DIRECTORY
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from leto_shadow import wire
from leto_shadow.helper_messages import (
    MAX_REQUEST_BYTES,
    CloseWorldStore,
    Decided,
    DecideOn,
    HelperMessage,
    HelperRequest,
    OpenWorldStore,
    Ready,
    StoreOpened,
    Unusable,
    pack,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["load_decider", "main"]

_ERROR_CHARS = 4000

Decider = Callable[[Sequence[bytes]], bytes]


def load_decider(name: str) -> Decider:
    """Import ``module:function``; `ValueError` or the import's own error says what is wrong with the name."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"--decide must be module:function, found {name!r}")
    function: Decider = getattr(importlib.import_module(module_name), attribute)
    if not callable(function):
        raise TypeError(f"it must be a function, found {type(function).__name__}")
    return function


class _Helper:
    def __init__(self, sock: socket.socket, decide: Decider) -> None:
        self._socket = sock
        self._decide = decide
        self._stores: dict[int, TCPStore] = {}
        self._speaks = threading.Lock()

    def say(self, message: HelperMessage) -> None:
        with self._speaks:
            self._socket.sendall(pack(message))

    def serve(self) -> None:
        """Answer requests until the agent hangs up."""
        decoder: wire.FrameDecoder[HelperRequest] = wire.FrameDecoder(HelperRequest, MAX_REQUEST_BYTES)
        while data := self._socket.recv(1 << 16):
            for request in decoder.feed(data):
                match request:
                    case OpenWorldStore(world=world, host=host):
                        self.say(self._open(world, host))
                    case CloseWorldStore(world=world):
                        self._stores.pop(world, None)
                    case DecideOn():
                        threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _open(self, world: int, host: str) -> StoreOpened:
        from torch._C._distributed_c10d import TCPStore

        try:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            return StoreOpened(world, 0, f"{type(error).__name__}: {error}")
        self._stores[world] = store
        return StoreOpened(world, int(store.port))

    def _answer(self, request: DecideOn) -> None:
        decided = self._decision(request.generation, request.summaries)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the agent is gone
            self.say(decided)

    def _decision(self, generation: int, summaries: tuple[bytes, ...]) -> Decided:
        try:
            payload = self._decide(summaries)
            if not isinstance(payload, bytes):
                raise TypeError(f"the decision must be bytes, found {type(payload).__name__}")
        except Exception as error:  # noqa: BLE001 - a user's function; whatever it raises means "no"
            traceback.print_exc()
            return Decided(generation, b"", f"{type(error).__name__}: {error}"[:_ERROR_CHARS])
        return Decided(generation, payload)


def main(argv: Sequence[str]) -> int:
    """Serve the agent at the other end of the inherited socket."""
    fd, decide_name, script_directory = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when it ends
    sys.path.append(script_directory)  # so that --decide may name a function of the script's neighbourhood
    with socket.socket(fileno=int(fd)) as sock:
        sock.set_inheritable(False)
        try:
            decide = load_decider(decide_name)
            import torch.distributed  # noqa: F401 - loaded now, so that the first world need not wait for it
        except Exception as error:  # noqa: BLE001 - reported to the agent, which ends the job with it
            traceback.print_exc()
            sock.sendall(pack(Unusable(f"--decide {decide_name}: {type(error).__name__}: {error}")))
            return 1
        helper = _Helper(sock, decide)
        helper.say(Ready())
        helper.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
