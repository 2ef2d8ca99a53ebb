"""The demo's output folder: what an earlier demo left is replaced, what anybody else owns is not touched.

Role in the whole: `--out` may name any folder, also one that holds a project with a folder `leto/` of its
own. So each folder of a run carries a sentinel file from the moment it is made, and only such folders are
emptied; anything else in the way is an error before the first byte changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

__all__ = ["SENTINEL", "FolderTaken", "claim"]

SENTINEL = ".leto-demo-run"
_TEXT = "Made by the Leto demo: the next demo in this place deletes what is beside this file.\n"


class FolderTaken(RuntimeError):  # noqa: N818 (it is an outcome, and reads as one)
    """Something that no demo made is in the way; the message names it and says what to do."""


def claim(out: Path, folders: Sequence[str], files: Sequence[str]) -> list[Path]:
    """Make empty `folders` in `out`, which exists; return them. `files` will be overwritten later.

    Raises
    ------
    FolderTaken
        If a folder is in use without our sentinel, or a file exists beside no folder of ours. Nothing was
        changed then.
    """
    places = [out / name for name in folders]
    ours = [place for place in places if _is_ours(place)]
    taken = [place for place in places if place not in ours and not _is_free(place)]
    if not ours:
        taken += [out / name for name in files if (out / name).exists() or (out / name).is_symlink()]
    if taken:
        names = ", ".join(str(place) for place in taken)
        raise FolderTaken(
            f"expected only results of an earlier demo in {out}, found {names} without the demo's mark "
            f"({SENTINEL}): choose another folder with --out, or move that away yourself"
        )
    for place in places:
        place.mkdir(exist_ok=True)
        # First, and never removed: a demo killed while it empties the folder can be repeated.
        (place / SENTINEL).write_text(_TEXT)
        for entry in place.iterdir():
            if entry.name == SENTINEL:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    return places


def _is_free(place: Path) -> bool:
    """Not there, or an empty folder."""
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        return False
    return not place.exists() or not any(place.iterdir())


def _is_ours(place: Path) -> bool:
    sentinel = place / SENTINEL
    if place.is_symlink() or sentinel.is_symlink() or not sentinel.is_file():
        return False
    return sentinel.read_bytes() == _TEXT.encode()
