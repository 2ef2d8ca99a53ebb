"""Handing out the agents' keys through torchrun's own store (jobs of several nodes only).

This is the one place where an agent imports torch, because only torch speaks to that store; a job of one node
needs no store. Keys are under the run id and the restart count, so that an earlier attempt's are never read
(case 7), and each agent takes its own out.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from leto_shadow.transport import AgentKeys

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["fetch_keys", "publish_keys"]


def _torchrun_store(environ: Mapping[str, str], node: int, timeout_s: float) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=node == 0 and not hosted,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _key(environ: Mapping[str, str], node: int) -> str:
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"leto/{environ.get('TORCHELASTIC_RUN_ID', 'none')}/{attempt}/agent-{node}"


def publish_keys(keys: Mapping[int, AgentKeys], timeout_s: float) -> object:
    """Put the keys of the other nodes into torchrun's store; keep what is returned while they read."""
    store = _torchrun_store(os.environ, 0, timeout_s)
    for node, value in keys.items():
        store.set(_key(os.environ, node), msgspec.msgpack.encode(value).hex())
    return store


def fetch_keys(node: int, timeout_s: float) -> AgentKeys:
    """Wait for this node's keys and take them out of the store; raises torch's error after ``timeout_s``."""
    store = _torchrun_store(os.environ, node, timeout_s)
    value = store.get(_key(os.environ, node))
    store.delete_key(_key(os.environ, node))
    return msgspec.msgpack.decode(bytes.fromhex(value.decode()), type=AgentKeys)
