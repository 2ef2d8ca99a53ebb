"""What can be done with this repository, one session each. `python3 -m nox --list` is the table of contents.

The packages are tested as a user gets them: each is built into a wheel once, the wheel is installed, and the
tests import that and nothing else. All sessions that need torch share one environment that has it, because
torch is by far the largest thing to install; constraints.txt says which torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typing", "tests", "docs"]

ROOT = Path(__file__).parent
PACKAGES = ("leto-ec", "leto-rmp", "leto-rmu", "leto-shadow", "leto-megatron", "leto-sim")
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-benchmark", "pytest-xdist", "hypothesis")
# Tests use two cores; those marked `job` start several processes, and have the machine to themselves.
PARALLEL = ("leto-ec", "leto-rmp", "leto-rmu", "leto-shadow", "leto-megatron", "leto-sim")
WITH_JOBS = ("leto-shadow", "leto-megatron")
DOCS_TOOLS = ("sphinx", "furo", "myst-parser")

each_package = nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])


# ------------------------------------------------------------------------------------------------ sessions


@nox.session(venv_backend="none")
@nox.parametrize("package", [nox.param(name, id=name) for name in ("leto-ec-alone", *PACKAGES, "docs")])
def tests(session: nox.Session, package: str) -> None:
    """Test the built wheels, one package at a time: `nox -s "tests(leto-rmu)" -- -k marker`.

    leto-ec's tests run where it is alone. Beside torch and galois those run again that use them, or all if
    there are posargs, or in the nightly session.
    """
    skip_where_unsupported(session, package)
    if package == "leto-ec-alone":  # leto-ec must install and work where there is no torch
        pytest(session, environment(session, "alone", packages=("leto-ec",), extras=("test",)), "leto-ec")
    else:
        python = environment(session)
        if package == "leto-ec" and shutil.which("cc"):  # the wheel falls back to numpy if the C code fails
            run(
                session,
                python,
                "-c",
                "import leto_ec; assert leto_ec.info()['native'], leto_ec.info()['why']",
            )
        if package == "leto-shadow" and shutil.which("cc"):  # the wheel installs without its hook as well
            check = "from leto_shadow import oom_hook; assert not (why := oom_hook.unavailable()), why"
            run(session, python, "-c", check)
        files = with_other_libraries("leto-ec") if package == "leto-ec" and not session.posargs else ()
        pytest(session, python, package, files=files)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install("-q", "-c", "constraints.txt", "ruff")
    session.run("ruff", "check", *(session.posargs or ["."]))
    session.run("ruff", "format", "--check", *(session.posargs or ["."]))


@nox.session(venv_backend="none")
def typing(session: nox.Session) -> None:
    """Check the types of every package, mypy strict."""
    python = environment(session, tools=("mypy",))
    for package in session.posargs or supported_packages():
        run(session, python, "-m", "mypy", "--strict", f"packages/{package}/src")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html, warnings as errors, and run its examples."""
    python = environment(session, tools=DOCS_TOOLS)
    run(session, python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html")
    pytest(session, python, "docs")


@nox.session(venv_backend="none", default=False)
def demo(session: nox.Session) -> None:
    """Train a real GPT through four failures and prove the result exact: `nox -s demo -- --seed 7`."""
    skip_where_unsupported(session, "leto-megatron")
    run(session, environment(session), "-m", "leto_megatron.demo", *session.posargs)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks of all packages or of those named: `nox -s bench -- ec rmu`."""
    names = [f"leto-{name.removeprefix('leto-')}" for name in session.posargs] or supported_packages()
    found = [str(folder) for name in names if (folder := ROOT / "packages" / name / "benchmarks").is_dir()]
    if not found:
        session.error(f"expected a folder benchmarks in one of {', '.join(names)}")
    options = ("-o", "python_files=bench_*.py", "-o", "timeout=1800", "--benchmark-only")
    python = environment(session, extras=("test", "oracle", "bench"))
    run(session, python, "-m", "pytest", *options, *found)


@nox.session(venv_backend="none", default=False)
def fuzz(session: nox.Session) -> None:
    """Fuzz the native kernels of leto-ec for half a minute with libFuzzer: `nox -s fuzz -- --seconds 600`."""
    target = ROOT / "packages" / "leto-ec" / "fuzz" / "run.py"
    if shutil.which("clang") is None:
        session.skip("needs clang; with another compiler run packages/leto-ec/fuzz/run.py --standalone")
    session.run(sys.executable, str(target), *session.posargs, external=True)
    arm, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64 -L /usr/aarch64-linux-gnu"
    if shutil.which(arm) and shutil.which("qemu-aarch64"):
        options = ("--standalone", arm, "--emulator", emulator, "--runs", "300")
        session.run(sys.executable, str(target), *options, external=True)


@nox.session(venv_backend="none", default=False)
@each_package
def minimums(session: nox.Session, package: str) -> None:
    """Test with the lowest supported dependencies; `-- torch` includes torch, a large download."""
    skip_where_unsupported(session, package)
    with_torch = session.posargs == ["torch"]
    lowest = [lowest_version(requirement) for requirement in third_party(supported_packages(), extras=())]
    pins = [pin for pin in lowest if with_torch or not pin.startswith("torch==")]
    name = "minimums-torch" if with_torch else "minimums"
    python = environment(session, name, tools=pins, constrained=not with_torch)
    pytest(session, python, package, posargs=False)


@nox.session(venv_backend="none", default=False)
@each_package
def gpu(session: nox.Session, package: str) -> None:
    """Run the tests that need a CUDA device."""
    skip_where_unsupported(session, package)
    # Without CuPy and cuda-bindings most of them would skip.
    python = environment(session, "gpu", extras=("test", "oracle", "cuda"))
    pytest(session, python, package, "-m", "gpu")


@nox.session(venv_backend="none", default=False)
@each_package
def nightly(session: nox.Session, package: str) -> None:
    """Run the long tests that CI leaves out."""
    skip_where_unsupported(session, package)
    python = environment(session)
    pytest(session, python, package, "-m", "nightly", "-o", "timeout=3600")
    if package == "leto-ec":
        pytest(session, python, package)


# ------------------------------------------------------------------------------------------------- running


def run(session: nox.Session, python: Path, *arguments: str, codes: Iterable[int] = (0,)) -> None:
    """Run `python arguments` with the environment's commands first on PATH, as after activating it."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    env = {"PATH": path, "VIRTUAL_ENV": str(python.parent.parent), "PYTHONPATH": None}
    session.run(str(python), *arguments, env=env, external=True, success_codes=list(codes))


def pytest(
    session: nox.Session,
    python: Path,
    package: str,
    *options: str,
    files: Iterable[Path] = (),
    posargs: bool = True,
) -> None:
    """Run the tests of `package`, or `files`; a selection (options or posargs) may leave it without any."""
    folder = ROOT / "docs" / "tests" if package == "docs" else ROOT / "packages" / package / "tests"
    if not any(folder.rglob("test_*.py")):
        session.log(f"{package} has no tests")
        return
    selection = [*options, *(session.posargs if posargs else ())]
    codes = (0, 5) if selection else (0,)  # 5: nothing was collected
    command = ("-m", "pytest", *(str(path.relative_to(ROOT)) for path in (tuple(files) or (folder,))))
    if any(option.startswith("-m") for option in selection):
        run(session, python, *command, *selection, codes=codes)
        return
    # xdist cannot benchmark; tests do not, and bench runs without it
    beside = ("-n", "2", "--benchmark-disable") if package in PARALLEL else ()
    expression = "not nightly and not gpu and not job"
    run(session, python, *command, *beside, "-m", expression, *selection, codes=codes)
    if package in WITH_JOBS:
        run(session, python, *command, "-m", "not nightly and not gpu and job", *selection, codes=codes)


def with_other_libraries(package: str) -> list[Path]:
    """The test files of `package` some of whose tests are skipped where an optional library is missing."""
    found = sorted((ROOT / "packages" / package / "tests").glob("test_*.py"))
    return [path for path in found if "importorskip(" in path.read_text(encoding="utf-8")]


def skip_where_unsupported(session: nox.Session, package: str) -> None:
    if package == "leto-megatron" and package not in supported_packages():
        session.skip("needs Python 3.11 or 3.12: megatron-core 0.16 has no wheels for later ones")


def supported_packages() -> tuple[str, ...]:
    return tuple(name for name in PACKAGES if name != "leto-megatron" or sys.version_info < (3, 13))


# -------------------------------------------------------------------------------------------- environments


def environment(
    session: nox.Session,
    name: str = "shared",
    *,
    packages: Iterable[str] | None = None,
    extras: Iterable[str] = ("test", "oracle"),
    tools: Iterable[str] = (),
    constrained: bool = True,
) -> Path:
    """Bring the environment `name` up to date and return its Python.

    It holds the dependencies of `packages` (default: all supported ones) with their `extras`, the test tools,
    `tools`, and the wheels of `packages`. What is there already is left alone: no change, no cost.
    """
    packages = tuple(packages or supported_packages())
    home = session.cache_dir.parent / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin" / "python"
    made = home / "made"  # last: who is interrupted leaves a python that installs into another environment
    if not made.exists():
        session.run_install(sys.executable, "-m", "virtualenv", "-q", "--clear", str(home), external=True)
        made.touch()
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "--no-input")

    # All at once: a resolver that sees every requirement and the pinned torch cannot be led to another torch.
    wanted = sorted({*third_party(packages, extras), *TEST_TOOLS, *tools})
    pins = ROOT / "constraints.txt"
    done = home / digest_of([pins.read_bytes(), *(requirement.encode() for requirement in wanted)])
    if not done.exists():
        constraints = ("-c", str(pins)) if constrained else ()
        session.run_install(*pip, "install", "-q", "--no-compile", *constraints, *wanted, external=True)
        # pip would use one core for it; nobody imports folders of tests. 1: some files are templates.
        compile_all = ("-m", "compileall", "-qq", "-j", "2", "-x", "/tests/", str(home / "lib"))
        session.run_install(str(python), *compile_all, external=True, success_codes=[0, 1])
        done.touch()

    # Always anew and without dependencies: a wheel changes with every edit, its version number does not.
    wheels = {package: wheel_of(session, python, package) for package in packages}
    stamps = {package: digest_of([wheel.read_bytes()]) for package, wheel in wheels.items()}
    stale = [package for package in packages if not says(home / package, stamps[package])]
    if stale:
        files = [str(wheels[package]) for package in stale]
        for package in stale:
            (home / package).unlink(missing_ok=True)  # first: from here on nobody knows what is installed
        session.run_install(*pip, "install", "-q", "--force-reinstall", "--no-deps", *files, external=True)
        session.run_install(*pip, "check", silent=True, external=True)
        for package in stale:
            (home / package).write_text(stamps[package])
    return python


def wheel_of(session: nox.Session, python: Path, package: str) -> Path:
    """Build the wheel of `package` into .nox/wheelhouse/<package>, if the sources have changed since."""
    folder = ROOT / "packages" / package
    house = session.cache_dir.parent / "wheelhouse" / package
    sources = sorted(path for path in folder.rglob("*") if path.is_file() and is_source(path, folder))
    key = digest_of(part for path in sources for part in (str(path).encode(), path.read_bytes()))
    if not says(house / "sources", key):
        house.mkdir(parents=True, exist_ok=True)
        (house / "sources").unlink(missing_ok=True)  # first: it vouches for the wheel
        for old in house.iterdir():
            old.unlink()
        pip = (str(python), "-m", "pip", "--disable-pip-version-check", "--no-input")
        # Machine code for GPUs needs a compiler from wheels of a hundred megabytes: not where no GPU is.
        env = {} if has_gpu() else {"LETO_EC_NO_CUBINS": "1", "LETO_RMU_NO_CUBINS": "1"}
        command = (*pip, "wheel", "-q", "--no-deps", "-w", str(house), str(folder))
        session.run_install(*command, env=env, external=True)
        (house / "sources").write_text(key)
    (wheel,) = house.glob("*.whl")
    return wheel


def is_source(path: Path, folder: Path) -> bool:
    others = {"tests", "benchmarks", "examples", "fuzz", "__pycache__", "build", "dist", "_skbuild"}
    return not others.intersection(path.relative_to(folder).parts) and path.suffix != ".so"


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def says(stamp: Path, text: str) -> bool:
    return stamp.exists() and stamp.read_text() == text


def third_party(packages: Iterable[str], extras: Iterable[str]) -> list[str]:
    """What `packages` and these of their extras require, by pyproject.toml; Leto's own packages left out."""
    found: set[str] = set()
    for package in packages:
        project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]
        found.update(project.get("dependencies", ()))
        for extra in extras:
            found.update(project.get("optional-dependencies", {}).get(extra, ()))
    return sorted(requirement for requirement in found if not requirement.startswith("leto-"))


def lowest_version(requirement: str) -> str:
    """`numpy>=1.26,<3` -> `numpy==1.26`; a requirement without a lower bound stays as it is."""
    name, bound, rest = requirement.partition(">=")
    return f"{name}=={rest.split(',')[0]}" if bound else requirement


def digest_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
