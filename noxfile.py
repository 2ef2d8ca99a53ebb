"""What can be done with this repository, one session each. `python3 -m nox --list` is the table of contents.

The packages are tested as a user gets them: each is built into a wheel once, the wheel is installed, and the
tests import that and nothing else. All sessions that need torch share one environment that has it, because
torch is by far the largest thing to install; constraints.txt says which torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typing", "tests", "docs"]

ROOT = Path(__file__).parent
PACKAGES = (
    "leto-ec",
    "leto-rmp",
    "leto-rmu",
    "leto-shadow",
    "leto-megatron",
    "leto-sim",
)  # dependencies first
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-benchmark", "hypothesis")
DOCS_TOOLS = ("sphinx", "furo", "myst-parser")


# ------------------------------------------------------------------------------------------------ sessions


@nox.session(venv_backend="none")
@nox.parametrize("package", [nox.param(name, id=name) for name in ("leto-ec-alone", *PACKAGES, "docs")])
def tests(session: nox.Session, package: str) -> None:
    """Test the built wheels, one package at a time: `nox -s "tests(leto-rmu)" -- -k marker`."""
    if package == "leto-ec-alone":  # the code must install and work where there is no torch
        pytest(session, environment(session, "alone", packages=("leto-ec",)), tests_of("leto-ec"))
    else:
        skip_where_unsupported(session, package)
        pytest(session, environment(session), tests_of(package))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install("-q", "-c", "constraints.txt", "ruff")
    session.run("ruff", "check", *(session.posargs or ["."]))
    session.run("ruff", "format", "--check", *(session.posargs or ["."]))


@nox.session(venv_backend="none")
def typing(session: nox.Session) -> None:
    """Check the types of every package, mypy strict."""
    python = environment(session, extra=("mypy",))
    for package in session.posargs or supported_packages():
        if any(source_of(package).glob("*.py")):
            run(session, python, "-m", "mypy", "--strict", str(source_of(package)))


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html, warnings as errors, and run its examples."""
    python = environment(session, extra=DOCS_TOOLS)
    run(session, python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html")
    pytest(session, python, tests_of("docs"))


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a real GPT through four failures and prove the result exact: `nox -s demo -- --seed 7`."""
    skip_where_unsupported(session, "leto-megatron")
    run(session, environment(session), "-m", "leto_megatron.demo", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run the benchmarks of all packages or of those named: `nox -s bench -- ec rmu`."""
    names = [f"leto-{name.removeprefix('leto-')}" for name in session.posargs] or list(supported_packages())
    folders = [ROOT / "packages" / name / "benchmarks" for name in names]
    found = [str(folder) for folder in folders if any(folder.glob("bench_*.py"))]
    if not found:
        session.error(
            f"expected bench_*.py in one of {[str(folder.relative_to(ROOT)) for folder in folders]}"
        )
    options = ("-o", "python_files=bench_*.py", "-o", "timeout=1800", "--benchmark-only")
    run(session, environment(session), "-m", "pytest", *options, *found)


@nox.session(venv_backend="none")
def minimums(session: nox.Session) -> None:
    """Test with the lowest supported dependencies; the lowest torch too only with `-- torch`, as it is large."""
    lowest = [low for low in map(lowest_version, third_party(supported_packages())) if low]
    with_torch = "torch" in session.posargs
    pins = [pin for pin in lowest if with_torch or not pin.startswith("torch==")]
    name = "minimums-torch" if with_torch else "minimums"
    python = environment(session, name, extra=pins, constrained=not with_torch)
    for package in supported_packages():
        pytest(session, python, tests_of(package), posargs=False)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device."""
    for package in supported_packages():
        pytest(session, environment(session), tests_of(package), "-m", "gpu")


@nox.session(venv_backend="none", default=False)
def nightly(session: nox.Session) -> None:
    """Run the long tests that CI leaves out."""
    for package in supported_packages():
        pytest(session, environment(session), tests_of(package), "-m", "nightly", "-o", "timeout=3600")


# ------------------------------------------------------------------------------------------------- running


def run(session: nox.Session, python: Path, *arguments: str, codes: Iterable[int] = (0,)) -> None:
    """Run `python arguments` with the environment's commands first on PATH, as after activating it."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    env = {"PATH": path, "VIRTUAL_ENV": str(python.parent.parent), "PYTHONPATH": None}
    session.run(str(python), *arguments, env=env, external=True, success_codes=list(codes))


def pytest(session: nox.Session, python: Path, folder: Path, *options: str, posargs: bool = True) -> None:
    """Run the tests in `folder`; a selection (options or posargs) may leave a package without a test."""
    if not any(folder.rglob("test_*.py")):
        session.skip(f"{folder.relative_to(ROOT)} has no tests")
    selection = [*options, *(session.posargs if posargs else ())]
    codes = (0, 5) if selection else (0,)  # 5: nothing was collected
    if not any(option.startswith("-m") for option in selection):
        selection = ["-m", "not nightly and not gpu", *selection]
    run(session, python, "-m", "pytest", str(folder.relative_to(ROOT)), *selection, codes=codes)


def skip_where_unsupported(session: nox.Session, package: str) -> None:
    if package == "leto-megatron" and package not in supported_packages():
        session.skip(
            "leto-megatron needs Python 3.11 or 3.12: megatron-core 0.16 has no wheels for later ones"
        )


def supported_packages() -> tuple[str, ...]:
    return tuple(name for name in PACKAGES if name != "leto-megatron" or sys.version_info < (3, 13))


def tests_of(package: str) -> Path:
    return ROOT / "docs" / "tests" if package == "docs" else ROOT / "packages" / package / "tests"


def source_of(package: str) -> Path:
    return ROOT / "packages" / package / "src" / package.replace("-", "_")


# -------------------------------------------------------------------------------------------- environments


def environment(
    session: nox.Session,
    name: str = "shared",
    *,
    packages: Iterable[str] | None = None,
    extra: Iterable[str] = (),
    constrained: bool = True,
) -> Path:
    """Bring the environment `name` up to date and return its Python.

    It holds the dependencies of `packages` (default: all supported ones), the test tools, `extra`, and the wheels
    of `packages`. What is there already is left alone, so this costs nothing when nothing has changed.
    """
    packages = tuple(packages or supported_packages())
    home = session.cache_dir.parent / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin" / "python"
    if not python.exists():
        session.run_install(sys.executable, "-m", "virtualenv", "-q", str(home), external=True)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "--no-input")

    # All at once: a resolver that sees every requirement and the pinned torch cannot be led to another torch.
    wanted = sorted({*third_party(packages), *TEST_TOOLS, *extra})
    constraints = ("-c", str(ROOT / "constraints.txt")) if constrained else ()
    stamp = home / f"installed-{digest_of([*wanted, *packages])}"
    key = digest_of([*wanted, (ROOT / "constraints.txt").read_text()])
    if not stamp.exists() or stamp.read_text() != key:
        session.run_install(*pip, "install", "-q", *constraints, *wanted, external=True)
        stamp.write_text(key)

    # No dependencies here, and always anew: a version number does not change with every edit, the wheel does.
    wheels = [wheel_of(session, python, package) for package in packages]
    stale = [wheel for wheel in wheels if not is_installed(home, wheel)]
    if stale:
        session.run_install(
            *pip,
            "install",
            "-q",
            "--force-reinstall",
            "--no-deps",
            *(str(wheel) for wheel in stale),
            external=True,
        )
        session.run_install(*pip, "check", silent=True, external=True)
        for wheel in stale:
            (home / f"wheel-{wheel.parent.name}").write_text(digest_of([wheel.read_bytes().hex()]))
    return python


def wheel_of(session: nox.Session, python: Path, package: str) -> Path:
    """Build the wheel of `package` into .nox/wheelhouse/<package>, if its sources have changed since the last time."""
    folder = ROOT / "packages" / package
    house = session.cache_dir.parent / "wheelhouse" / package
    stamp = house / "sources"
    sources = sorted(
        path for path in folder.rglob("*") if path.is_file() and is_source(path.relative_to(folder))
    )
    key = digest_of(f"{path.relative_to(folder)} {path.read_bytes().hex()}" for path in sources)
    if not stamp.exists() or stamp.read_text() != key or len(list(house.glob("*.whl"))) != 1:
        house.mkdir(parents=True, exist_ok=True)
        for old in house.iterdir():
            old.unlink()
        builder = (str(python), "-m", "pip", "wheel", "--disable-pip-version-check", "-q", "--no-deps")
        session.run_install(*builder, "-w", str(house), str(folder), external=True)
        stamp.write_text(key)
    (wheel,) = house.glob("*.whl")
    return wheel


def is_source(path: Path) -> bool:
    built = {"tests", "benchmarks", "__pycache__", "build", "dist", "_skbuild"}
    return not built.intersection(path.parts) and path.suffix not in {".so", ".pyc"}


def is_installed(home: Path, wheel: Path) -> bool:
    stamp = home / f"wheel-{wheel.parent.name}"
    return stamp.exists() and stamp.read_text() == digest_of([wheel.read_bytes().hex()])


def third_party(packages: Iterable[str]) -> list[str]:
    """The requirements of `packages` and of their tests, as their pyproject.toml files state them, without Leto's own."""
    found: set[str] = set()
    for package in packages:
        project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")
        found.update(project["project"].get("dependencies", []))
        found.update(nox.project.dependency_groups(project, "test") if "dependency-groups" in project else ())
    return sorted(requirement for requirement in found if not requirement.startswith("leto-"))


def lowest_version(requirement: str) -> str | None:
    """`numpy>=1.26` -> `numpy==1.26`; None where a requirement has no lower bound."""
    name, separator, rest = requirement.partition(">=")
    return f"{name.strip()}=={rest.split(',')[0].split(';')[0].strip()}" if separator else None


def digest_of(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
