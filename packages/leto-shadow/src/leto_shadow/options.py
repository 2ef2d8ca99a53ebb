"""Options of a job, as `leto run` hands them to every node agent.

Role: one checked value between the command line (`leto_shadow.cli`) and the agent (`leto_shadow.agent_main`),
so that neither knows the other's parser. torchrun starts an agent as

    python -m leto_shadow.agent_main --options JSON
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

__all__ = ["JobOptions", "OptionsError", "default_base_dir", "default_run_dir"]

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class OptionsError(ValueError):
    """Options that make no sense; the message is one line that names the option."""


def default_base_dir() -> Path:
    """Folder of all jobs of this user on this host."""
    return Path(tempfile.gettempdir()) / f"leto-{os.getuid()}"


def default_run_dir(job_id: str) -> Path:
    """Run directory of a job, unless `--run-dir` names another one."""
    return default_base_dir() / job_id


class JobOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an agent needs besides torchrun's environment. Times are seconds, sizes bytes."""

    job_id: str
    run_dir: str
    nproc_per_node: int
    """Trainers (ranks) on each node."""
    command: tuple[str, ...]
    """The trainer's command after the interpreter: ("script.py", "--arg") or ("-m", "package.module",
    "--arg")."""
    drills: str | None = None
    """Path of a drill file."""
    page_bytes: int = 2 << 20
    data_pages: int = 1024
    tier1_pages: int = 16
    tier2_pages: int = 1
    pages_per_handle: int = 0
    decide: str = "leto_rmu:decide"
    """module:function that turns the ranks' summaries into the decision."""
    shadow_level: int = 3
    """Level at which shadows wait; 0: no shadows, cold recovery."""
    hang_initial_s: float = 120.0
    hang_min_s: float = 5.0
    hang_max_s: float = 600.0
    hang_factor: float = 5.0
    grace_s: float = 0.0
    """How long state managers outlive their agent."""

    def __post_init__(self) -> None:
        def require(condition: bool, what: str) -> None:
            if not condition:
                raise OptionsError(what)

        require(
            _JOB_ID.fullmatch(self.job_id) is not None,
            f"--job-id must be 1 to 64 letters, digits or _.- (first no sign), found {self.job_id!r}",
        )
        require(os.path.isabs(self.run_dir), f"--run-dir must be absolute, found {self.run_dir!r}")
        require(self.nproc_per_node >= 1, f"--nproc-per-node must be at least 1, found {self.nproc_per_node}")
        require(bool(self.command), "no script was given")
        require(
            self.page_bytes > 0 and self.page_bytes % 4096 == 0,
            f"--page-bytes must be a positive multiple of 4096, found {self.page_bytes}",
        )
        require(1 <= self.data_pages <= 65535, f"--data-pages must be 1 to 65535, found {self.data_pages}")
        require(1 <= self.tier1_pages <= 64, f"--tier1 must be 1 to 64, found {self.tier1_pages}")
        require(0 <= self.tier2_pages <= 64, f"--tier2 must be 0 to 64, found {self.tier2_pages}")
        require(
            self.pages_per_handle >= 0,
            f"--pages-per-handle must not be negative, found {self.pages_per_handle}",
        )
        module, _, function = self.decide.partition(":")
        require(
            all(part.isidentifier() for part in module.split(".")) and function.isidentifier(),
            f"--decide must be module:function, found {self.decide!r}",
        )
        require(0 <= self.shadow_level <= 3, f"--shadow-level must be 0 to 3, found {self.shadow_level}")
        require(
            0 < self.hang_min_s <= self.hang_max_s,
            f"--hang-min {self.hang_min_s:g} must be positive and at most --hang-max {self.hang_max_s:g}",
        )
        require(self.hang_initial_s > 0, f"--hang-initial must be positive, found {self.hang_initial_s:g}")
        require(self.hang_factor > 1, f"--hang-factor must be above 1, found {self.hang_factor:g}")
        require(self.grace_s >= 0, f"--grace must not be negative, found {self.grace_s:g}")

    def to_argv(self) -> list[str]:
        """Arguments of `leto_shadow.agent_main`."""
        return ["--options", msgspec.json.encode(self).decode()]

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self:
        """Read what `to_argv` wrote. Raises OptionsError."""
        if len(argv) != 2 or argv[0] != "--options":
            raise OptionsError("the node agent takes --options JSON; start it through `leto run`")
        try:
            return msgspec.json.decode(argv[1], type=cls)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise OptionsError(f"--options: {error}") from error
