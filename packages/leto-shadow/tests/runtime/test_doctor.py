"""The doctor: this machine passes, and every simulated defect is found, explained and given a fix."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from leto_rmp import PoolConfig
from leto_shadow import cli, doctor, room
from leto_shadow.checks import CHECKS, Machine, Result
from leto_shadow.nvml import Gpu


class Healthy(Machine):
    """A machine with nothing to complain about; single answers are replaced by `answers`."""

    ANSWERS: ClassVar[dict[str, Any]] = {
        "python": (3, 11),
        "system": "Linux",
        "kernel": "6.8.0-41-generic",
        "cores": 8,
        "open_files": (1024, 1048576),
        "memory": (64 << 30, "MemAvailable"),
        "file_bytes": None,
        "gpus": (),
        "temp_dir": "/tmp",
        "torch_features": (True, True),
        "ec_info": {"kernel": "pclmul", "why": "fast", "native": True},
        "gpu_devices": [],
        "importable": True,
        **dict.fromkeys(
            [
                "try_pidfd",
                "try_memfd",
                "try_populate_read",
                "try_poison",
                "try_peer_pidfd",
                "try_death_signal",
                "try_gpus",
                "try_oom_hook",
            ]
        ),
        **dict.fromkeys(["try_loopback", "try_write"]),
    }
    VERSIONS: ClassVar[dict[str, str | None]] = {
        "torch": "2.13.0+cpu",
        "leto-rmu": "0.1.0",
        "megatron-core": None,
    }
    FILES: ClassVar[dict[str, str]] = {"/proc/sys/vm/max_map_count": "65530\n"}

    def __init__(self, **answers: Any) -> None:
        versions = {**self.VERSIONS, **answers.pop("versions", {})}
        files = {**self.FILES, **answers.pop("files", {})}
        for name, answer in {**self.ANSWERS, **answers}.items():
            setattr(self, name, lambda *_args, answer=answer: answer)
        self.version = versions.get  # type: ignore[method-assign]
        self.read = files.get  # type: ignore[method-assign]


def by_name(machine: Machine) -> dict[str, Result]:
    return {result.name: result for result in doctor.diagnose(machine)}


def test_a_healthy_machine_passes() -> None:
    results = by_name(Healthy())
    assert {result.status for result in results.values()} == {"ok"}, results
    assert len(results) == len(CHECKS)
    assert all(result.found and result.meaning and not result.fix for result in results.values())


REFUSED = "Operation not permitted"
GPUS = ["nvidia0", "nvidia1"]
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu\n"


@pytest.mark.parametrize(
    ("name", "status", "found", "answers"),
    [
        ("python", "fail", "Python 3.10", {"python": (3, 10)}),
        ("python", "warn", "Python 3.14", {"python": (3, 14)}),
        ("kernel", "fail", "Darwin", {"system": "Darwin", "kernel": "23.1"}),
        ("kernel", "fail", "5.10.0", {"kernel": "5.10.0-8-amd64"}),
        ("kernel", "warn", "5.15.0", {"kernel": "5.15.0"}),
        ("kernel", "fail", "odd", {"kernel": "odd"}),
        ("pidfd", "fail", REFUSED, {"try_pidfd": REFUSED}),
        ("peer-pidfd", "warn", REFUSED, {"try_peer_pidfd": REFUSED}),
        ("death-signal", "fail", REFUSED, {"try_death_signal": REFUSED}),
        ("memfd", "fail", REFUSED, {"try_memfd": REFUSED}),
        ("populate-read", "fail", REFUSED, {"try_populate_read": REFUSED}),
        ("poison", "warn", REFUSED, {"try_poison": REFUSED}),
        ("loopback", "fail", REFUSED, {"try_loopback": REFUSED}),
        ("open-files", "fail", "hard 256", {"open_files": (256, 256)}),
        ("open-files", "ok", "hard none", {"open_files": (1024, -1), "gpu_devices": GPUS}),
        ("open-files", "warn", "hard 4096", {"open_files": (1024, 4096), "gpu_devices": GPUS}),
        ("open-files", "ok", "hard 16384", {"open_files": (1024, 16384), "gpu_devices": GPUS}),
        ("mappings", "warn", "1000", {"files": {"/proc/sys/vm/max_map_count": "1000\n"}}),
        ("mappings", "ok", "cannot be read", {"files": {"/proc/sys/vm/max_map_count": ""}}),
        ("memory", "warn", "0.5 GiB", {"memory": (1 << 29, "memory.max of cgroup /x")}),
        ("temp-dir", "fail", REFUSED, {"try_write": REFUSED}),
        ("temp-dir", "warn", "/deep/", {"temp_dir": "/deep" * 20 + "/"}),
        ("cores", "warn", "1 cores", {"cores": 1}),
        ("torch", "fail", "not installed", {"versions": {"torch": None}}),
        ("torch", "fail", "2.7.1", {"versions": {"torch": "2.7.1"}}),
        ("torch", "fail", "without torch.distributed", {"torch_features": (False, False)}),
        ("torch", "warn", "without gloo", {"torch_features": (True, False)}),
        ("gpu", "warn", "nvidia0", {"gpu_devices": GPUS}),
        (
            "gpu",
            "warn",
            "driver 470.82",
            {"gpu_devices": GPUS, "files": {"/proc/driver/nvidia/version": DRIVER.format("470.82")}},
        ),
        (
            "gpu",
            "ok",
            "driver 580.159.03",
            {"gpu_devices": GPUS, "files": {"/proc/driver/nvidia/version": DRIVER.format("580.159.03")}},
        ),
        ("leto-ec", "warn", "not installed", {"ec_info": None}),
        (
            "leto-ec",
            "warn",
            "reference",
            {"ec_info": {"kernel": "reference", "why": "no library", "native": False}},
        ),
        ("leto-rmu", "warn", "not installed", {"versions": {"leto-rmu": None}, "importable": False}),
        ("leto-rmu", "ok", "importable", {"versions": {"leto-rmu": None}}),
        ("megatron-core", "warn", "0.17.0", {"versions": {"megatron-core": "0.17.0"}}),
        ("megatron-core", "ok", "0.16.1", {"versions": {"megatron-core": "0.16.1"}}),
    ],
)
def test_defects_are_found_and_explained(name: str, status: str, found: str, answers: dict[str, Any]) -> None:
    results = by_name(Healthy(**answers))
    result = results.pop(name)
    assert (result.status, found in result.found) == (status, True), result
    assert (result.fix != "") == (status != "ok")
    assert {other.status for other in results.values()} <= {"ok"} | (
        {"warn"} if "gpu_devices" in answers else set()
    )


def test_a_gpu_that_works() -> None:
    files = {"/proc/driver/nvidia/version": DRIVER.format("580.159.03")}
    results = by_name(Healthy(gpu_devices=GPUS, files=files))
    assert (results["gpu"].status, results["gpu"].found) == ("ok", "2 device(s), driver 580.159.03")
    assert "--backend cuda" in results["gpu"].meaning
    assert results["gpu-packages"].status == "ok"


def test_what_is_missing_beside_a_gpu() -> None:
    files = {"/proc/driver/nvidia/version": DRIVER.format("580.159.03")}
    results = by_name(Healthy(gpu_devices=GPUS, files=files, importable=False, try_gpus="the driver hangs"))
    assert (results["gpu"].status, results["gpu"].found.endswith(": the driver hangs")) == ("warn", True)
    assert results["gpu-packages"].found == "not installed: cuda.bindings, cupy"
    assert results["gpu-packages"].status == "warn"


def test_a_check_that_breaks_is_a_failure_and_stops_no_other() -> None:
    class Broken(Healthy):
        def __init__(self) -> None:
            super().__init__()
            del self.cores

        def cores(self) -> int:
            raise RuntimeError("no idea")

    results = by_name(Broken())
    assert (results["cores"].status, results["cores"].found) == ("fail", "RuntimeError: no idea")
    assert len(results) == len(CHECKS)


@pytest.mark.parametrize(("answers", "status"), [({}, 0), ({"cores": 1}, 0), ({"try_memfd": REFUSED}, 1)])
def test_exit_status_and_both_outputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: dict[str, Any], status: int
) -> None:
    monkeypatch.setattr(doctor, "Machine", lambda: Healthy(**answers))
    assert cli.main(["doctor", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert [set(entry) for entry in report] == [{"name", "status", "found", "meaning", "fix"}] * (
        1 + len(CHECKS)
    )
    assert any(entry["status"] == "fail" for entry in report) == bool(status)
    assert cli.main(["doctor"]) == status
    text = capsys.readouterr().out
    assert f"{status} failures" in text
    assert ("fix:" in text) == bool(answers)


def test_pools_that_are_to_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor is told of a job what `leto run` is told."""
    gpus = (Gpu("GPU-a", "H200", 141 << 30),)

    def pool(status: int, *words: str) -> dict[str, str]:
        monkeypatch.setattr(doctor, "Machine", lambda: Healthy(gpus=gpus))
        assert cli.main(["doctor", "--json", *words]) == status
        return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}["pool"]

    assert pool(0)["found"] == "this node's rank: at least 36.0 MiB of host memory"
    eight = ("--nproc-per-node", "8", "--retained-bytes", "100GiB")
    lack = pool(1, *eight)
    assert lack["found"].startswith("the pools of this node's 8 ranks need at least 813.2 GiB of host memory")
    assert lack["fix"].startswith("give it more memory")
    on_gpus = pool(0, *eight, "--backend", "cuda")
    assert on_gpus["found"] == "this node's 8 ranks: at least 13.2 GiB of host memory, 100.0 GiB of each GPU"
    lack = pool(1, "--retained-bytes", "150GiB", "--backend", "cuda")
    assert lack["found"].endswith("the largest GPU here has 141.0 GiB")


@pytest.mark.parametrize(
    "words", [("--nproc-per-node", "0"), ("--backend", "tpu"), ("--page-bytes", "7"), ("--data-pages", "0")]
)
def test_a_job_that_makes_no_sense(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_this_machine_is_asked_without_errors() -> None:
    """Every question can be put to the machine that runs the tests, and nothing is left behind by asking."""
    results = {one.name: one for one in doctor.diagnose(Machine(), room.least(PoolConfig(), 1))}
    assert not [result for result in results.values() if result.meaning == "the check itself broke"], results
    for name in ("kernel", "pidfd", "memfd", "death-signal", "loopback", "temp-dir"):
        assert results[name].status in ("ok", "warn"), results[name]


@pytest.mark.parametrize(("gpus", "status"), [(GPUS, "warn"), ([], "ok")])
def test_a_missing_hook_matters_where_there_is_a_gpu(gpus: list[str], status: str) -> None:
    files = {"/proc/driver/nvidia/version": DRIVER.format("580.159.03")}
    result = by_name(Healthy(gpu_devices=gpus, files=files, try_oom_hook="no compiler"))["oom-hook"]
    assert (result.status, result.found) == (status, "no compiler")
    assert "L1" in result.meaning
