"""What every package says of itself: the same licence, complete metadata, one version, typed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def version_of(folder: Path) -> str:
    (file,) = folder.glob("src/*/_version.py")
    found = re.search(r'__version__ = "(.+)"', file.read_text(encoding="utf-8"))
    assert found, f"{file} has no version"
    return found.group(1)


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_package_is_complete(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == folder.name
    assert project["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()  # wheels take it from here
    assert {"authors", "classifiers", "description", "keywords", "readme"} <= set(project)
    assert "Typing :: Typed" in project["classifiers"]
    assert list(folder.glob("src/*/py.typed"))
    changelog = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{version_of(folder)}]\n" in changelog

    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    requirements = [one for group in groups for one in group]
    unbounded = [one for one in requirements if not re.search(r"[>=]=", one)]
    assert not unbounded, "every dependency has a lowest version"
    versions = {other.name: version_of(other) for other in PACKAGES}
    for one in requirements:
        if (found := re.fullmatch(r"(leto-\w+)(?:\[\w+\])?>=(\d+\.\d+),<(\d+\.\d+)", one)) is not None:
            low, high = ([int(part) for part in bound.split(".")] for bound in found.group(2, 3))
            now = [int(part) for part in versions[found.group(1)].split(".")[:2]]
            assert low <= now < high, f"{folder.name} accepts {one}, which is not the one beside it"
        else:
            assert not one.startswith("leto-"), f"{one}: packages accept each other in a compatible range"
