"""Profiles: what is known about a job, read from TOML and checked field by field.

Role: the only input of the simulator besides failure schedules (appendix C: "a profile-based approach"). A
profile either states the iteration time or describes one pipeline stage, from which `leto_sim.iteration`
predicts it at any scale. Units are part of every field's name. Written by hand or by ``leto-sim profile``.
`docs/profiles.md` lists every field; a test holds that page to this schema.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from leto_sim.errors import ProfileError
from leto_sim.fields import SCHEMA
from leto_sim.schema import check_table
from leto_sim.systems import System, gemini, jit_ckpt, leto, moevement

__all__ = ["Profile", "bundled_profiles", "load_profile", "parse_profile"]


@dataclass(frozen=True)
class Profile:
    """A checked profile; ``data`` follows `SCHEMA`, absent optional tables are None."""

    name: str
    data: Mapping[str, Any]
    where: str = field(default="profile", compare=False)

    @property
    def gpus(self) -> int:
        return int(self.data["job"]["gpus"])

    @property
    def has_stage(self) -> bool:
        """True if the profile describes a stage, so that the iteration time can be predicted and scaled."""
        return bool(self.data["bracket"])

    def section(self, name: str) -> dict[str, Any]:
        """Return a table; ProfileError if it is absent."""
        table = self.data[name]
        if table is None:
            raise ProfileError(name, None, "this table for the question asked", self.where)
        return dict(table)

    def scaled(self, data_parallel: int) -> Profile:
        """Return the profile with another data-parallel degree: same stage, same batch per replica.

        The GPU count and the global batch grow in proportion (weak scaling), and so does the failure rate if
        the profile gives it per GPU.
        """
        if not self.has_stage:
            raise ProfileError(
                "bracket", None, "a stage profile (a stated time cannot be scaled)", self.where
            )
        if data_parallel < 1:
            raise ProfileError("parallelism.data", data_parallel, "an integer of at least 1", self.where)
        raw = {k: dict(v) if isinstance(v, Mapping) else v for k, v in self.data.items()}
        old = raw["parallelism"]["data"]
        raw["parallelism"]["data"] = data_parallel
        raw["job"]["gpus"] = self.gpus * data_parallel // old
        raw["batch"]["global_sequences"] = raw["batch"]["global_sequences"] * data_parallel // old
        return _finish(raw, self.where)

    def mttf_s(self) -> float:
        """Mean time to failure of the job in seconds, from ``mttf_s`` or ``gpu_mttf_hours`` over the GPUs."""
        table = self.section("failures")
        if table["mttf_s"] is not None:
            return float(table["mttf_s"])
        return float(table["gpu_mttf_hours"]) * 3600 / self.gpus

    def hof_ratio(self) -> float:
        """Share of failures that are HOFs; ProfileError if the profile does not give it."""
        value = self.section("failures")["hof_ratio"]
        if value is None:
            raise ProfileError("failures.hof_ratio", None, "a number in [0, 1]", self.where)
        return float(value)

    def systems(self) -> dict[str, System]:
        """Return the systems that the profile has figures for, by name, Leto last."""
        table = self.section("recovery")
        shared = {"detection_s": table["detection_s"]}
        found: dict[str, System] = {}
        for name in ("gemini", "gemini+", "jit-ckpt", "jit-ckpt+", "moevement", "moevement+"):
            row = table[name]
            if row is None:
                continue
            own = {
                "initialize_s": row["initialize_s"],
                "initialize_ff_s": row["initialize_ff_s"],
                "initialize_hof_cold_s": row["initialize_cold_s"],
                "plus": name.endswith("+"),
            }
            if name.startswith("gemini"):
                limit = table["interval_max_iterations"]
                stall = table["checkpoint_stall_s"]
                found[name] = gemini(checkpoint_stall_s=stall, interval_max_iterations=limit, **own, **shared)
            elif name.startswith("jit"):
                found[name] = jit_ckpt(**own, **shared)
            else:
                extra = {k: row[k] for k in ("window_iterations", "conversion_iterations")}
                found[name] = moevement(checkpoint_stall_s=row["window_stall_s"], **extra, **own, **shared)
        row = table["leto"]
        if row is not None:
            if row["fallback"] not in found:
                raise ProfileError(
                    "recovery.leto.fallback",
                    row["fallback"],
                    f"a system of this profile: {list(found)}",
                    self.where,
                )
            found["leto"] = leto(
                found[row["fallback"]],
                initialize_s=row["initialize_s"],
                initialize_cold_s=row["initialize_cold_s"],
                overhead_fraction=row["overhead_fraction"],
                interval_max_iterations=row["interval_max_iterations"],
            )
        return found

    def shadow_rebuild_s(self) -> float:
        """Seconds until Leto's next shadow is ready; 0 if the profile does not describe Leto."""
        row = (self.data["recovery"] or {}).get("leto")
        return float(row["shadow_rebuild_s"]) if row else 0.0


def parse_profile(data: Mapping[str, Any], where: str = "profile") -> Profile:
    """Check a raw table and return the Profile. Raises ProfileError naming field, value and range."""
    return _finish(check_table(SCHEMA, data, "", where), where)


def _finish(checked: dict[str, Any], where: str) -> Profile:
    """Check what spans fields, then wrap."""
    stage = bool(checked["bracket"])
    if not stage and checked["job"]["iteration_s"] is None:
        raise ProfileError(
            "job.iteration_s", None, "an iteration time, or brackets to predict it from", where
        )
    if stage:
        for name in ("parallelism", "batch", "gradients", "optimizer"):
            if checked[name] is None:
                raise ProfileError(name, None, "this table beside the brackets", where)
        p, b = checked["parallelism"], checked["batch"]
        gpus = p["data"] * p["tensor"] * p["pipeline"]
        if gpus != checked["job"]["gpus"]:
            raise ProfileError(
                "job.gpus", checked["job"]["gpus"], f"data * tensor * pipeline = {gpus}", where
            )
        group = p["data"] * p["tensor"]
        if group % (p["expert"] * p["expert_tensor"]):
            raise ProfileError(
                "parallelism.expert", p["expert"], f"a divisor of data * tensor = {group}", where
            )
        if b["global_sequences"] % (p["data"] * b["micro_sequences"]):
            step = p["data"] * b["micro_sequences"]
            raise ProfileError(
                "batch.global_sequences",
                b["global_sequences"],
                f"a multiple of data * micro_sequences = {step}",
                where,
            )
        g = checked["gradients"]
        if g["dense_interference"] and g["moe_interference"]:
            raise ProfileError(
                "gradients.moe_interference", g["moe_interference"], "0 when dense_interference is set", where
            )
        for i, row in enumerate(checked["bracket"]):
            if row["alltoall_backward_ms"] > row["backward_ms"]:
                raise ProfileError(
                    f"bracket[{i}].alltoall_backward_ms",
                    row["alltoall_backward_ms"],
                    f"a number in [0, backward_ms = {row['backward_ms']:g}]",
                    where,
                )
    failures = checked["failures"]
    if failures is not None and (failures["mttf_s"] is None) == (failures["gpu_mttf_hours"] is None):
        raise ProfileError(
            "failures.mttf_s",
            failures["mttf_s"],
            "exactly one of failures.mttf_s and failures.gpu_mttf_hours",
            where,
        )
    return Profile(checked["name"], checked, where)


def bundled_profiles() -> list[str]:
    """Names of the profiles shipped with the package; `load_profile` takes them in place of a path."""
    folder = resources.files("leto_sim") / "data"
    return sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_profile(path_or_name: str | Path) -> Profile:
    """Read and check a profile file, or a bundled profile by name. Raises ProfileError."""
    text_name = str(path_or_name)
    try:
        if text_name in bundled_profiles():
            text = (resources.files("leto_sim") / "data" / f"{text_name}.toml").read_text(encoding="utf-8")
        else:
            text = Path(path_or_name).read_text(encoding="utf-8")
        return parse_profile(tomllib.loads(text), text_name)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        known = ", ".join(bundled_profiles())
        wanted = f"a readable TOML file or one of {known} ({error})"
        raise ProfileError("(file)", text_name, wanted, text_name) from error
    except tomllib.TOMLDecodeError as error:
        raise ProfileError("(file)", text_name, f"valid TOML ({error})", text_name) from error
