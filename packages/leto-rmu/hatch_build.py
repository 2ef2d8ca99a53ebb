"""Build hook: machine code of the CUDA kernels, compiled with the wheel where an nvcc knows the instruction.

The compiler comes from wheels in the build environment, or from PATH. Without one that knows PTX 9.3 the
wheel is built all the same, and NVRTC compiles the portable kernels on the user's machine;
`leto_rmu.cuda.info()` has the reason. LETO_RMU_NO_CUBINS=1 leaves the compiler out. In place, for work on
the sources: `python hatch_build.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARCHITECTURES = (80, 90, 100, 120)
VARIABLE = "LETO_RMU_NO_CUBINS"
PLACE = "leto_rmu/cuda"
COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
TIMEOUT_S = 600.0  # of one architecture
FLAGS = ("-std=c++17", "-O3", "-DLETO_EC_CLMAD", "-allow-unsupported-compiler")


def compilers() -> Iterator[str]:
    """nvcc of wheels, then of PATH."""
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations or []) if package else []:
        yield from map(str, sorted(Path(root).glob("*/bin/nvcc")))
    found = shutil.which("nvcc")
    if found:
        yield found


def header(root: Path) -> Path | None:
    """leto-ec's header: of the sibling folder, of a source distribution, or of an installed package."""
    package = importlib.util.find_spec("leto_ec")
    folders = [root.parent / "leto-ec" / "src" / "leto_ec" / "cuda", root / "include"]
    folders += (
        [Path(place) / "cuda" for place in (package.submodule_search_locations or [])] if package else []
    )
    return next((folder / "gf32.cuh" for folder in folders if (folder / "gf32.cuh").exists()), None)


def outcome(command: list[str]) -> tuple[str, str]:
    """Why a command failed ("": it did not), and what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), ""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return (lines[0] if lines else str(done.returncode)) if done.returncode else "", done.stdout


def compile_all(root: Path, out: Path) -> str:
    """Compile into ``out``; return what there is to say about it."""
    if os.environ.get(VARIABLE):
        return f"{VARIABLE} was set"
    gf32 = header(root)
    if gf32 is None:
        return "gf32.cuh of leto-ec was not found: build beside leto-ec, or where it is installed"
    why = "no nvcc was found"
    source = root / "src" / PLACE / "kernels.cu"
    for nvcc in compilers():
        command = [nvcc, "-cubin", *FLAGS, f"-I{gf32.parent}"]
        for architecture in ARCHITECTURES:
            target = out / f"kernels_sm_{architecture}.cubin"
            run = [*command, f"-arch=sm_{architecture}", "-o", str(target), str(source)]
            failure, _ = outcome(run)
            if failure:
                why = f"{nvcc} does not compile the kernels: {failure}"
                break
        else:
            _, said = outcome([nvcc, "--version"])
            return "cubins by nvcc " + next(
                (word for word in said.split() if word.startswith("V")), "of unknown version"
            )
        for partial in out.glob("*.cubin"):
            partial.unlink()
    return why


class Kernels(BuildHookInterface[Any]):
    """Adds the machine code to wheels, and leto-ec's header to source distributions."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """The compiler, for the build alone."""
        supported = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
        if self.target_name != "wheel" or not supported or os.environ.get(VARIABLE):
            return []
        return [f"{name}>=13.3" for name in COMPILER]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected."""
        root = Path(self.root)
        if self.target_name == "sdist":
            gf32 = header(root)
            if gf32 is not None:
                build_data["force_include"][str(gf32)] = "include/gf32.cuh"
        if self.target_name != "wheel" or version != "standard":
            return
        self._folder = tempfile.TemporaryDirectory()
        out = Path(self._folder.name)
        note = compile_all(root, out)
        (out / "build.json").write_text(json.dumps({"note": note}) + "\n")
        self.app.display_info(f"CUDA kernels: {note}")
        for path in out.iterdir():
            build_data["force_include"][str(path)] = f"{PLACE}/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


if __name__ == "__main__":
    here = Path(__file__).parent
    place = here / "src" / PLACE
    said = compile_all(here, place)
    (place / "build.json").write_text(json.dumps({"note": said}) + "\n")
    print(said)
