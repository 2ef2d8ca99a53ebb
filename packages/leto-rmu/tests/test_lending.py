"""Lent memory: the same bits, no tensor in it, and nothing that a crash could miss (I-2)."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cuda_lab import DeviceWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from rmu_lab import (
    LabMemory,
    Point,
    Pool,
    Truth,
    World,
    Wrong,
    examine,
    examine_all,
    loss_patterns,
    record_iteration,
)
from sim_lanes import OneLaunchWorld
from torch.utils.checkpoint import checkpoint

from leto_rmu import Action, ArrayMemory, Muon, Op, ProtocolError, ResumableUpdater, Segment, arrays
from leto_rmu.gaps import GRAIN, Gaps, Piece
from leto_rmu.geometry import Rotation
from leto_rmu.lending import Activation, Key, Lender, Saved
from leto_rmu.views import RankMemory

pytestmark = pytest.mark.timeout(600)


# --- bookkeeping ------------------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5 * GRAIN), max_size=4),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9 * GRAIN)), max_size=40),
)
def test_every_byte_has_one_owner(sizes: list[int], steps: list[tuple[bool, int]]) -> None:
    """Against a set of bytes: pieces are free ones of a range, enough of them, and come back whole."""
    gaps, free = Gaps(sizes), {(k, i) for k, size in enumerate(sizes) for i in range(size)}
    out: list[list[Piece]] = []
    for take, n in steps:
        if take or not out:
            if not 0 < n <= len(free):
                with pytest.raises(ValueError, match=f"{len(free)} are free"):
                    gaps.take(n)
                continue
            pieces = gaps.take(n)
            mine = [(k, i) for k, lo, hi in pieces for i in range(lo, hi)]
            assert len(mine) == len(set(mine)) >= n
            assert set(mine) <= free
            assert len(mine) < n + GRAIN
            free -= set(mine)
            out.append(pieces)
        else:
            pieces = out.pop(n % len(out))
            gaps.give(pieces)
            free |= {(k, i) for k, lo, hi in pieces for i in range(lo, hi)}
        assert gaps.free == len(free)
    for pieces in out:
        gaps.give(pieces)
    assert gaps._gaps == [(k, 0, size) for k, size in enumerate(sizes) if size], "neighbours were not merged"


# --- activations ------------------------------------------------------------------------------------------
class View(Lender):
    """Broken: the backward pass gets a view of lent memory where one piece holds all of it."""

    def _copy_out(self, one: Activation) -> torch.Tensor:
        if len(one.pieces) > 1 or one.rest is not None:
            return super()._copy_out(one)
        dtype, size, stride = one.form
        k, lo, _ = one.pieces[0]
        return torch.as_strided(self._ranges[k][lo:].view(dtype), size, stride)


class LeftThere(Lender):
    """Broken: what is still needed stays in lent memory, and is read there."""

    def open(self, ranges: Sequence[torch.Tensor], retained: Sequence[tuple[int, int]]) -> None:
        super().open(ranges, retained)
        self.kept = list(self._ranges)

    def take_back(self) -> bool:
        self._held.clear()
        return super().take_back()

    def _copy_out(self, one: Activation) -> torch.Tensor:
        now, self._ranges = self._ranges, self.kept
        try:
            return super()._copy_out(one)
        finally:
            self._ranges = now


class ForgetsOwners(Lender):
    """Broken: room is given out while an activation is in it."""

    def _move(self, tensor: torch.Tensor, min_bytes: int) -> Saved | None:
        self._gaps = Gaps([line.numel() for line in self._ranges])
        return super()._move(tensor, min_bytes)


class ForgetsVersions(Lender):
    """Broken: bytes that have been changed since count as those that are in lent memory."""

    def _hold(self, key: Key, one: Activation) -> None:
        for version in range(9):
            super()._hold((*key[:3], version), one)


class ForgetsPlaces(Lender):
    """Broken: all of a storage counts as the same bytes."""

    def _hold(self, key: Key, one: Activation) -> None:
        self._held = AnyPlace(self._held)
        super()._hold(key, one)


class AnyPlace(dict[Key, Any]):
    def get(self, key: Key, default: Any = None) -> Any:
        return next((ref for (a, _, *b), ref in self.items() if (a, *b) == (key[0], *key[2:])), default)


class ForgetsStorages(Lender):
    """Broken: bytes are known by their address alone, which others get when a tensor is freed."""

    def _move(self, tensor: torch.Tensor, min_bytes: int) -> Saved | None:
        key = (0, tensor.data_ptr(), tensor.nbytes, 0)
        if (ref := self._held.get(key)) is not None and (one := ref()) is not None:
            return Saved(activation=one, form=one.form)
        saved = super()._move(tensor, min_bytes)
        if saved is not None and saved.activation is not None:
            self._held[key] = weakref.ref(saved.activation)
        return saved


class Finalized(Lender):
    """Broken: room comes back from a finalizer, during which the activation can still be found."""

    meanwhile: Callable[[], None]

    def _hold(self, key: Key, one: Activation) -> None:
        lender, number, pieces = self, self._round, one.pieces

        class Dying(Activation):
            __slots__ = ()

            def __del__(self) -> None:
                lender._returned.append((number, (0, 0, 0, 0), weakref.ref(self), pieces))
                lender.meanwhile()

        one.__class__ = Dying
        self._held[key] = weakref.ref(one)


class IgnoresVersions(Lender):
    """Broken: an in-place change of what was left where it is goes unnoticed."""

    def _unpack(self, saved: Saved) -> torch.Tensor:
        saved.version = saved.tensor._version if saved.tensor is not None else 0
        return super()._unpack(saved)


def network(x: torch.Tensor, weights: Sequence[torch.Tensor], kind: int) -> torch.Tensor:
    """Saves inputs and results, dense and not, of several types, some twice."""
    for k, w in enumerate(weights):
        x = torch.nn.functional.gelu(x @ w) if k % 2 else torch.tanh(x @ w.t()).exp()
        if kind == 1:
            x = x * torch.sigmoid(x.t().contiguous().t())
        if kind == 2:
            x = (x.double() * x.detach()[:, ::2].repeat(1, 2)).float()
        if kind == 3:
            x = checkpoint(torch.sin, checkpoint(torch.cos, x, use_reentrant=False), use_reentrant=True)
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])
    return x.square().mean()


def weights_of(seed: int, count: int = 4, width: int = 16, device: str = "cpu") -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(width, width, generator=generator) / 4 for _ in range(count)]
    return [torch.nn.Parameter(one.to(device)) for one in drawn]


def backward(
    make: Callable[[], Lender],
    seed: int,
    kind: int,
    sizes: Sequence[int],
    *,
    late: bool,
    device: str = "cpu",
    on: Callable[[int], Any] = lambda _k: nullcontext(),
) -> None:
    """Gradients with lent memory are those without. ``late``: backward passes come after the update, which
    writes all that was lent. ``on``: where forward pass number k and its backward pass run."""
    rng = np.random.default_rng(seed)
    batches = [
        torch.from_numpy(rng.standard_normal((8, 16), np.float32)).to(device).requires_grad_(seed % 2 == 0)
        for _ in range(4)
    ]
    expected = weights_of(seed, device=device)
    for x in batches:
        network(x, expected, kind).backward()
    lender, found = make(), weights_of(seed, device=device)
    room = [torch.from_numpy(rng.integers(0, 256, n, np.uint8)).to(device) for n in sizes]
    for _ in range(2):
        for w in found:
            w.grad = None
        lender.open(room, [])
        losses = []
        with lender.activations(64):
            for k, x in enumerate(batches):
                with on(k):
                    losses.append(network(x, found, kind))
                if k == 1:
                    losses[0].backward(retain_graph=kind != 3)
        assert lender.held <= sum(sizes)
        if not late:
            for loss in losses[1:]:
                loss.backward()
            with lender.activations(64):
                network(batches[0], found, kind)  # a graph that nobody goes back through
        lender.take_back()
        assert lender.lent == 0
        for line in room:
            line.fill_(0xFF)  # the update: NaN wherever somebody still looks
        if late:
            for loss in losses[1:]:
                loss.backward()
        for a, b in zip(expected, found, strict=True):
            if not (a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)):
                raise Wrong(f"another gradient; repeat with seed {seed}, kind {kind}, {sizes}, late={late}")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("sizes", [(), (700,), (1536, 0, 4096), (100_000,)], ids=str)
def test_gradients_are_the_same(kind: int, sizes: Sequence[int], late: bool) -> None:
    for seed in range(3):
        backward(Lender, seed, kind, sizes, late=late)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("late", [False, True])
def test_gradients_on_a_gpu(late: bool) -> None:
    """Also with forward passes on streams of their own: one copy comes after the other on any of them."""
    streams = [torch.cuda.Stream() for _ in range(3)]

    @contextmanager
    def aside(k: int) -> Iterator[None]:
        stream, here = streams[k % 3], torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            yield
        here.wait_stream(stream)

    for seed in range(6):
        for kind in range(4):
            for sizes in ((700,), (1536, 0, 4096), (100_000,)):
                backward(Lender, seed, kind, sizes, late=late, device="cuda")
                backward(Lender, seed, kind, sizes, late=late, device="cuda", on=aside)


class NeverWaits(Lender):
    """Broken: copies on one stream do not come after those on another."""

    def _enter_stream(self, device: torch.device) -> None:
        pass


class NeverWaitsForTheUpdater(Lender):
    """Broken: the first copy does not come after what the updater had issued."""

    def open(self, ranges: Sequence[torch.Tensor], retained: Sequence[tuple[int, int]]) -> None:
        super().open(ranges, retained)
        self._stream = torch.cuda.Stream()


class WaitsForTheUpdaterOnly(Lender):
    """Broken: the first copy comes after what the updater had issued, the others after nothing."""

    def _enter_stream(self, device: torch.device) -> None:
        if self._stream not in self.later:
            self.later = [self._stream]
            super()._enter_stream(device)
            self.later.append(self._stream)

    later: Sequence[Any] = ()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Lender, NeverWaits, NeverWaitsForTheUpdater, WaitsForTheUpdaterOnly])
def test_each_copy_comes_after_the_one_before(kind: type[Lender]) -> None:
    """The updater's stream is busy for half a second, longer than issuing takes, and writes then; so is one
    that saves; a place that is given out again is written last."""
    streams, lender, busy = [torch.cuda.Stream() for _ in range(3)], kind(), 1_000_000_000
    room = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    first, second = (torch.full((32, 32), value, device="cuda") for value in (1.0, 2.0))
    torch.cuda.synchronize()
    torch.cuda._sleep(busy)
    room.fill_(0xFF)
    lender.open([room], [])
    with torch.cuda.stream(streams[0]):
        saved = lender._pack(64, first)
        torch.cuda._sleep(2 * busy)
    with torch.cuda.stream(streams[1]):
        found = [lender._unpack(saved)]
        torch.cuda._sleep(busy)
        del saved
        saved = lender._pack(64, second)
    with torch.cuda.stream(streams[2]):
        found.append(lender._unpack(saved))
        del saved
    lender.take_back()
    room.fill_(0xFF)
    torch.cuda.synchronize()
    assert lender.held == 4096
    right = torch.equal(found[0], first) and torch.equal(found[1], second) and bool((room == 0xFF).all())
    assert right == (kind is Lender)


@pytest.mark.gpu
def test_a_graph_of_launches_takes_no_lent_memory() -> None:
    lender, static = Lender(), torch.ones(64, 64, device="cuda", requires_grad=True)
    lender.open([torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")], [])
    with lender.activations(64):
        (static * 2).exp().sum().backward()
        before, lender.held = lender.held, 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (static * 2).exp()
    assert before > 0
    assert lender.held == 0


@pytest.mark.gpu
def test_memory_goes_down_by_what_is_lent() -> None:
    """What is saved first, and needed last, is out of PyTorch's memory at the peak."""
    size = 4 << 20

    def peak(lent: int) -> int:
        lender = Lender()
        lender.open([torch.empty(lent, dtype=torch.uint8, device="cuda")] if lent else [], [])
        x = torch.ones(size // 4, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with lender.activations(1024):
            y = x
            for _ in range(8):
                y = (y * 2).sin()
        y.sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(0) - peak(3 * size) >= 2 * size


@pytest.mark.parametrize("broken", [View, LeftThere, ForgetsOwners, ForgetsStorages])
def test_broken_lending_is_caught(broken: type[Lender]) -> None:
    def hunt() -> None:
        for kind in range(3):
            backward(broken, kind, kind, (100_000,), late=True)

    with pytest.raises((Wrong, ProtocolError)):
        hunt()


@pytest.mark.parametrize("kind", [Lender, ForgetsVersions, ForgetsPlaces])
def test_bytes_that_two_operations_save_are_there_once(kind: type[Lender]) -> None:
    """Also as a view of another shape and type; changed in place, or another half, they are others."""
    lender, _ = open_lender(100_000, kind=kind)
    x = torch.randn(32, 32)
    views = (x, x.view(4, 256).t(), x.view(torch.int32))
    expected = [view.clone() for view in views]
    saved = [lender._pack(64, view) for view in views]
    assert lender.held == 4096
    right = True
    for one, as_saved, view in zip(saved, expected, views, strict=True):
        out = lender._unpack(one)
        assert torch.equal(out, as_saved)
        assert (out.dtype, out.stride()) == (view.dtype, view.stride())
    halves = [lender._pack(64, half) for half in x.split(16)]
    right &= torch.equal(torch.cat([lender._unpack(half) for half in halves]), x)
    x.add_(1)
    right &= torch.equal(lender._unpack(lender._pack(64, x)), expected[0] + 1)
    assert torch.equal(lender._unpack(saved[0]), expected[0])
    assert right == (kind is Lender)
    if kind is Lender:
        del saved, halves, one
        lender._take_in()
        assert lender._gaps.free == 100_000
        assert not lender._left()


@pytest.mark.parametrize("kind", [Lender, Finalized])
def test_what_is_dying_is_not_found_again(kind: type[Lender]) -> None:
    """While the last reference goes away, somebody else saves the same bytes."""
    lender, _ = open_lender(4096, 4096, kind=kind)
    x, found = torch.randn(32, 32), []
    saved: Any = lender._pack(64, x)
    if isinstance(lender, Finalized):
        lender.meanwhile = lambda: found.append(lender._pack(64, x))
    else:
        watch = weakref.ref(saved.activation, lambda _: found.append(lender._pack(64, x)))
        assert watch() is not None
    del saved
    others = [lender._pack(64, torch.randn(32, 32)) for _ in range(2)]
    [again] = found
    assert torch.equal(lender._unpack(again), x) == (kind is Lender)
    del others


def test_what_does_not_fit_is_moved_in_part() -> None:
    """The rest is in memory of its own; parts that are too small are not worth it."""
    lender, _ = open_lender(1000, 2000)
    x = torch.randn(32, 32)
    saved, other = lender._pack(64, x), lender._pack(64, torch.randn(32, 32))
    assert saved.activation is not None
    assert saved.activation.rest is not None
    assert saved.activation.rest.nbytes == 4096 - 3000
    assert lender.held == 3000
    assert other.activation is None
    kept = weakref.ref(saved.activation.rest)
    assert torch.equal(lender._unpack(saved), x)
    lender.take_back()
    assert kept() is None
    assert torch.equal(lender._unpack(saved), x)


def test_a_copy_that_fails_leaves_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lender, _ = open_lender(1000)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lender, "_pairs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lender._pack(64, torch.randn(8, 8))
    assert lender._gaps.free == 1000
    assert not lender._left()


def test_where_there_is_no_memory_for_a_rest_a_tensor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    lender, _ = open_lender(1000)
    x = torch.randn(32, 32)

    def empty(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        saved = lender._pack(64, x)
    assert (saved.activation, lender.held, lender._gaps.free) == (None, 0, 1000)
    assert lender._unpack(saved).data_ptr() == x.data_ptr()


def open_lender(*sizes: int, kind: type[Lender] = Lender) -> tuple[Lender, list[torch.Tensor]]:
    lender, room = kind(), [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    lender.open(room, [])
    return lender, room


def test_room_comes_back_when_a_graph_is_gone() -> None:
    lender, _ = open_lender(4096)
    for _ in range(3):
        with lender.activations(64):
            x = torch.randn(32, 32, requires_grad=True)
            y = (x * 2).sin()
            assert lender.held == 4096
            z = (x * 3).sin()
        (y + z).sum().backward()
        del y, z
    assert not lender.moved


def test_the_original_is_freed() -> None:
    """Or lending would gain nothing; where there is no room for a part that is worth it, it lives on in the
    graph."""
    for size, freed in ((16_384, True), (100, True), (60, False)):
        lender, _ = open_lender(size)
        array = np.ones((64, 64), np.float32)
        original, w = weakref.ref(array), torch.ones(64, 64, requires_grad=True)
        with lender.activations(64):
            product = torch.from_numpy(array) * w
        del array
        gc.collect()
        assert (original() is None) == freed
        product.sum().backward()
        assert w.grad is not None
        assert torch.equal(w.grad, torch.ones(64, 64))


def test_a_graph_that_is_dropped_gives_its_room_back() -> None:
    lender, _ = open_lender(4096)
    with lender.activations(64):
        for _ in range(5):
            y = (torch.randn(32, 32, requires_grad=True) * 2).exp()
            del y
            gc.collect()
        (torch.randn(32, 32, requires_grad=True) * 2).exp().sum().backward()
    assert lender.take_back()
    assert not lender.moved, "a result that an operation saves of itself was kept alive"


@pytest.mark.parametrize("kind", [Lender, IgnoresVersions])
@pytest.mark.parametrize("room", [0, 4096])
def test_changes_in_place_are_noticed_or_do_no_harm(kind: type[Lender], room: int) -> None:
    """Autograd does not look at versions where hooks are at work."""
    lender, _ = open_lender(room, kind=kind)
    a = torch.ones(32, 32, requires_grad=True)
    with lender.activations(64):
        b = a * 2
        c = b.sin()
        b.add_(1)
    if room:
        c.sum().backward()
        assert a.grad is not None
        assert torch.equal(a.grad, 2 * torch.full((32, 32), 2.0).cos())
    elif kind is Lender:
        with pytest.raises(RuntimeError, match="modified by an in-place operation"):
            c.sum().backward()
    else:
        c.sum().backward()
        assert a.grad is not None
        assert not torch.equal(a.grad, 2 * torch.full((32, 32), 2.0).cos()), "the mutant does no harm"


def test_second_derivatives() -> None:
    lender, room = open_lender(100_000)
    found = []
    for hooks in (nullcontext(), lender.activations(64)):
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).requires_grad_()
        with hooks:
            y = (x.sin() * x.exp()).sum()
            [first] = torch.autograd.grad(y, x, create_graph=True)
        lender.take_back()
        room[0].fill_(0xFF)
        [second] = torch.autograd.grad(first.sum(), x)
        found.append(second)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(lambda: torch.nn.Parameter(torch.randn(64, 64)), id="a parameter"),
        pytest.param(lambda: torch.nn.Parameter(torch.randn(64, 64)).t(), id="a view of one"),
        pytest.param(lambda: torch.randn(64, 128)[:, ::2], id="gaps"),
        pytest.param(lambda: torch.randn(1, 64).expand(64, 64), id="repeated"),
        pytest.param(lambda: torch.randn(64, 64, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(lambda: torch.randn(64, 64).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.randn(3, 5), id="small"),
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.randn(64, 64), 0.1, 0, torch.qint8), id="quantized"
        ),
        pytest.param(lambda: torch.empty(0, 64), id="empty"),
        pytest.param(lambda: torch.empty(64, 64, device="meta"), id="elsewhere"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_left_where_it_is(tensor: Callable[[], torch.Tensor]) -> None:
    lender, _ = open_lender(100_000)
    kept = tensor()
    one = lender._pack(64, kept)
    assert (lender.held, one.activation) == (0, None)
    assert lender._unpack(one).shape == kept.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_where_they_are() -> None:
    """Their layout may be called strided, but they have no strides."""
    lender, _ = open_lender(100_000)
    x = torch.nested.nested_tensor([torch.ones(9, 8), torch.ones(5, 8)], requires_grad=True)
    with lender.activations(64):
        (x * x).to_padded_tensor(0).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.to_padded_tensor(0)[0], torch.full((9, 8), 2.0))
    assert lender.held == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(64, 64),
        torch.randn(64, 64).t(),
        torch.randn(2, 8, 8, 8).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 64, 64)[1:3],
        torch.randn(1, 64, 64).bfloat16(),
        torch.randint(0, 9, (64, 64)),
        torch.rand(64, 64) < 0.5,
        (torch.arange(4096) % 251).to(torch.uint8),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.stride())}",
)
def test_forms_come_back(tensor: torch.Tensor) -> None:
    lender, room = open_lender(2000, 1000, 50_000)
    one = lender._pack(64, tensor)
    assert one.activation is not None
    assert len(one.activation.pieces) > 1
    for turn in range(2):
        out = lender._unpack(one)
        assert torch.equal(out, tensor)
        assert (out.dtype, out.stride()) == (tensor.dtype, tensor.stride())
        for line in room:
            assert not line.data_ptr() <= out.data_ptr() < line.data_ptr() + line.numel()
        if turn == 0:
            lender.take_back()
    assert lender.moved == 1


def test_what_is_in_retained_memory_is_not_moved() -> None:
    lender, tensor = Lender(), torch.randn(64, 64)
    lender.open([torch.zeros(100_000, dtype=torch.uint8)], [(tensor.data_ptr(), tensor.data_ptr() + 1)])
    assert lender._pack(64, tensor).tensor is not None
    assert lender._pack(64, tensor[1:]).tensor is None


def test_what_outlives_the_iteration_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    lender = Lender()
    with caplog.at_level(logging.WARNING, "leto_rmu"):
        for _ in range(2):
            lender.open([torch.zeros(100_000, dtype=torch.uint8)], [])
            one = lender._pack(64, torch.ones(64, 64))
            lender.take_back()
            assert torch.equal(lender._unpack(one), torch.ones(64, 64))
    assert lender.moved == 2
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "1 saved tensors are needed beyond the update (retain_graph, or a loss that is kept?)"
    ]


def test_an_iteration_that_was_given_up() -> None:
    lender, _ = open_lender(100_000)
    x = torch.ones(64, 64)
    one = lender._pack(64, x)
    lender.abandon()
    with pytest.raises(ProtocolError, match="forward pass included"):
        lender._unpack(one)
    lender.open([torch.zeros(100_000, dtype=torch.uint8)], [])
    assert torch.equal(lender._unpack(lender._pack(64, x)), x)  # the same bytes, saved anew
    with pytest.raises(ProtocolError, match="lent already"):
        lender.open([], [])
    del one  # of an earlier round: its room is not the new round's
    other = lender._pack(64, torch.ones(64, 64))
    assert lender._gaps.free == 100_000 - 16_384
    assert lender._unpack(other).sum() == 4096


def test_threads_that_come_and_go() -> None:
    """Forward and backward passes in four threads, while a fifth one takes back and lends again."""
    lender, room = open_lender(6000, 3000)
    failures: list[str] = []

    def train(seed: int) -> None:
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
        expected, found = weights_of(seed), weights_of(seed)
        network(x, expected, 0).backward()
        for _ in range(30):
            with lender.activations(64):
                loss = network(x, found, 0)
            loss.backward()
            for a, b in zip(expected, found, strict=True):
                if a.grad is None or b.grad is None or not torch.equal(a.grad, b.grad):
                    failures.append(f"seed {seed}")
                b.grad = None

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        lender.take_back()
        for line in room:
            line.fill_(0xFF)
        lender.open(room, [])
    for thread in threads:
        thread.join(60)
    assert not failures


# --- the updater ------------------------------------------------------------------------------------------
def slots(**more: Any) -> World:
    segments = (Segment("a", 170, 1, 0), Segment("b", 150, 0, 170))
    return World(
        scheme="slots",
        pool=Pool(data_pages=17),
        segments=segments,
        grad_numel=320,
        chunk_pages=6,
        **more,
    )


def padded(**more: Any) -> World:
    """Chunks stay in place; the last one is half empty."""
    segments = (Segment("a", 170, 1, 0), Segment("b", 150, 0, 170))
    return World(pool=Pool(data_pages=17), segments=segments, grad_numel=320, chunk_pages=12, **more)


def device(where: str = "cpu", **more: Any) -> World:
    segments = (Segment("a", 2600, 0, 3, 0), Segment("b", 377, 1, 4003, 4001), Segment("c", 1300, 0, 4390))
    pool = Pool(page_bytes=512, data_pages=64, tier1_pages=16, tier2_pages=1)
    return OneLaunchWorld(
        where, segments=segments, grad_numel=8000, model_bytes=9000, pool=pool, scheme="slots", **more
    )


WORLDS: dict[str, Callable[..., World]] = {
    "undo": World,
    "undo, padded": padded,
    "slots": slots,
    "recompute": lambda **more: World(gradients="recompute", **more),
    "device, slots": device,
    "device, undo": lambda **more: DeviceWorld("cpu", pool=Pool(), **more),
    "GPU, slots": partial(device, "cuda"),
    "GPU, undo": lambda **more: DeviceWorld("cuda", pool=Pool(), **more),
}
NAMES = [pytest.param(name, marks=[pytest.mark.gpu] * name.startswith("GPU")) for name in WORLDS]


def scribble(up: Any, rng: np.random.Generator) -> None:
    """What activations may leave in lent memory: anything."""
    for line in up.memory.idle(up._rotation):
        line.copy_(torch.from_numpy(rng.integers(0, 256, line.numel(), np.uint8)))


@pytest.mark.parametrize("name", NAMES)
def test_a_crash_while_memory_is_lent(name: str) -> None:
    """Every loss that is survived otherwise is survived with anything in lent memory, at every rotation."""
    world = WORLDS[name]()
    memory, up = world.start()
    idle = (("idle", 0, 0),) * world.plan.groups
    for t in range(6):
        up.compute_begins()
        rng = np.random.default_rng(t)
        scribble(up, rng)
        point = Point(f"lent at {t}", memory.snapshot(), [Truth("COMPUTE", t, idle)])
        for kind, losses in loss_patterns(world, rng, point.truths[0]).items():
            outcome = examine(world, memory, point, losses, seed=t, go_on=int(kind == "none"))
            assert kind != "none" or outcome.action is not None
        memory.restore(point.state)
        up = world.updater(memory)
        up.recover(decide_alone(up))
        world.train(up, t + 1)


def decide_alone(up: Any) -> bytes:
    import leto_rmu

    return leto_rmu.decide([up.summary()])


@pytest.mark.parametrize("name", ["slots", "undo", "device, slots"])
def test_memory_that_is_in_use_is_no_idle_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same hunt with one slot, or tier-1 parity, too much: it is caught."""

    def too_much(self: RankMemory, rotation: Rotation) -> list[torch.Tensor]:
        slot = self.plan.geometry.slot(0, rotation)
        return [torch.from_numpy(np.asarray(run)).view(-1) for run in self.slot_runs(slot)]

    monkeypatch.setattr(RankMemory, "idle", too_much)
    with pytest.raises(Wrong):
        test_a_crash_while_memory_is_lent(name)


class LooksAtPadding(RankMemory):
    """Broken: padding takes part in repairs as if it were zero."""

    def group_pages(self, group: int, rotation: Rotation) -> list[Any]:
        return self._at("arena", self.plan.geometry.group_pages(group, rotation))


class Scribbled(ResumableUpdater):
    """Everything that is idle was lent, and written by activations."""

    def _take_back(self) -> bool:
        with self.lending(1):
            scribble(self, np.random.default_rng(self.iteration))
        return super()._take_back()


class RecoversWithPadding(ResumableUpdater):
    """Broken: a recovery leaves padding as it was found."""

    def clear_padding(self) -> Iterator[Op]:
        yield from () if not self._ready else super().clear_padding()


class StepsWithPadding(Scribbled):
    """Broken: an update leaves padding as activations have left it."""

    def clear_padding(self) -> Iterator[Op]:
        yield from () if self._ready else super().clear_padding()


@pytest.mark.parametrize("name", ["undo, padded", "slots"])
@pytest.mark.parametrize("broken", ["views", "recovery", "step"])
def test_broken_padding_is_caught(name: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"recovery": RecoversWithPadding, "step": StepsWithPadding}.get(broken, ResumableUpdater)
    monkeypatch.setitem(WORLDS, name, partial(WORLDS[name], updater=kind))
    if broken == "views":
        monkeypatch.setattr(ResumableUpdater, "views", LooksAtPadding)
    hunt = test_every_crash_point_of_an_update_after_lending if broken == "step" else None
    with pytest.raises(Wrong):
        (hunt or test_a_crash_while_memory_is_lent)(name)


@pytest.mark.parametrize("name", ["undo, padded", "slots"])
def test_every_crash_point_of_an_update_after_lending(name: str) -> None:
    """From an iteration in which all that is idle was written, the first operation clears padding again."""
    world = WORLDS[name](**({"updater": Scribbled} if not isinstance(WORLDS[name], partial) else {}))
    memory, tally = world.start()[0], Counter[Action | None]()
    points = record_iteration(world, seed=11, tears=1, before=2)
    assert any("op 1: fill" in point.label for point in points)

    def losses(point: Point, k: int) -> Any:
        return loss_patterns(world, np.random.default_rng([11, k]), point.truths[0])

    for _, outcome in examine_all(world, memory, points, losses, share=3):
        tally[outcome.action] += 1
    assert tally[Action.FINISH] > tally[Action.RESTART] > 0


def job(up: Any, world: World, t: int, lend: bool) -> float:
    """An iteration whose gradients come from a network, in lent memory or not."""
    up.compute_begins()
    where = str(up.grads.device)
    weights = weights_of(t, device=where)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(t)).to(where)
    with up.lending(64) if lend else nullcontext():
        loss = network(x, weights, t % 3)
        assert not lend or up.lender.held > 0
    kept = network(x, weights, 0) if not lend else None
    if lend:
        with up.lending(64):  # a second forward pass, whose backward pass comes after the update
            kept = network(x, weights, 0)
    loss.backward()
    gradient = torch.cat([w.grad.view(-1) for w in weights if w.grad is not None])
    up.grads.copy_(gradient.repeat(-(-up.grads.numel() // gradient.numel()))[: up.grads.numel()])
    up.step(world.hypers(t), world.job(t + 1), lambda: world.sync(t))
    assert up.lender.lent == 0
    for w in weights:
        w.grad = None
    assert kept is not None
    kept.backward()
    return float(sum(float(w.grad.sum()) for w in weights if w.grad is not None))


@pytest.mark.parametrize("name", NAMES)
def test_training_with_lent_memory_is_the_same(name: str) -> None:
    found = []
    for lend in (False, True):
        world = WORLDS[name]()
        _, up = world.start()
        sums = [job(up, world, t, lend) for t in range(5)]
        state = [up.read(s.name, plane) for s in world.plan.segments for plane in world.plan.plane_names]
        found.append((sums, state))
    (sums, state), (lent_sums, lent_state) = found
    assert sums == lent_sums
    assert all(torch.equal(a, b) for a, b in zip(state, lent_state, strict=True))


def test_nothing_is_lent_outside_of_compute() -> None:
    world = slots()
    memory, up = world.start()
    x = torch.randn(32, 32, requires_grad=True)

    def pass_() -> None:
        with up.lending(64):
            (x * 2).exp().sum().backward()

    pass_()
    assert up.lender.held == 0
    up.compute_begins()
    with up.lending(64):
        kept = (x * 2).exp()
        assert up.lender.held > 0
        held = up.lender.held
        up.grads.copy_(world.gradient(0))
        up.step(world.hypers(0), world.job(1), lambda: world.sync(0))
        up.lender.held = 0
        (x * 3).exp().sum().backward()  # hooks are still at work, but the update has taken memory back
        assert up.lender.held == 0
    kept.sum().backward()
    assert up.lender.moved == 1
    assert held <= sum(line.numel() for line in up.memory.idle(up._rotation))
    up.compute_begins()
    with up.lending(64):
        lost = (x * 2).exp()
    assert isinstance(memory, LabMemory)
    up.recover(decide_alone(up))
    with pytest.raises(ProtocolError, match="forward pass included"):
        lost.sum().backward()


@pytest.mark.parametrize("name", ["undo, padded", "slots", "device, slots"])
def test_a_look_at_what_could_be_recovered_leaves_lent_memory_alone(name: str) -> None:
    world = WORLDS[name]()
    memory, up = world.start()
    up.compute_begins()
    x = torch.randn(64, 64, requires_grad=True)
    with up.lending(64):
        kept = (x * 2).exp() if up.lender.lent > x.nbytes else (x[:4, :4] * 2).exp()
    assert up.lender.held > 0
    scribble_padding(up)
    up.summary()
    kept.sum().backward()
    up.grads.copy_(world.gradient(0))
    up.step(world.hypers(0), world.job(1), lambda: world.sync(0))
    world.check(memory, up)


def scribble_padding(up: Any) -> None:
    for run in up.memory.padding(up._rotation):
        arrays.flat(run, torch.uint8).fill_(0xAB)


def test_a_step_without_memory_to_move_to_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.OutOfMemoryError where an activation is moved out; then there is memory, and all is exact."""
    world = slots()
    memory, up = world.start()
    x = torch.full((8, 8), 0.5, requires_grad=True)
    up.compute_begins()
    with up.lending(64):
        kept = [(x * k).exp() for k in range(3)]
    up.grads.copy_(world.gradient(0))
    real, left = torch.empty_strided, [1]
    marker = memory.regions["marker"].pages
    before = marker.copy()

    def empty_strided(*args: Any, **more: Any) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError("no memory")
        left.pop()
        return real(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", empty_strided)
        with pytest.raises(torch.OutOfMemoryError):
            up.step(world.hypers(0), world.job(1), lambda: world.sync(0))
    assert np.array_equal(marker, before), "the update has begun"
    up.step(world.hypers(0), world.job(1), lambda: world.sync(0))
    world.check(memory, up)
    sum(kept, torch.zeros(8, 8)).sum().backward()
    assert x.grad is not None
    expected = sum((k * (x.detach() * k).exp() for k in range(3)), torch.zeros(8, 8))
    assert torch.allclose(x.grad, expected)


def test_a_bad_size_is_refused() -> None:
    _, up = slots().start()
    for bad in (0, -1, 1.5, "abc", None):  # outside of compute too
        with pytest.raises(ValueError, match=r"whole number of at least 1, found "):
            up.lending(bad)


def test_muon_lends_too() -> None:
    """A layer-wise optimizer: the free slot is another place in every iteration."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon from 2.9 on")
    world = World(optimizer=Muon(), segments=(Segment("a", 120, 0, 0, shape=(12, 10)),), scheme="slots")
    memory, up = world.start()
    assert isinstance(memory, ArrayMemory)
    places = set()
    for t in range(3):
        places.add(up.memory.idle(up._rotation)[-1].data_ptr())
        world.train(up, t + 1)
    assert len(places) > 1
