"""Drill files: what is accepted, and that every mistake is named with its place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leto_shadow.drills import MAX_NUMBER, Drill, DrillError, Lose, dump_drills, load_drills, parse_drills

GOOD: dict[str, Any] = {
    "id": "torn",
    "kind": "kill",
    "rank": 1,
    "iteration": 7,
    "point": "update",
    "group": 0,
    "chunk": 2,
    "op": "update",
    "seed": 5,
    "lose": {"allocation": "arena", "group": 0, "pages": "tolerance", "tier1": 1},
}


def parse_one(world_size: int | None = 2, **changes: Any) -> Drill:
    entry = {**GOOD, **changes}
    entry = {key: value for key, value in entry.items() if value is not ...}
    (drill,) = parse_drills(json.dumps([entry]), source="file.json", world_size=world_size)
    return drill


def test_a_full_drill_is_read_and_written_back() -> None:
    drill = parse_one()
    assert drill.lose == Lose("arena", 0, "tolerance", 1)
    assert parse_drills(dump_drills([drill])) == (drill,)


def test_the_shortest_drill() -> None:
    (drill,) = parse_drills('[{"id": "a", "kind": "hang", "rank": 0, "iteration": 3}]')
    assert drill == Drill("a", "hang", 0, 3, "forward")
    assert parse_drills("[]") == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "explode"}, r"Invalid enum value 'explode'.*kind"),
        ({"kind": ...}, r"missing required field `kind`"),
        ({"rank": "one"}, r"Expected `int`.*rank"),
        ({"rank": 2}, r"there is no rank 2 \(this job has ranks 0 to 1\)"),
        ({"rank": -1}, r"there is no rank -1"),
        ({"iteration": -1}, r"iteration must be 0 to \d+, found a negative number"),
        ({"chunk": -4}, r"chunk must be 0 to \d+, found a negative number"),
        ({"typo": 1}, r"unknown field `typo`"),
        ({"id": ""}, r"id must be"),
        ({"id": "../../x"}, r"id must be"),
        ({"point": "no such place"}, r"point 'no such place' is no valid name"),
        ({"point": "forward"}, r"narrow the point 'update' only"),
        ({"kind": "kill_manager", "lose": ...}, r"not inside the update"),
        (
            {"kind": "kill_manager", "point": "forward", "group": ..., "chunk": ..., "op": ...},
            r"leave 'lose' out",
        ),
        ({"lose": {"allocation": "arena", "pages": "all"}}, r"lose.pages"),
        ({"lose": {"allocation": "arena", "pages": -3}}, r"lose.pages must be 0 to"),
        ({"lose": {"allocation": ""}}, r"must name an allocation"),
        ({"lose": {}}, r"missing required field `allocation`"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DrillError, match=message) as caught:
        parse_one(**changes)
    assert str(caught.value).startswith("file.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [MAX_NUMBER + 1, 2**64, 2**64 - 1, 10**40, 10**4000, -1])
@pytest.mark.parametrize(
    "where", ["rank", "iteration", "group", "chunk", "seed", "lose.group", "lose.pages", "lose.tier1"]
)
def test_numbers_are_bounded(where: str, size: int) -> None:
    """What passes fits everything that it travels through; msgpack holds 64 bits."""
    outer, _, inner = where.partition(".")
    changes: dict[str, Any] = {outer: {**GOOD["lose"], inner: size} if inner else size}
    with pytest.raises(DrillError, match=r"^file.json: ") as caught:
        parse_one(world_size=None, **changes)
    assert len(str(caught.value)) < 300
    largest = {outer: {**GOOD["lose"], inner: MAX_NUMBER} if inner else MAX_NUMBER}
    drill = parse_one(world_size=None, **largest)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(drill), type=Drill) == drill


def test_ids_must_differ() -> None:
    with pytest.raises(DrillError, match=r"drill 1: the id 'torn' is used twice"):
        parse_drills(json.dumps([GOOD, GOOD]))


@pytest.mark.parametrize("text", ["", "{", "\udcff", b"\xff\xfe", "3", '{"id": "a"}'])
def test_what_is_no_list_of_drills_is_refused(text: str | bytes) -> None:
    with pytest.raises(DrillError):
        parse_drills(text)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "drills.json"
    with pytest.raises(DrillError, match="cannot read the drill file: No such file"):
        load_drills(path)
    path.write_text(json.dumps([GOOD]))
    assert load_drills(path, world_size=2)[0].id == "torn"
    path.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(DrillError, match="more than"):
        load_drills(path)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A FIFO without a writer, or an endless device, must not hold up the start."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), Path("/dev/null"), tmp_path):
        with pytest.raises(DrillError, match="must be a regular file"):
            load_drills(path)


def test_matching_is_exact_where_the_drill_says_and_open_where_it_does_not() -> None:
    drill = parse_one(op=...)
    assert drill.matches("update", 7, 1, group=0, chunk=2, op="load")
    assert not drill.matches("update", 7, 1, group=0, chunk=1, op="load")
    assert not drill.matches("update", 7, 1)  # the drill wants a chunk, the point names none
    assert not drill.matches("update", 8, 1, group=0, chunk=2)
    assert not drill.matches("update", 7, 0, group=0, chunk=2)
    assert not drill.matches("forward", 7, 1, group=0, chunk=2)
