"""The GPUs of a node, as its agent sees them: which there are, do they answer, is their memory free again?

Role: the cuda side of `leto_shadow.devices`. The agent owns no CUDA context, and calls no driver itself: a
watch process (`leto_shadow.gpu_watch`) does, every question has a deadline, and a watch that misses it is
killed. Paper sections 2.2 (operability) and 3.4; cases 4 and 18.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from leto_shadow import linux
from leto_shadow.gpu_watch import Answer, Listing
from leto_shadow.nvml import Gpu, Look, Memory
from leto_shadow.operability import DeviceFacts

__all__ = ["CudaDevice", "Watch", "WatchError", "chosen", "list_gpus", "usable_gpus", "visible"]

_ANSWER_S = 2.0
_START_S = 20.0
_RESTART_S = 5.0
_PAUSE_MS = 5
_RECHECK_S = 20.0
_RECENT_S = 2.0  # for so long what a look found of free memory may be the first of two readings

WATCH_COMMAND = (sys.executable, "-P", "-m", "leto_shadow.gpu_watch")


class WatchError(RuntimeError):
    """The watch process did not answer in time, or the driver refused an answer."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


def list_gpus(timeout_s: float = _START_S) -> tuple[Gpu, ...]:
    """Return this machine's GPUs; `WatchError` says why there are none, also when the driver hangs."""
    command = [sys.executable, "-P", "-m", "leto_shadow.gpu_watch", "--list"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=True
        )
        listing = msgspec.json.decode(done.stdout, type=Listing)
    except subprocess.TimeoutExpired:
        raise WatchError(f"the driver has not listed its devices within {timeout_s:g} s") from None
    except (subprocess.CalledProcessError, msgspec.DecodeError) as error:
        raise WatchError(f"the devices cannot be listed: {error}") from error
    if listing.error:
        raise WatchError(listing.error)
    return listing.gpus


def visible(found: int, environ: Mapping[str, str]) -> int:
    """How many of ``found`` devices CUDA_VISIBLE_DEVICES leaves to this job."""
    words = environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return found
    count = 0
    for word in words.split(","):
        text = word.strip()
        if not text or text.startswith("-") or (text.isdecimal() and int(text) >= found):
            break  # CUDA stops at the first one that it does not know
        count += 1
    return min(count, found)


def chosen(found: Sequence[Gpu], environ: Mapping[str, str], local_ranks: int) -> tuple[str, ...]:
    """UUIDs of the devices that so many ranks will have, as far as it can be told without CUDA.

    CUDA_VISIBLE_DEVICES names them, or gives numbers in the order of the PCI bus, which is NVML's; where the
    GPUs of a node are not alike, CUDA counts in it only with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    words = environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return tuple(one.uuid for one in found[:local_ranks])
    uuids = []
    for word in (part.strip() for part in words.split(",")):
        if word.isdecimal() and int(word) < len(found):
            uuids.append(found[int(word)].uuid)
        elif named := [one.uuid for one in found if word and one.uuid.startswith(word)]:
            uuids.append(named[0])
        else:
            break  # as in `visible`; a MIG slice, which is not supported
    return tuple(uuids[:local_ranks])


def usable_gpus(local_ranks: int) -> tuple[Gpu, ...]:
    """Return the machine's GPUs if so many ranks can have one each. Raises WatchError with the reason."""
    found = list_gpus()
    seen = visible(len(found), os.environ)
    if seen < local_ranks:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        limited = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown})"
        raise WatchError(
            f"{local_ranks} ranks on this node need a GPU each, {seen} of {len(found)} may be used{limited}: "
            "lower --nproc-per-node"
        )
    return found


class Watch:
    """One watch process, started when it is first asked and again after it had to be killed."""

    def __init__(self, command: tuple[str, ...] = WATCH_COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        """The process, None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self, timeout_s: float = _START_S) -> None:
        """Start it now, so that the first question is answered at once. Raises WatchError."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                linux.dying_with_us([*self._command, str(theirs.fileno())]),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._socket, self._unread = ours, b""
        (answer,) = self._read(time.monotonic() + timeout_s, 1)
        if answer.error:
            self.end()
            raise WatchError(answer.error)

    def look(self, uuid: str, timeout_s: float = _ANSWER_S) -> Look:
        """Ask one device. Raises WatchError; after a missed deadline the process is killed."""
        (answer,) = self.ask("look", [uuid], timeout_s)
        if answer.look is None:
            raise WatchError(answer.error)
        return answer.look

    def ask(
        self, what: Literal["look", "memory"], uuids: Sequence[str], timeout_s: float = _ANSWER_S
    ) -> tuple[Answer, ...]:
        """Ask devices side by side; return what each of them said.

        Raises WatchError when the watch does not answer: then its process is gone, and nobody knows which of
        several devices it waited for.
        """
        if self._socket is None:
            self.start(_RESTART_S)
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.sendall(" ".join((what, *uuids)).encode() + b"\n")
        except OSError:
            self.end()
            raise WatchError("the watch process ended") from None
        return self._read(deadline, len(uuids))

    def _read(self, deadline: float, count: int) -> tuple[Answer, ...]:
        assert self._socket is not None
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._socket], [], [], left_s)[0]:
                self.end()
                raise WatchError("the driver did not answer in time", timed_out=True)
            data = self._socket.recv(1 << 16)
            if not data:
                self.end()
                raise WatchError("the watch process ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answers = msgspec.json.decode(line, type=tuple[Answer, ...])
        if len(answers) != count:
            self.end()
            raise WatchError(f"the watch process gave {len(answers)} answers to {count} questions")
        return answers

    def end(self) -> None:
        """Kill it, reap it, close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _more(now: int | None, before: int | None) -> int | None:
    """By how much a counter has grown; one that the driver's reload set back starts from nothing."""
    if now is None:
        return None
    return now - before if before is not None and now >= before else now


class CudaDevice:
    """The GPU of each local rank. ``pause`` waits between two looks; tests replace it."""

    def __init__(
        self,
        watch: Watch,
        pause: Callable[[], object] | None = None,
        look_command: Sequence[str] = WATCH_COMMAND,
        mine: Sequence[str] = (),
    ) -> None:
        """``mine``: UUIDs of the devices that the node's ranks will have."""
        self._mine = tuple(mine)
        self._look_command = look_command
        self._watch = watch
        self._uuids: dict[int, str] = {}
        self._before: dict[str, Look] = {}
        self._dead: defaultdict[int, set[int]] = defaultdict(set)
        self._readings: dict[int, tuple[int, float]] = {}
        self._recheck: _Recheck | None = None
        self._pause = pause or (lambda: select.select([], [], [], _PAUSE_MS / 1000))

    @property
    def pids(self) -> set[int]:
        """Processes of this device's own: the watch, and one that looks anew."""
        own = (self._watch.pid, None if self._recheck is None else self._recheck.pid)
        return {pid for pid in own if pid is not None}

    def use(self, rank: int, uuid: str) -> None:
        """The rank's pages are on this device from now on."""
        self._uuids[rank] = uuid
        try:
            self._before[uuid] = self._watch.look(uuid)
        except WatchError:
            self._before.pop(uuid, None)

    def facts(self, rank: int) -> DeviceFacts | None:
        """What is to be seen of the rank's device since `use`."""
        return self.facts_of([rank])[rank]

    def facts_of(self, ranks: Collection[int]) -> dict[int, DeviceFacts | None]:
        """The same of several ranks, whose devices are asked side by side."""
        uuids = {rank: self._uuids[rank] for rank in ranks if rank in self._uuids}
        found: dict[int, DeviceFacts | None] = dict.fromkeys(ranks)  # no manager has been on some of them yet
        for (rank, uuid), answer in zip(uuids.items(), self._ask("look", uuids.values()), strict=True):
            if isinstance(answer, WatchError):
                found[rank] = DeviceFacts(uuid, answers=False, timed_out=answer.timed_out, error=str(answer))
                continue
            assert answer.look is not None
            found[rank] = self._facts(uuid, answer.look)
            if self._dead[rank]:
                self._readings[rank] = answer.look.free_bytes, time.monotonic()
        return found

    def _ask(self, what: Literal["look", "memory"], uuids: Iterable[str]) -> list[Answer | WatchError]:
        """Ask devices; an error for each of which nothing is known.

        If the watch does not answer, each is asked by itself: one device that hangs says nothing of the rest.
        """
        asked = list(uuids)
        if not asked:
            return []
        try:
            answers = self._watch.ask(what, asked)
        except WatchError as error:
            return [error] if len(asked) == 1 else [self._ask(what, [uuid])[0] for uuid in asked]
        return [WatchError(answer.error) if answer.error else answer for answer in answers]

    def _facts(self, uuid: str, look: Look) -> DeviceFacts:
        before = self._before.get(uuid)
        # A watch that was started again has heard only what came since.
        heard = 0 if before is None or look.xids[: len(before.xids)] != before.xids else len(before.xids)
        return DeviceFacts(
            uuid,
            xids=look.xids[heard:],
            ecc_corrected=_more(look.ecc_corrected, None if before is None else before.ecc_corrected),
            ecc_uncorrected=_more(look.ecc_uncorrected, None if before is None else before.ecc_uncorrected),
            remap_pending=look.remap_pending,
            remap_failed=look.remap_failed,
            retirement_pending=look.retirement_pending,
            recovery=look.recovery,
        )

    def recheck(self) -> Callable[[], tuple[DeviceFacts, ...] | None]:
        """A process of its own looks, because a sick driver takes its time; the watch is ended, because a GPU
        that is held by anybody cannot be reset."""
        self._watch.end()
        self._before.clear()
        return self._look_apart(sorted(set(self._uuids.values()) or self._mine))

    def survey(self) -> Callable[[], tuple[DeviceFacts, ...] | None]:
        """A process of its own looks: the watch may be busy, and must not be killed for that."""
        return self._look_apart(self._mine)

    def _look_apart(self, uuids: Sequence[str]) -> Callable[[], tuple[DeviceFacts, ...] | None]:
        """In a process of its own; the one before, if there is one, is given up."""
        if self._recheck is not None:
            self._recheck.close()
        self._recheck = _Recheck(uuids, self._look_command)
        return self._recheck.poll

    def ended(self, rank: int, pid: int) -> None:
        """A trainer of the rank has ended; its memory may not be free yet."""
        self._dead[rank].add(pid)
        self._readings.pop(rank, None)  # it was there still

    def wait_for_free_memory(
        self, ranks: Collection[int], timeout_s: float
    ) -> Iterator[tuple[int, dict[str, float] | OSError]]:
        """Yield each rank once no dead trainer holds memory of its device and free memory has settled.

        With it what was measured: seconds waited, bytes free. Or why not: TimeoutError past the bound,
        another OSError when the device does not answer. Free memory has settled when it has not grown from
        one reading to the next; the look after a trainer's end was the first one.
        """
        started = time.monotonic()
        waiting: dict[int, str] = {}
        for rank in ranks:
            if (uuid := self._uuids.get(rank)) is None:
                yield rank, {}
            else:
                waiting[rank] = uuid
            if started - self._readings.get(rank, (0, started))[1] > _RECENT_S:
                del self._readings[rank]
        while waiting:
            answers = self._ask("memory", waiting.values())
            waited_s = time.monotonic() - started
            for rank, answer in zip(list(waiting), answers, strict=True):
                found: dict[str, float] | OSError | None
                if isinstance(answer, WatchError):
                    found = OSError(f"free memory of {waiting[rank]} cannot be measured: {answer}")
                else:
                    assert answer.memory is not None
                    found = self._settled(rank, waiting[rank], answer.memory, waited_s, timeout_s)
                if found is not None:
                    self._readings.pop(rank, None)
                    del waiting[rank]
                    yield rank, found
            if waiting:
                self._pause()

    def _settled(
        self, rank: int, uuid: str, memory: Memory, waited_s: float, timeout_s: float
    ) -> dict[str, float] | TimeoutError | None:
        """Take one more reading; None: not yet."""
        held = self._dead[rank] & set(memory.processes or ())
        before, free = self._readings.get(rank), memory.free_bytes
        self._readings[rank] = free, time.monotonic()
        if not held and before is not None and free <= before[0]:
            self._dead[rank].clear()
            return {"waited_s": waited_s, "free_bytes": float(free)}
        if waited_s <= timeout_s:
            return None
        who = f"processes {sorted(held)}, which have ended, hold some of it" if held else "it still grows"
        return TimeoutError(
            f"memory of {uuid} was not given back within {timeout_s:g} s: {who}; {free} bytes are free"
        )

    def footprint(self, rank: int, pid: int) -> dict[str, float]:
        """What the process holds of the rank's device and what is free there, in bytes; {}: nobody knows."""
        uuid = self._uuids.get(rank)
        if uuid is None:
            return {}
        try:
            look = self._watch.look(uuid)
        except WatchError:
            return {}
        measured = {"free_bytes": float(look.free_bytes)}
        if look.processes is not None and pid in look.processes:
            measured["bytes"] = float(look.processes[pid])
        return measured

    def close(self) -> None:
        """End the watch."""
        self._watch.end()
        if self._recheck is not None:
            self._recheck.close()


class _Recheck:
    """One process that looks at some devices once; killed if it takes too long, which is the finding then."""

    def __init__(self, uuids: Sequence[str], command: Sequence[str]) -> None:
        self._uuids = uuids
        self._deadline = time.monotonic() + _RECHECK_S
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            linux.dying_with_us([*command, "--look", *uuids]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # some hundred bytes a device, which the pipe takes
            start_new_session=True,
        )

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def poll(self) -> tuple[DeviceFacts, ...] | None:
        """Return what was seen, None while it is looking."""
        assert self._process is not None, "it has been read already"
        if self._process.poll() is None and time.monotonic() < self._deadline:
            return None
        late = self._process.poll() is None
        try:
            answers = msgspec.json.decode(self.close(), type=tuple[Answer, ...])
        except msgspec.DecodeError:
            answers = ()
        if len(answers) != len(self._uuids):
            error = "the driver did not answer in time" if late else "the devices cannot be looked at"
            answers = tuple(Answer(error=error) for _ in self._uuids)
        return tuple(
            DeviceFacts(uuid, answers=False, timed_out=late, error=answer.error)
            if answer.look is None
            else DeviceFacts(
                uuid,
                xids=answer.look.xids,
                remap_pending=answer.look.remap_pending,
                remap_failed=answer.look.remap_failed,
                retirement_pending=answer.look.retirement_pending,
                recovery=answer.look.recovery,
            )
            for uuid, answer in zip(self._uuids, answers, strict=True)
        )

    def close(self) -> bytes:
        """Kill it if it is there still; return what it said."""
        process, self._process = self._process, None
        if process is None:
            return b""
        process.kill()
        said, _ = process.communicate()
        return said
