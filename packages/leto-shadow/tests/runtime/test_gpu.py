"""What the agent asks of GPUs: who may have one, do they answer, is memory free; the driver is played."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import cli, gpu, gpu_watch
from leto_shadow.devices import HostDevice, check_backend, open_device
from leto_shadow.gpu import CudaDevice, Watch, WatchError, chosen, list_gpus, usable_gpus, visible
from leto_shadow.gpu_watch import Answer
from leto_shadow.nvml import Gpu, Look, Memory, Nvml, NvmlError
from leto_shadow.operability import XIDS, Class, DeviceFacts, class_of_xid, judge

UUID = "GPU-12345678-0000-0000-0000-000000000000"
GIB = 1 << 30
TWO = (Gpu(UUID, "A GPU", 80 * GIB), Gpu(UUID.replace("1", "2"), "A GPU", 80 * GIB))


class Played:
    """A watch that gives the answers of a list, the last one for ever, or of it what is asked for."""

    pid = None

    def __init__(self, *answers: Look | str) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def ask(self, what: str, uuids: Sequence[str]) -> tuple[Answer, ...]:
        assert list(uuids) == [UUID]
        self.asked.append(what)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            raise WatchError(answer)
        return (part(what, answer),)

    def look(self, uuid: str) -> Look:
        (answer,) = self.ask("look", [uuid])
        assert answer.look is not None
        return answer.look

    def end(self) -> None:
        self.answers = ["it was ended"]


def part(what: str, look: Look) -> Answer:
    return Answer(memory=Memory(look.free_bytes, look.processes)) if what == "memory" else Answer(look)


def freed(device: CudaDevice, rank: int = 0, timeout_s: float = 60.0) -> dict[str, float] | OSError:
    """What becomes of waiting for the memory of one rank."""
    ((found, measured),) = device.wait_for_free_memory([rank], timeout_s)
    assert found == rank
    return measured


def free_bytes(measured: dict[str, float] | OSError) -> float:
    assert isinstance(measured, dict)
    return measured["free_bytes"]


def device_of(*answers: Look | str) -> tuple[CudaDevice, Played]:
    """A device in use by rank 0; the answers come after that."""
    played = Played(Look(GIB, 2 * GIB, {}, (13,)), *answers)
    device = CudaDevice(played, pause=lambda: None)  # type: ignore[arg-type]
    device.use(0, UUID)
    return device, played


# --- is it operable? --------------------------------------------------------------------------------


def seen(device: CudaDevice) -> DeviceFacts:
    facts = device.facts(0)
    assert facts is not None
    return facts


@pytest.mark.parametrize("xids", [(13,), (13, 31), (13, 43, 45, 94), (13, 48, 63, 94)])
def test_a_programs_fault_leaves_the_device_operable(xids: tuple[int, ...]) -> None:
    device, _ = device_of(Look(GIB, 2 * GIB, {}, xids))
    assert seen(device).xids == xids[1:], "what was there before does not count"
    assert judge(seen(device)).operable


@pytest.mark.parametrize("xid", sorted(n for n in XIDS if class_of_xid(n) is Class.FF))
def test_a_fatal_xid_is_named(xid: int) -> None:
    device, _ = device_of(Look(GIB, 2 * GIB, {}, (13, 31, xid)))
    found = judge(seen(device))
    assert not found.operable
    assert found.reasons == (f"{UUID}: Xid {xid}: {XIDS[xid].name} ({XIDS[xid].action.value})",)


def test_an_xid_from_before_the_job_does_not_count() -> None:
    played = Played(Look(GIB, 2 * GIB, {}, (79,)))
    device = CudaDevice(played)  # type: ignore[arg-type]
    device.use(0, UUID)
    assert judge(seen(device)).operable


def test_a_watch_that_was_started_again_has_heard_only_what_is_new() -> None:
    device, _ = device_of(Look(GIB, 2 * GIB, {}, (79,)))
    assert seen(device).xids == (79,)


def test_ecc_errors_are_counted_since_the_device_is_used() -> None:
    played = Played(
        Look(GIB, 2 * GIB, {}, ecc_corrected=7, ecc_uncorrected=1),
        Look(GIB, 2 * GIB, {}, ecc_corrected=9, ecc_uncorrected=1),
        Look(GIB, 2 * GIB, {}, ecc_corrected=1, ecc_uncorrected=2),
    )
    device = CudaDevice(played)  # type: ignore[arg-type]
    device.use(0, UUID)
    facts = seen(device)
    assert (facts.ecc_corrected, facts.ecc_uncorrected) == (2, 0)
    facts = seen(device)
    assert (facts.ecc_corrected, facts.ecc_uncorrected) == (1, 1), "a counter that was set back starts anew"


def test_a_row_that_cannot_be_replaced_and_a_driver_that_does_not_answer() -> None:
    found = judge(seen(device_of(Look(GIB, 2 * GIB, {}, (13,), True))[0]))
    assert not found.operable
    assert "bad row" in found.reasons[0]
    silent = seen(device_of("the driver did not answer in time")[0])
    assert not judge(silent).operable
    assert "did not answer" in judge(silent).reasons[0]


def test_a_rank_without_a_manager_is_not_judged() -> None:
    device, played = device_of("nobody asks")
    assert device.facts(1) is None
    assert freed(device, 1) == {}
    assert device.footprint(1, 7) == {}
    assert played.asked == ["look"], "of rank 0, when its device was first used"


# --- is its memory free? (case 4) -------------------------------------------------------------------


def test_free_memory_is_waited_for_until_it_settles() -> None:
    growing = [Look(n * GIB, 80 * GIB, None) for n in (10, 30, 60, 60)]
    device, played = device_of(*growing)
    assert free_bytes(freed(device)) == 60 * GIB
    assert played.asked == ["look", *4 * ["memory"]], "the cheaper question"


def test_memory_of_the_dead_is_waited_for() -> None:
    held = Look(10 * GIB, 80 * GIB, {41: GIB, 42: GIB})
    device, _ = device_of(
        held, held, held, Look(70 * GIB, 80 * GIB, {42: GIB}), Look(70 * GIB, 80 * GIB, {42: GIB})
    )
    device.ended(0, 41)
    assert free_bytes(freed(device)) == 70 * GIB


def test_memory_that_is_not_given_back_is_an_error_with_names() -> None:
    device, _ = device_of(Look(10 * GIB, 80 * GIB, {41: GIB}))
    device.ended(0, 41)
    error = freed(device, timeout_s=0.0)
    assert isinstance(error, TimeoutError)
    assert "processes [41], which have ended, hold some of it" in str(error)


def test_memory_that_cannot_be_measured_is_an_error() -> None:
    device, _ = device_of("the watch process ended")
    error = freed(device)
    assert isinstance(error, OSError)
    assert "cannot be measured: the watch process ended" in str(error)


def look_at(free_gib: int, *pids: int) -> Look:
    return Look(free_gib * GIB, 80 * GIB, dict.fromkeys(pids, GIB))


def test_the_look_after_an_end_is_the_first_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_RECENT_S", PATIENT_S)
    device, played = device_of(look_at(70))
    device.ended(0, 41)
    device.facts(0)
    assert free_bytes(freed(device)) == 70 * GIB
    assert played.asked == ["look", "look", "memory"]
    assert free_bytes(freed(device)) == 70 * GIB
    assert played.asked[3:] == ["memory", "memory"], "the next wait begins anew"


@pytest.mark.parametrize("case", ["grows", "held", "before the end", "long ago", "nobody ended"])
def test_a_look_that_settles_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One equal reading is enough only if the first was taken after the end, and not long ago."""
    readings = [look_at(70)] * 3
    if case == "grows":
        readings = [look_at(60), look_at(70), look_at(70)]
    elif case == "held":
        readings = [look_at(70, 41), look_at(70, 41), look_at(70)]
    device, played = device_of(*readings)
    if case not in ("before the end", "nobody ended"):
        device.ended(0, 41)
    device.facts(0)
    if case == "before the end":
        device.ended(0, 41)
    if case == "long ago":
        monkeypatch.setattr(gpu, "_RECENT_S", -1.0)
    assert free_bytes(freed(device)) == 70 * GIB
    assert played.asked == ["look", "look", "memory", "memory"]


class Several:
    """A watch of several devices by their names, None where one is lost; questions to `hangs` end it."""

    pid = None

    def __init__(self, **answers: list[Look] | None) -> None:
        self.answers = answers
        self.hangs = ""
        self.asked: list[str] = []

    def look(self, uuid: str) -> Look:
        return look_at(0)

    def ask(self, what: str, uuids: Sequence[str]) -> tuple[Answer, ...]:
        self.asked.append(" ".join((what, *uuids)))
        if self.hangs in uuids:
            raise WatchError("the driver did not answer in time", timed_out=True)
        return tuple(self._answer(what, self.answers[uuid]) for uuid in uuids)

    def _answer(self, what: str, looks: list[Look] | None) -> Answer:
        if looks is None:
            return Answer(error="GPU is lost")
        return part(what, looks.pop(0) if len(looks) > 1 else looks[0])


def device_of_several(played: Several) -> CudaDevice:
    device = CudaDevice(played, pause=lambda: None)  # type: ignore[arg-type]
    for rank, uuid in enumerate(played.answers):
        device.use(rank, uuid)
    return device


def test_devices_are_asked_together_and_a_rank_goes_on_when_its_own_memory_is_free() -> None:
    played = Several(a=[look_at(10), look_at(20), look_at(20)], b=[look_at(9)], c=None)
    found = list(device_of_several(played).wait_for_free_memory([0, 1, 2, 3], 60.0))
    assert [rank for rank, _ in found] == [3, 2, 1, 0]
    assert played.asked == ["memory a b c", "memory a b", "memory a"]
    measured = dict(found)
    assert (free_bytes(measured[0]), free_bytes(measured[1])) == (20 * GIB, 9 * GIB)
    assert "GPU is lost" in str(measured[2])
    assert measured[3] == {}, "no manager has been on a device of this rank"


def test_a_device_that_hangs_says_nothing_of_the_others() -> None:
    played = Several(a=[look_at(10)], b=[look_at(9)])
    device = device_of_several(played)
    played.hangs = "b"
    facts = device.facts_of([0, 1, 2])
    assert played.asked == ["look a b", "look a", "look b"]
    assert facts == {
        0: DeviceFacts("a"),
        1: DeviceFacts("b", answers=False, timed_out=True, error="the driver did not answer in time"),
        2: None,
    }
    found = dict(device.wait_for_free_memory([0, 1], 60.0))
    assert free_bytes(found[0]) == 10 * GIB
    assert isinstance(found[1], OSError)


def test_the_footprint_of_a_process() -> None:
    device, _ = device_of(Look(10 * GIB, 80 * GIB, {41: 600 << 20}))
    assert device.footprint(0, 41) == {"bytes": float(600 << 20), "free_bytes": float(10 * GIB)}
    assert device.footprint(0, 40) == {"free_bytes": float(10 * GIB)}


# --- the watch process ------------------------------------------------------------------------------

PLAYER = """
import socket, sys, time
sock = socket.socket(fileno=int(sys.argv[-1]))
sock.sendall(b'[{"look":null,"error":"%s"}]\\n')
for line in sock.makefile("rb"):
    what, name = line.split()
    if name == b"hang":
        time.sleep(600)
    if name == b"die":
        sys.exit(1)
    one = b'{"look":{"free_bytes":5,"total_bytes":9,"processes":{"7":3}},"error":""}'
    sock.sendall(b"[" + (one + b"," if name == b"talks" else b"") + one + b"]\\n")
"""


PATIENT_S = 100.0


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(gpu, "_RESTART_S", PATIENT_S)
    script = tmp_path / "player.py"
    script.write_text(PLAYER % "")
    watch = Watch((sys.executable, str(script)))
    yield watch
    watch.end()


def gone(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], PATIENT_S)[0])
    finally:
        os.close(pidfd)


def test_a_watch_answers_and_ends(watch: Watch) -> None:
    assert watch.pid is None
    assert watch.look(UUID, PATIENT_S) == Look(5, 9, {7: 3})
    pid = watch.pid
    assert pid is not None
    watch.end()
    assert gone(pid)


def test_a_watch_that_hangs_is_killed_and_the_next_question_gets_another(watch: Watch) -> None:
    watch.start()
    pid = watch.pid
    with pytest.raises(WatchError, match="did not answer in time"):
        watch.look("hang", timeout_s=0.2)
    assert pid is not None
    assert gone(pid)
    assert watch.look(UUID, PATIENT_S).free_bytes == 5


def test_a_watch_that_dies_is_noticed(watch: Watch) -> None:
    with pytest.raises(WatchError, match="ended"):
        watch.look("die", PATIENT_S)
    assert watch.look(UUID, PATIENT_S).total_bytes == 9


def test_a_watch_that_answers_out_of_turn_is_ended(watch: Watch) -> None:
    with pytest.raises(WatchError, match="2 answers to 1 questions"):
        watch.look("talks", PATIENT_S)
    assert watch.pid is None


class PlayedNvml:
    """Devices that answer only when so many of them are asked at once."""

    def __init__(self, together: int) -> None:
        self.barrier = threading.Barrier(together)

    def listen(self) -> None:
        pass

    def look(self, uuid: str) -> Look:
        self.barrier.wait(PATIENT_S)
        return Look(int(uuid), 9)

    def memory(self, uuid: str) -> Memory:
        if uuid == "lost":
            raise NvmlError("it is lost")
        return Memory(int(uuid), {7: 3})


def test_the_watch_process_asks_devices_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "Nvml", lambda: PlayedNvml(3))
    monkeypatch.setattr(gpu_watch.signal, "signal", lambda *_: None)  # this is no main thread
    watch = Watch()
    watch._socket, theirs = socket.socketpair()
    with theirs:
        serving = threading.Thread(target=gpu_watch._serve, args=(theirs,))
        serving.start()
        try:
            assert watch._read(time.monotonic() + PATIENT_S, 1) == (Answer(),)
            answers = watch.ask("look", ["1", "2", "3"], PATIENT_S)
            assert answers == tuple(Answer(Look(free, 9)) for free in (1, 2, 3)), (
                "in the order of the question"
            )
            assert watch.ask("memory", ["5", "lost"], PATIENT_S) == (
                Answer(memory=Memory(5, {7: 3})),
                Answer(error="it is lost"),
            )
        finally:
            watch.end()
            serving.join()


def test_a_watch_that_cannot_work_says_why(tmp_path: Path) -> None:
    script = tmp_path / "player.py"
    script.write_text(PLAYER % "no driver")
    with pytest.raises(WatchError, match="no driver"):
        Watch((sys.executable, str(script))).start()


# --- is it fit again? -------------------------------------------------------------------------------


def rechecked(code: str, tmp_path: Path) -> tuple[CudaDevice, DeviceFacts]:
    """What a process that runs ``code`` says of the device of a node that had to retire."""
    script = tmp_path / "look.py"
    script.write_text(code)
    played = Played(Look(GIB, 2 * GIB, {}, (79,)))
    device = CudaDevice(played, look_command=(sys.executable, str(script)))  # type: ignore[arg-type]
    device.use(0, UUID)
    found = device.recheck()
    assert played.answers == ["it was ended"], "nothing holds the device while it may be reset"
    assert len(device.pids) == 1
    while (facts := found()) is None:
        select.select([], [], [], 0.01)  # its end is asked for, as in the agent's loop
    assert device.pids == set()
    return device, facts[0]


def test_a_process_of_its_own_looks_anew(tmp_path: Path) -> None:
    look = '[{"look": {"free_bytes": 1, "total_bytes": 2, "recovery": 1}}]'
    _, facts = rechecked(
        f"import sys; assert sys.argv[1:] == ['--look', {UUID!r}]; print({look!r})", tmp_path
    )
    assert facts == DeviceFacts(UUID, recovery=1)


def test_a_spare_looks_at_the_devices_that_it_will_have_and_keeps_its_watch(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    look = '[{"look": {"free_bytes": 1, "total_bytes": 2, "remap_failed": true}}]'
    script.write_text(f"import sys; assert sys.argv[1:] == ['--look', {UUID!r}]; print({look!r})")
    played = Played(Look(GIB, 2 * GIB))
    device = CudaDevice(played, look_command=(sys.executable, str(script)), mine=(UUID,))  # type: ignore[arg-type]
    found = device.survey()
    assert played.answers == [Look(GIB, 2 * GIB)], "it is not ended"
    while (facts := found()) is None:
        select.select([], [], [], 0.01)
    assert facts == (DeviceFacts(UUID, remap_failed=True),)
    found = device.recheck()  # no rank has used any yet: the same ones
    while (facts := found()) is None:
        select.select([], [], [], 0.01)
    assert facts == (DeviceFacts(UUID, remap_failed=True),)
    assert HostDevice().survey()() == ()


@pytest.mark.parametrize(
    ("words", "found"),
    [(None, "ab"), ("", ""), ("3,1,0", "db"), ("2,9,1", "c"), ("GPU-d,GPU-a", "da"), ("-1,2", "")],
)
def test_which_devices_ranks_will_have(words: str | None, found: str) -> None:
    four = [Gpu(f"GPU-{letter}-1", "A GPU", GIB) for letter in "abcd"]
    environ = {} if words is None else {"CUDA_VISIBLE_DEVICES": words}
    assert chosen(four, environ, 2) == tuple(f"GPU-{letter}-1" for letter in found)


@pytest.mark.parametrize("code", ["print('no JSON')", "print('[]')", "raise SystemExit(1)"])
def test_what_is_no_answer_is_no_health(tmp_path: Path, code: str) -> None:
    _, facts = rechecked(code, tmp_path)
    assert not facts.answers
    assert "cannot be looked at" in facts.error


def test_a_look_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_RECHECK_S", 0.2)
    _, facts = rechecked("import time; time.sleep(600)", tmp_path)
    assert facts.timed_out
    device, _ = rechecked("print('[]')", tmp_path)
    device.recheck()
    (pid,) = device.pids
    device.close()
    assert not Path(f"/proc/{pid}").exists()


# --- NVML itself, played -----------------------------------------------------------------------------


class PlayedLibrary:
    """libnvidia-ml with one device; each call writes where NVML's header says that it does."""

    def __init__(self, **answers: tuple[int, ...]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.nvmlErrorString = lambda _status: b"Not Supported"

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            plain = tuple(one.value for one in arguments if isinstance(one, ctypes.c_uint))
            self.asked.append((name, plain))
            if name == "nvmlDeviceGetMemoryInfo":
                memory = arguments[1]._obj
                memory.total, memory.free, memory.used = 10, 4, 6
                return 0
            if name in ("nvmlInit_v2", "nvmlDeviceGetHandleByUUID"):
                return 0
            if name == "nvmlDeviceGetTotalEccErrors" and f"ecc{plain[0]}" in self.answers:
                arguments[3]._obj.value = self.answers[f"ecc{plain[0]}"][0]
                return 0
            if name == "nvmlDeviceGetFieldValues" and name in self.answers:
                field = arguments[2]._obj
                assert (arguments[1].value, field.field, field.scope) == (1, 230, 0)
                assert ctypes.sizeof(field) == 40, "nvmlFieldValue_t"
                field.status, field.value = self.answers[name]
                return 0
            if name not in self.answers:
                return 3  # NVML_ERROR_NOT_SUPPORTED
            for pointer, value in zip(arguments[1:], self.answers[name], strict=True):
                pointer._obj.value = value
            return 0

        return call


def played_look(monkeypatch: pytest.MonkeyPatch, library: PlayedLibrary) -> Look:
    monkeypatch.setattr("leto_shadow.nvml.ctypes.CDLL", lambda _name: library)
    return Nvml().look(UUID)


def test_nvml_says_what_is_wrong_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remapped rows: correctable, uncorrectable, pending, failed. ECC: kinds 0 and 1, of counter 0."""
    library = PlayedLibrary(
        nvmlDeviceGetRemappedRows=(5, 6, 1, 0),
        nvmlDeviceGetRetiredPagesPendingStatus=(1,),
        ecc0=(7,),
        ecc1=(2,),
    )
    look = played_look(monkeypatch, library)
    assert (look.remap_pending, look.remap_failed, look.retirement_pending) == (True, False, True)
    assert (look.ecc_corrected, look.ecc_uncorrected) == (7, 2)
    assert [plain for name, plain in library.asked if name == "nvmlDeviceGetTotalEccErrors"] == [
        (0, 0),
        (1, 0),
    ]


@pytest.mark.parametrize(("status", "found"), [(0, 4), (3, None)])
def test_nvml_says_what_it_asks_for(monkeypatch: pytest.MonkeyPatch, status: int, found: int | None) -> None:
    library = PlayedLibrary(nvmlDeviceGetFieldValues=(status, 4))
    assert played_look(monkeypatch, library).recovery == found


def test_memory_is_asked_for_in_two_calls_and_the_handle_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    library = PlayedLibrary()
    monkeypatch.setattr("leto_shadow.nvml.ctypes.CDLL", lambda _name: library)
    nvml = Nvml()
    assert [nvml.memory(UUID) for _ in range(2)] == [Memory(4, None)] * 2
    assert [name for name, _ in library.asked] == [
        "nvmlInit_v2",
        "nvmlDeviceGetHandleByUUID",
        *2 * ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses_v3"],
    ]


def test_a_device_that_knows_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    look = played_look(monkeypatch, PlayedLibrary())
    assert (look.free_bytes, look.processes) == (4, None)
    assert (look.remap_pending, look.remap_failed, look.retirement_pending) == (False, False, False)
    assert (look.ecc_corrected, look.ecc_uncorrected, look.recovery) == (None, None, None)


# --- who may use what -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "count"),
    [(None, 4), ("", 0), ("0", 1), ("0,1", 2), ("3,2,1,0", 4), ("0,9,1", 1), ("-1", 0), ("GPU-a,GPU-b", 2)],
)
def test_visible_devices(words: str | None, count: int) -> None:
    assert visible(4, {} if words is None else {"CUDA_VISIBLE_DEVICES": words}) == count


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "list_gpus", lambda: TWO)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert usable_gpus(2) == TWO
    with pytest.raises(WatchError, match="3 ranks on this node need a GPU each, 2 of 2 may be used"):
        usable_gpus(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(WatchError, match=r"1 of 2 may be used \(CUDA_VISIBLE_DEVICES=1\)"):
        usable_gpus(2)


def test_without_a_gpu_the_backend_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> tuple[Gpu, ...]:
        raise WatchError("there is no driver")

    monkeypatch.setattr(gpu, "list_gpus", none)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    words = ["run", "--decide", "json:dumps", "--backend", "cuda", "train.py"]
    assert cli.main(words) == 2
    assert "--backend cuda cannot be used: there is no driver" in capsys.readouterr().err


def test_the_backend_needs_its_package_and_whole_gpu_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "list_gpus", lambda: TWO)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("leto_shadow.devices.importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="needs the package cuda-bindings"):
        check_backend("cuda", 2)
    monkeypatch.setattr("leto_shadow.launch.check_backend", lambda _backend, _ranks: ())
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    words = ["--decide", "json:dumps", "--backend", "cuda", "--page-bytes", "4096", "train.py"]
    assert cli.main(["run", *words]) == 2
    assert "--page-bytes must be a multiple of 2097152 with --backend cuda" in capsys.readouterr().err


def test_the_host_backend_needs_nothing() -> None:
    device = open_device("host", 64)
    assert isinstance(device, HostDevice)
    device.use(0, "")
    device.ended(0, 1)
    assert (device.facts(0), device.facts_of([0, 1]), device.footprint(0, 1)) == (
        None,
        {0: None, 1: None},
        {},
    )
    assert list(device.wait_for_free_memory([0, 1], 0.0)) == [(0, {}), (1, {})]
    device.close()


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    try:
        found = list_gpus()
    except WatchError as error:
        pytest.skip(str(error))
    watch = Watch()
    try:
        for one in found:
            look = watch.look(one.uuid, timeout_s=10.0)
            assert 0 < look.free_bytes <= look.total_bytes == one.total_bytes
            assert not look.remap_failed
    finally:
        watch.end()
