"""Handing out the agents' keys through torchrun's own store (jobs of several nodes only).

This is the one place where an agent imports torch, because only torch speaks to that store; a job of one node
needs no store. Keys are under the run id and the restart count, so that an earlier attempt's are never read
(case 7), and each agent takes its own out. The calls block, in short pieces: between them ``check`` may
raise, which it does when torchrun is gone (I-7).
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from leto_shadow.transport import AgentKeys

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["fetch_keys", "publish_keys"]

_PIECE = datetime.timedelta(seconds=2)


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


def _key(environ: Mapping[str, str], node: int) -> str:
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"leto/{environ.get('TORCHELASTIC_RUN_ID', 'none')}/{attempt}/agent-{node}"


def publish_keys(keys: Mapping[int, AgentKeys], timeout_s: float, check: Callable[[], None]) -> object:
    """Put the keys of the other nodes into torchrun's store; keep what is returned while they read.

    Raises `TimeoutError`, or what ``check`` raises.
    """
    store = _torchrun_store(os.environ, 0, time.monotonic() + timeout_s, check)
    for node, value in keys.items():
        store.set(_key(os.environ, node), msgspec.msgpack.encode(value).hex())
    return store


def fetch_keys(node: int, timeout_s: float, check: Callable[[], None]) -> AgentKeys:
    """Wait for this node's keys and take them out of the store. Raises as `publish_keys`."""
    deadline = time.monotonic() + timeout_s
    store = _torchrun_store(os.environ, node, deadline, check)
    key = _key(os.environ, node)
    while True:
        check()
        try:
            store.wait([key], _PIECE)
            break
        except RuntimeError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"node rank 0 has not handed out keys for {timeout_s:.0f} s") from error
    value = store.get(key)
    store.delete_key(key)
    return msgspec.msgpack.decode(bytes.fromhex(value.decode()), type=AgentKeys)
