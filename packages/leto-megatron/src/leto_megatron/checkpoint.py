"""Checkpoints for what in-place recovery cannot survive: a lost node, a dead state manager.

Role in the whole (paper, fatal failures): the state of all ranks at one iteration, written with torch's
distributed checkpoint (DCP), on a file system that all ranks see. A checkpoint counts only when it is
complete: everything is written under a temporary name and flushed, the completion marker (with digests of
every rank's job state and tensors, and of the run's configuration) is written last, and one rename makes
it visible. Whatever lacks the marker is skipped (I-6). All ranks restore the same step (I-5), chosen by the
decision over what each of them can see.

    <folder>/step-00000040/  __0_0.distcp ... .metadata COMPLETE.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from leto_megatron import process

__all__ = ["CheckpointError", "Checkpoints"]

FORMAT = 1
_MARKER = "COMPLETE.json"
_JOB = "job_state"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: incomplete, of another run, or with other bytes than were written."""


class Checkpoints:
    """The checkpoints of one run.

    Parameters
    ----------
    folder
        Where they lie; shared by all ranks.
    identity
        Digest of configuration and world size (`Config.digest`): only checkpoints of the same are seen.
    keep
        How many complete ones are kept.
    """

    def __init__(self, folder: Path, identity: str, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder = folder
        self.identity = identity
        self.keep = keep

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints of this run, oldest first."""
        found = []
        for path in sorted(self.folder.glob("step-*")):
            marker = _read_marker(path)
            if marker is not None and marker["identity"] == self.identity:
                found.append(int(marker["step"]))
        return tuple(found)

    # --- writing ------------------------------------------------------------------------------------

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], job_state: bytes) -> bool:
        """Write this rank's part and wait for the others'. Collective. False: it was there already.

        The tensors, in host memory, are read before this returns: they may change right after it (case 15).
        """
        self._begin(step)
        process.host_barrier()
        if self.path(step).exists():  # a run that went back passes the step again, with the same bits
            return False
        self._write_part(step, tensors, job_state)
        digests = _gather(digest(tensors, job_state))
        if dist.get_rank() == 0:
            self._complete(step, digests)
            self._drop_old()
        process.host_barrier()
        return True

    def _partial(self, step: int) -> Path:
        return self.folder / f".partial-{step:08d}"

    def _begin(self, step: int) -> None:
        """Rank 0 clears what earlier attempts left behind."""
        if dist.get_rank() != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.folder.glob(".partial-*"), *self.folder.glob(".trash-*")):
            shutil.rmtree(leftover)
        final = self.path(step)
        if final.exists() and step not in self.steps():
            shutil.rmtree(final)
        if not final.exists():
            self._partial(step).mkdir()

    def _write_part(self, step: int, tensors: Mapping[str, torch.Tensor], job_state: bytes) -> None:
        prefix = f"rank{dist.get_rank()}/"
        content = {prefix + name: tensor for name, tensor in tensors.items()}
        content[prefix + _JOB] = torch.frombuffer(bytearray(job_state), dtype=torch.uint8)
        writer = FileSystemWriter(self._partial(step), single_file_per_rank=True, sync_files=True)
        dcp_save(content, storage_writer=writer, process_group=process.host_group())

    def _complete(self, step: int, digests: list[str]) -> None:
        """The marker, then the one rename that makes the checkpoint visible."""
        partial = self._partial(step)
        marker = {
            "format": FORMAT,
            "step": step,
            "world_size": dist.get_world_size(),
            "identity": self.identity,
            "digests": digests,
        }
        _write_durably(partial / _MARKER, json.dumps(marker, indent=1).encode())
        partial.rename(self.path(step))
        _flush_folder(self.folder)

    def _drop_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            trash = self.folder / f".trash-{step:08d}"
            self.path(step).rename(trash)  # from here on nobody takes it for complete
            shutil.rmtree(trash)

    # --- reading ------------------------------------------------------------------------------------

    def load(self, step: int, tensors: Mapping[str, torch.Tensor]) -> bytes:
        """Fill this rank's tensors in place and return its job state. Collective.

        Raises
        ------
        CheckpointError
            If the checkpoint is incomplete, of another run, or its bytes are not those that were written.
        """
        rank = dist.get_rank()
        path = self.path(step)
        marker = _read_marker(path)
        if marker is None:
            raise CheckpointError(f"{path} is missing or incomplete (no valid {_MARKER}): choose another")
        if marker["identity"] != self.identity or marker["world_size"] != dist.get_world_size():
            raise CheckpointError(
                f"{path} was written by another run (configuration or world size differ): "
                "continue with the settings it was written with, or use another folder"
            )
        job_state = self._read_part(path, tensors)
        found, written = digest(tensors, job_state), marker["digests"][rank]
        if found != written:
            raise CheckpointError(
                f"{path}: rank {rank} read bytes with digest {found[:16]}, {written[:16]} was written: "
                "the files were damaged since; an older checkpoint will be used if there is one"
            )
        return job_state

    @staticmethod
    def _read_part(path: Path, tensors: Mapping[str, torch.Tensor]) -> bytes:
        prefix = f"rank{dist.get_rank()}/"
        try:
            reader = FileSystemReader(path)
            entry = reader.read_metadata().state_dict_metadata[prefix + _JOB]
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{path}: {prefix}{_JOB} is not a tensor")
            job = torch.empty(entry.size[0], dtype=torch.uint8)
            content: dict[str, Any] = {prefix + name: tensor for name, tensor in tensors.items()}
            content[prefix + _JOB] = job
            dcp_load(content, storage_reader=reader, process_group=process.host_group())
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, CheckpointException) as error:
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        return job.numpy().tobytes()

    def set_aside(self, step: int) -> None:
        """Hide a damaged checkpoint from :meth:`steps`; its files stay, for whoever wants to know why."""
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            self.path(step).rename(self.folder / f".damaged-{step:08d}")


def digest(tensors: Mapping[str, torch.Tensor], job_state: bytes) -> str:
    """SHA-256 over names, shapes and bytes of a rank's part."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:".encode())
        total.update(tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().data)
    total.update(f"{_JOB}:{len(job_state)}:".encode())
    total.update(job_state)
    return total.hexdigest()


def _gather(text: str) -> list[str]:
    """Every rank's hexadecimal digest, in rank order (no pickle)."""
    own = torch.from_numpy(np.frombuffer(bytes.fromhex(text), dtype=np.uint8).copy())
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own, group=process.host_group())
    return [part.numpy().tobytes().hex() for part in parts]


def _read_marker(path: Path) -> dict[str, Any] | None:
    """The completion marker if it is there and whole, else None."""
    try:
        marker = json.loads((path / _MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    wanted = {"format": int, "step": int, "world_size": int, "identity": str, "digests": list}
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        return None
    if any(not isinstance(marker.get(key), kind) for key, kind in wanted.items()):
        return None
    if len(marker["digests"]) != marker["world_size"] or path.name != f"step-{marker['step']:08d}":
        return None
    return marker


def _write_durably(path: Path, data: bytes) -> None:
    """Write, flush, rename, flush the folder: after a crash the file is whole or absent."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
