"""What a run leaves behind to be compared: one line an iteration, and a digest of everything at the end.

Role in the whole: the verdict of the demo and of the exactness tests. Values are kept as bits (hexadecimal
of the IEEE numbers), never as rounded text; states as SHA-256 over their bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["RecordWriter", "final_state", "float_bits", "read_records", "rng_states", "write_final"]


def float_bits(value: float | None) -> str | None:
    """The 64 bits of a number, as 16 hexadecimal digits; None stays None."""
    return None if value is None else struct.pack(">d", value).hex()


def rng_states() -> dict[str, bytes]:
    """Every random stream of the job: Python, NumPy, torch (CPU, CUDA) and Megatron's tracker."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    version, internal, gauss = random.getstate()
    python = json.dumps([version, list(internal), gauss]).encode()
    legacy_state: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = legacy_state
    legacy = json.dumps([str(name), keys.tolist(), int(position), int(has_gauss), float(cached)]).encode()
    states = {"python": python, "numpy": legacy, "torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    for key, state in sorted(get_cuda_rng_tracker().get_states().items()):
        states[f"tracker/{key}"] = state.cpu().numpy().tobytes()
    return states


def rng_digest(states: dict[str, bytes] | None = None) -> str:
    """SHA-256 over all random streams, names included."""
    total = hashlib.sha256()
    for name, state in sorted((states if states is not None else rng_states()).items()):
        total.update(f"{name}:{len(state)}:".encode())
        total.update(state)
    return total.hexdigest()


class RecordWriter:
    """Append the record of each iteration to a file that survives this process.

    A line is written in one call and never rewritten. After a rollback the iterations between checkpoint
    and failure are recorded again: both lines stay, and the comparison wants them equal.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._newest: dict[str, Any] | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; `record["iteration"]` says which."""
        line = (json.dumps(record, sort_keys=True) + "\n").encode()
        # A process killed inside an earlier write may have left half a line: start on a fresh one.
        if self._newest is None and self._ends_in_mid_line():
            line = b"\n" + line
        os.write(self._file, line)
        self._newest = record

    def _ends_in_mid_line(self) -> bool:
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file, in the order in which they were written."""
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:  # empty, or cut off by a kill
            continue
        if isinstance(record, dict) and "iteration" in record:
            records.append(record)
    return records


def final_state(
    parts: Any, job: dict[str, bytes], read: Callable[[str, str], torch.Tensor] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Everything that defines the next iteration, by name: parameters, masters, moments, groups, job state.

    One by one, so that a large model is never copied as a whole.

    `job`: further states by name (scheduler, random streams, position ...). Stock and Leto runs use the same
    names, so that the two dictionaries can be compared key by key. `read`: gives master, exp_avg or
    exp_avg_sq of a shard, where Megatron's own tensors do not hold them.
    """
    from leto_megatron.shards import owned_shards

    yield from job.items()
    for name, parameter in parts.ddp.module.named_parameters():
        yield f"parameter/{name}", _bytes(parameter)
    for shard in owned_shards(parts.ddp, parts.optimizer):
        moments = shard.moments()
        for key in ("master", "exp_avg", "exp_avg_sq"):
            if read is not None:
                tensor = read(shard.name, key)
            else:
                tensor = shard.main if key == "master" else moments[key]
            yield f"{key}/{shard.name}", _bytes(tensor)
        yield f"step/{shard.name}", struct.pack("<d", float(moments["step"]))
    for index, group in enumerate(parts.optimizer.param_groups):
        hypers = {k: v for k, v in sorted(group.items()) if k not in ("params", "step")}
        yield f"group/{index}", json.dumps(hypers, sort_keys=True, default=str).encode()


def write_final(
    path: Path,
    state: Iterable[tuple[str, bytes]],
    iteration: int,
    dump: bool = False,
    elapsed_s: float | None = None,
) -> None:
    """Write the digest of every entry (and, with `dump`, the bytes in a .npz beside it). Atomic.

    `elapsed_s`: seconds of training, where one process saw all of it; it is not part of what is compared.
    """
    digests: dict[str, str] = {}
    arrays: dict[str, Any] = {}
    owned = 0
    for name, value in state:
        digests[name] = hashlib.sha256(value).hexdigest()
        owned += len(value) // 4 if name.startswith("master/") else 0
        if dump:
            arrays[name] = np.frombuffer(value, dtype=np.uint8)
    content: dict[str, Any] = {"iteration": iteration, "owned_numel": owned, "digests": digests}
    if elapsed_s is not None:
        content["elapsed_s"] = elapsed_s
    if dump:
        np.savez(path.with_suffix(".npz"), **arrays)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True))
    temporary.replace(path)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return flat.view(torch.uint8).numpy().tobytes()
