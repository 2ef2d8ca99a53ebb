"""Pools that do not fit are refused before anything starts, with what was expected and what was found."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from leto_rmp import PoolConfig
from leto_rmp.memory import RESERVE_BYTES, MemoryBudget
from leto_shadow import room
from leto_shadow.nvml import Gpu
from leto_shadow.room import Room, least, size, why_not

MIB, GIB = 1 << 20, 1 << 30
POOL = PoolConfig()
GPU = PoolConfig(backend="cuda")


def having(host: int, **others: object) -> Room:
    return Room(MemoryBudget(host + RESERVE_BYTES, "MemAvailable"), **others)  # type: ignore[arg-type]


def test_the_least_is_a_group_of_one_page_for_each_rank() -> None:
    need = least(POOL, 8)
    assert (need.data, need.parity, need.largest) == (2 * MIB, 17 * 2 * MIB, 16 * 2 * MIB)
    assert need.host == 8 * 18 * 2 * MIB
    assert least(GPU, 8).host == 8 * 17 * 2 * MIB, "data pages are on the GPUs"


def test_what_is_retained_comes_in_whole_pages_and_groups() -> None:
    need = least(POOL, 2, 2 * GIB + 1)  # one page more than a group holds
    assert (need.data, need.parity) == (2 * GIB + 2 * MIB, 2 * 17 * 2 * MIB)
    assert need.largest == need.data
    assert least(GPU, 2, 2 * GIB + 1).largest == 2 * 16 * 2 * MIB


def test_host_memory_that_is_there_to_the_byte_is_enough() -> None:
    need = least(POOL, 2, GIB)
    assert why_not(need, having(need.host)) is None
    lack = why_not(need, having(need.host - 1))
    assert str(lack) == (
        "the pools of this node's 2 ranks need at least 2.0 GiB of host memory (1.0 GiB of data pages and "
        "34.0 MiB of parity pages each), 2.0 GiB can be had (MemAvailable): give it more memory, or lower "
        "--nproc-per-node, --page-bytes or --tier1-pages, or --retained-bytes if that says too much"
    )


def test_less_than_the_reserve_is_nothing() -> None:
    lack = why_not(least(POOL, 1), Room(MemoryBudget(RESERVE_BYTES - 1, "memory.max")))
    assert lack is not None
    assert "0 bytes can be had (memory.max)" in lack.found


def test_gpu_memory_is_that_of_the_largest_device() -> None:
    gpus = (Gpu("GPU-a", "small", 16 * GIB), Gpu("GPU-b", "large", 80 * GIB))
    assert why_not(least(GPU, 2, 80 * GIB), having(8 * GIB, gpus=gpus)) is None
    lack = why_not(least(GPU, 2, 80 * GIB + 1), having(8 * GIB, gpus=gpus))
    assert lack is not None
    assert "80.0 GiB of GPU memory, the largest GPU here has 80.0 GiB" in lack.found
    assert why_not(least(GPU, 2, 800 * GIB), having(80 * GIB)) is None, "nobody knows how large they are"


def test_parity_of_gpu_pages_needs_host_memory() -> None:
    need = least(GPU, 8, 70 * GIB)
    assert need.host == 8 * 35 * 17 * 2 * MIB
    lack = why_not(need, having(need.host - 1, gpus=(Gpu("GPU-a", "H200", 141 * GIB),)))
    assert lack is not None
    assert lack.found.startswith("the pools of this node's 8 ranks need at least 9.2 GiB of host memory")


def test_a_limit_on_files_holds_for_memfds() -> None:
    need = least(POOL, 1, GIB)
    assert why_not(need, having(8 * GIB, file_bytes=GIB)) is None
    lack = why_not(need, having(8 * GIB, file_bytes=GIB - 1))
    assert lack is not None
    assert "ulimit -f unlimited" in lack.fix


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (2047, "1.9 KiB"),
        (5 * GIB - 1, "4.9 GiB"),
        (9 << 60, "9216.0 PiB"),
    ],
)
def test_sizes_are_rounded_down(number: int, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(
    ("word", "number"), [("0", 0), ("4096", 4096), ("14GiB", 14 * GIB), ("3 TiB", 3 << 40), ("1KiB", 1024)]
)
def test_sizes_on_the_command_line(word: str, number: int) -> None:
    parser = argparse.ArgumentParser()
    room.add_option(parser)
    assert parser.parse_args(["--retained-bytes", word]).retained_bytes == number


@pytest.mark.parametrize("word", ["", "-1", "1.5GiB", "14GB", "GiB", "1e9", "9" * 16])
def test_what_is_no_size(word: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    room.add_option(parser)
    with pytest.raises(argparse.ArgumentError, match="must be a size"):
        parser.parse_args([f"--retained-bytes={word}"])


def leto_run(folder: Path, *words: str, file_bytes: int = resource.RLIM_INFINITY) -> tuple[int, str]:
    """What `leto run` says on this machine; with --dry-run, so that nothing starts if it says nothing."""
    (folder / "train.py").write_text("")
    command = [sys.executable, "-m", "leto_shadow.cli", "run", "--dry-run", "--decide", "json:dumps", *words]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    done = subprocess.run(
        [*command, "train.py"],
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1])),
    )
    return done.returncode, done.stderr


def test_leto_run_refuses_what_this_machine_has_not(tmp_path: Path) -> None:
    status, said = leto_run(tmp_path, "--retained-bytes", "9000TiB", "--nproc-per-node", "2")
    assert status == 2, said
    assert said.startswith("leto run: error: the pools of this node's 2 ranks need at least 17.8 PiB"), said
    assert said.count("\n") == 1, said
    assert leto_run(tmp_path, "--nproc-per-node", "2") == (0, "")


def test_leto_run_knows_the_limit_on_files(tmp_path: Path) -> None:
    status, said = leto_run(tmp_path, "--retained-bytes", "4MiB", file_bytes=16 * MIB)
    assert (status, "limit on the size of files is 16.0 MiB" in said) == (2, True), said
