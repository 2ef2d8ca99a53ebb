"""Handing out the agents' keys through torchrun's own store (jobs of several nodes only).

This is the one place where an agent imports torch, because only torch speaks to that store; a job of one node
needs no store. Node rank 0 numbers its attempts in the store (torchrun's restart count will not do: torchrun
raises it on the node whose agent failed, and not on those that it restarts along with it), puts the
keys under the number, and each agent takes its own out, so that none is ever used twice (case 7). The calls
block, in short pieces: between them ``check`` may raise, which it does when torchrun is gone (I-7).
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from leto_shadow.transport import AgentKeys

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["fetch_keys", "publish_keys"]

_PIECE = datetime.timedelta(seconds=2)
_PAUSE_S = 0.1


def _torchrun_store(
    environ: Mapping[str, str], node: int, deadline: float, check: Callable[[], None]
) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    while True:
        check()
        try:
            return TCPStore(
                *address, is_master=node == 0 and not hosted, wait_for_workers=False, timeout=_PIECE
            )
        except RuntimeError as error:  # torch raises DistNetworkError, DistStoreError and plain ones
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer from torchrun's store at {address}: {error}") from error


def _prefix(environ: Mapping[str, str]) -> str:
    return f"leto/{environ.get('TORCHELASTIC_RUN_ID', 'none')}"


def publish_keys(keys: Mapping[int, AgentKeys], timeout_s: float, check: Callable[[], None]) -> object:
    """Put the keys of the other nodes into torchrun's store; keep what is returned while they read.

    Raises `TimeoutError`, or what ``check`` raises.
    """
    store = _torchrun_store(os.environ, 0, time.monotonic() + timeout_s, check)
    prefix = _prefix(os.environ)
    attempt = int(store.add(f"{prefix}/attempts", 1))
    for node, value in keys.items():
        with suppress(RuntimeError):  # what an agent of the attempt before never fetched
            store.delete_key(f"{prefix}/{attempt - 1}/agent-{node}")
        store.set(f"{prefix}/{attempt}/agent-{node}", msgspec.msgpack.encode(value).hex())
    store.set(f"{prefix}/newest", str(attempt))
    return store


def fetch_keys(node: int, timeout_s: float, check: Callable[[], None]) -> AgentKeys:
    """Wait for this node's keys and take them out of the store. Raises as `publish_keys`.

    Those of an attempt that this node has taken part in are gone from the store, so a restarted agent waits
    for those of the restarted coordinator.
    """
    deadline = time.monotonic() + timeout_s
    store = _torchrun_store(os.environ, node, deadline, check)
    prefix = _prefix(os.environ)
    while True:
        check()
        try:
            store.wait([f"{prefix}/newest"], _PIECE)
            key = f"{prefix}/{store.get(f'{prefix}/newest').decode()}/agent-{node}"
            if store.check([key]):
                value = store.get(key)
                store.delete_key(key)
                return msgspec.msgpack.decode(bytes.fromhex(value.decode()), type=AgentKeys)
        except RuntimeError as error:
            problem: str = str(error)
        else:
            problem = "the newest keys have been taken already"
            time.sleep(_PAUSE_S)  # the store has no event for a change of a value
        if time.monotonic() > deadline:
            raise TimeoutError(f"node rank 0 has not handed out keys for {timeout_s:.0f} s: {problem}")
