"""Training text that every machine has: the Python standard library's own source files.

Role in the whole: a data set without a download. The corpus is the bytes of the standard library's ``.py``
files in sorted order, and a token is a byte, so the vocabulary is 256. A batch is a *pure function* of
(seed, iteration, microbatch, data-parallel rank): the data position that a recovery has to restore is one
number, and a second reader needs no state of the first.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

__all__ = ["VOCABULARY", "Batch", "BatchDigest", "Corpus", "load_stdlib"]

VOCABULARY = 256
_MAX_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Batch:
    """One microbatch. `tokens` and `labels`: int64 (samples, sequence); labels are the next bytes."""

    tokens: torch.Tensor
    labels: torch.Tensor


class BatchDigest:
    """SHA-256 over the microbatches that a rank consumed in one iteration, in their order.

    Two runs that saw the same samples in another order, or other samples of the same number, differ.
    """

    def __init__(self) -> None:
        self._total = hashlib.sha256()

    def add(self, batch: Batch) -> None:
        """Take the next microbatch: shapes, tokens, labels."""
        for tensor in (batch.tokens, batch.labels):
            self._total.update(f"{tuple(tensor.shape)}:{tensor.dtype}:".encode())
            self._total.update(tensor.contiguous().numpy().data)

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        return self._total.hexdigest()


class Corpus:
    """A text and the rule by which batches are drawn from it.

    Parameters
    ----------
    text
        uint8, one dimension.
    sequence
        Tokens in a sample.
    seed
        Together with the position it determines every batch.
    """

    def __init__(self, text: np.ndarray, sequence: int, seed: int) -> None:
        if text.dtype != np.uint8 or text.ndim != 1:
            raise ValueError(
                f"a corpus is a one-dimensional uint8 array, got {text.dtype} with {text.ndim} dimensions"
            )
        if text.size < 2 * sequence + 2:
            raise ValueError(
                f"the text has {text.size} bytes; sequences of {sequence} need {2 * sequence + 2}"
            )
        self.text = text
        self.sequence = sequence
        self.seed = seed

    @property
    def digest(self) -> str:
        """SHA-256 of the text: two runs can be compared only where it is the same."""
        return hashlib.sha256(self.text.tobytes()).hexdigest()

    def batch(self, iteration: int, microbatch: int, data_rank: int, samples: int) -> Batch:
        """The microbatch of a data-parallel rank, drawn from a generator of its own (Philox)."""
        # The position is the key of the generator, so no two positions share a stream and none depends on
        # how many were drawn before.
        position = np.random.SeedSequence([self.seed, iteration, microbatch, data_rank])
        generator = np.random.Generator(np.random.Philox(position))
        starts = generator.integers(0, self.text.size - self.sequence - 1, size=samples)
        rows = np.stack([self.text[s : s + self.sequence + 1] for s in starts]).astype(np.int64)
        return Batch(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy()))


def load_stdlib(max_bytes: int = _MAX_BYTES, folder: Path | None = None) -> np.ndarray:
    """The bytes of the standard library's top-level ``.py`` files, sorted by name, at most `max_bytes`.

    Raises
    ------
    FileNotFoundError
        If the interpreter came without the sources of its standard library.
    """
    place = folder if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    total = 0
    for path in sorted(place.glob("*.py")):
        data = path.read_bytes()
        parts.append(data)
        total += len(data)
        if total >= max_bytes:
            break
    if not parts:
        raise FileNotFoundError(
            f"no .py files in {place}: this Python came without the sources of its standard library, "
            "which are the training text; install them or use another interpreter"
        )
    return np.frombuffer(b"".join(parts)[:max_bytes], dtype=np.uint8).copy()
