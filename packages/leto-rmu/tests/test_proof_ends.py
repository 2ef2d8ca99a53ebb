"""What counts as an interruption of a process of the proof scripts, and what must not pass for one."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_kernel import compiler

from leto_rmu import Op
from leto_rmu.faults import tear

pytestmark = pytest.mark.timeout(600)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LAUNCH = "CUDA error: unspecified launch failure"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
# As the runtime of C++ says it, with what PyTorch puts before and after.
UNCAUGHT = """[W CUDAEvent.h:57] Warning: CUDA warning: unspecified launch failure (function ~CUDAEvent)
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  {}
CUDA kernel errors might be asynchronously reported at some other API call.
"""

ENDS = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import proof_lab
proof_lab.Place.device = "cpu"

def task(command, channel):
    for values in command["says"]:
        channel.say(**values)
    if command["keeps"]:
        channel.words.keep()
    os.write(2, command["words"].encode())
    if command["signal"]:
        os.kill(os.getpid(), command["signal"])

for says, words, trapping, number, keeps in json.loads(sys.argv[2]):
    with proof_lab.Warm({"task": task}, 1) as warm:
        child = warm.take()
        child.begin("task", says=says, words=words, signal=number, keeps=keeps)
        try:
            print("told", repr(child.interrupted("it", trapping=trapping)))
        except AssertionError as error:
            print("refused", error)
"""
KILL, ABORT, SEGV = 9, 6, 11
TRAPPED = {"trapped": f"AcceleratorError: {LAUNCH}"}
CASES: dict[str, tuple[list[dict[str, str]], str, bool, int, str]] = {
    # what it says, its last words, whether its kernel traps, the signal that it dies of: what is made of it
    "killed": ([], "", False, KILL, "told ''"),
    "trapped, and killed itself": ([TRAPPED], "", True, KILL, f"told 'AcceleratorError: {LAUNCH}'"),
    "a destructor met the trap": ([], UNCAUGHT.format(LAUNCH), True, ABORT, f"told 'SIGABRT: {LAUNCH}'"),
    "told, then a destructor": ([TRAPPED], UNCAUGHT.format(LAUNCH), True, ABORT, "told 'SIGABRT: "),
    "survived": ([], "", True, 0, "refused it: it was to end by SIGKILL, but its status is 0"),
    "another error of CUDA": ([{"trapped": ILLEGAL}], "", True, KILL, "refused it: it was to be interr"),
    "a bug": ([{"error": "a bug"}], "", True, 0, "refused it: it was to be interrupted, but says"),
    "no trap was asked for": ([], UNCAUGHT.format(LAUNCH), False, ABORT, "refused it: it was to end by SIG"),
    "aborted without a word": ([], "", True, ABORT, "refused it: it ended by SIGABRT, which no trap"),
    "aborted for another reason": (
        [],
        UNCAUGHT.format("std::bad_alloc"),
        True,
        ABORT,
        "refused it: it ended by SIGABRT, which no trap",
    ),
    "aborted by another error of CUDA": (
        [],
        UNCAUGHT.format(ILLEGAL),
        True,
        ABORT,
        "refused it: it ended by SIGABRT, which no trap",
    ),
    "told of the trap, aborted for another reason": (
        [TRAPPED],
        "free(): invalid pointer\n",
        True,
        ABORT,
        "refused it: it ended by SIGABRT, which no trap",
    ),
    "another signal": ([], UNCAUGHT.format(LAUNCH), True, SEGV, "refused it: it was to end by SIGKILL"),
}


def ends(*cases: tuple[list[dict[str, str]], str, bool, int, bool]) -> tuple[list[str], str]:
    """What is made of each child that ends so, and all that reached stderr."""
    command = [sys.executable, "-c", ENDS, str(BENCHMARKS), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines(), done.stderr


def test_only_a_kill_or_a_trap_counts_as_an_interruption() -> None:
    """An error of another kind must not pass for the abort that was to be tested."""
    found, errors = ends(*((*case[:4], True) for case in CASES.values()))
    for (name, case), line in zip(CASES.items(), found, strict=True):
        assert line.startswith(case[4]), name
    assert "free(): invalid pointer\n" in errors, "last words reach the log"


def test_without_its_last_words_an_abort_is_refused() -> None:
    """The mutant: stderr is not kept, so nothing tells why the process ended."""
    says, words, trapping, number, _ = CASES["a destructor met the trap"]
    (line,), errors = ends((says, words, trapping, number, False))
    assert line.startswith("refused it: it ended by SIGABRT")
    assert LAUNCH in errors


UNWINDS = """
#include <stdexcept>
extern "C" void unwinds(const char* why) noexcept { throw std::runtime_error(why); }
"""


def destructor(tmp_path: Path) -> Callable[[str], None]:
    """Ends the process as a destructor in C++ does that meets an error; without a compiler, as one would."""
    if compiler() is None:

        def unwinds(why: str) -> None:
            os.write(2, UNCAUGHT.format(why).encode())
            os.abort()

        return unwinds
    source, library = tmp_path / "unwinds.cpp", tmp_path / "unwinds.so"
    source.write_text(UNWINDS)
    command = [str(compiler()), "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=120)
    function = ctypes.CDLL(str(library)).unwinds
    return lambda why: function(why.encode())


@pytest.mark.parametrize("why", [LAUNCH, "CUDA error: out of memory"])
def test_an_abort_in_a_destructor_is_recovered_from_if_the_trap_caused_it(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    """All of `gpu_aborts` over the host backend: the operation is torn, and the process ends by SIGABRT."""
    aborts, dies = scripts("gpu_aborts"), destructor(tmp_path)

    class TornAndAborted(aborts.Trap):  # type: ignore[misc, name-defined]
        def run(self, op: Op) -> None:
            if not self.its_turn(op):
                op.apply()
                return
            self.arm()
            tear([op], np.random.default_rng(5))
            faulthandler.disable()  # of pytest, whose words nobody needs
            dies(why)

    monkeypatch.setattr(aborts, "KINDS", ("optimizer",))
    monkeypatch.setattr(aborts, "Trap", TornAndAborted)
    monkeypatch.setattr(aborts, "faulty_kernel", lambda _up: "kernel")
    monkeypatch.setattr(aborts, "arm", lambda kernel, seed: None)
    page = tmp_path / "page"
    options = ["--device=cpu", "--smoke", "--schemes=slots", "--kernel-rounds=0", f"--output={page}"]
    monkeypatch.setattr(sys, "argv", ["x", *options])
    status, data = aborts.main(), json.loads(page.with_suffix(".json").read_text())
    (found,) = data["runs"]
    if why == LAUNCH:
        assert status == 0, data["errors"]
        assert [(x["kind"], x["trapped"]) for x in found["rounds"]] == [("optimizer", f"SIGABRT: {LAUNCH}")]
        assert found["seen"]["compared"] == 2
        text = page.with_suffix(".md").read_text()
        assert "Of the processes whose kernel trapped 1 ended by SIGABRT" in text
    else:
        assert status == 1
        assert not found["rounds"]
        assert "which no trap of a kernel caused" in data["errors"][0]
