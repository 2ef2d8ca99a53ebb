"""Batches are a pure function of the position, and positions do not share batches."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from leto_megatron.data import Batch, BatchDigest, Corpus, load_stdlib

TEXT = np.arange(5000, dtype=np.int64).astype(np.uint8)


def test_a_batch_depends_on_its_position_only() -> None:
    one, other = Corpus(TEXT, 32, seed=5), Corpus(TEXT, 32, seed=5)
    for iteration in range(4):  # the second reader has read other batches before
        other.batch(iteration, 0, 0, 3)
    for position in itertools.product(range(3), range(2), range(2)):
        a, b = one.batch(*position, 4), other.batch(*position, 4)
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.labels, b.labels)


def test_positions_and_seeds_give_different_batches() -> None:
    positions = list(itertools.product(range(6), range(2), range(2)))
    seen = {
        Corpus(TEXT, 32, seed).batch(*position, 4).tokens.numpy().tobytes()
        for seed in (1, 2)
        for position in positions
    }
    assert len(seen) == 2 * len(positions)


def test_a_digest_tells_order_labels_and_shapes_apart() -> None:
    one, two = (Corpus(TEXT, 32, seed=5).batch(0, microbatch, 0, 4) for microbatch in (0, 1))

    def digest(*batches: Batch) -> str:
        total = BatchDigest()
        for batch in batches:
            total.add(batch)
        return total.hexdigest()

    assert digest(one, two) == digest(one, two)
    variants = [
        digest(one, two),
        digest(two, one),
        digest(one),
        digest(Batch(one.tokens.flip(0), one.labels.flip(0)), two),
        digest(Batch(one.labels, one.tokens), two),
        digest(Batch(one.tokens.view(8, 16), one.labels), two),
        digest(Batch(one.tokens, one.tokens), two),
    ]
    assert len(set(variants)) == len(variants)


def test_labels_are_the_next_bytes() -> None:
    batch = Corpus(TEXT, 32, seed=1).batch(0, 0, 0, 5)
    assert batch.tokens.shape == batch.labels.shape == (5, 32)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert torch.equal(batch.labels, (batch.tokens + 1) % 256)


def test_the_standard_library_is_read_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"second")
    (tmp_path / "a.py").write_bytes(b"first,")
    (tmp_path / "c.txt").write_bytes(b"no source")
    assert load_stdlib(folder=tmp_path).tobytes() == b"first,second"
    assert load_stdlib(max_bytes=8, folder=tmp_path).tobytes() == b"first,se"
    assert b"import" in load_stdlib(max_bytes=100_000).tobytes()


def test_missing_sources_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="standard library"):
        load_stdlib(folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [(TEXT.astype(np.int32), "uint8"), (TEXT.reshape(2, -1), "one-dimensional"), (TEXT[:40], "bytes")],
)
def test_unusable_texts_are_refused(text: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Corpus(text, 32, seed=1)
