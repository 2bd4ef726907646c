"""Plans in several pages, incremental plans, and the delete files that other engines write."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.catalog import load_catalog
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.typedef import Record

from tests.support.foreign_deletes import (
    commit_compaction,
    commit_delete_files,
    deletion_vector,
    equality_delete_file,
    position_delete_file,
)
from tests.support.held_step import lower
from tests.support.hostile_metadata import rewrite_metadata
from tests.support.key_table_world import KeyTableWorld
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import TieringWorld

_KEYED: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("kind", pa.string(), nullable=False)]
)
_FOREIGN: Final = pa.schema([pa.field("id", pa.int64()), pa.field("n", pa.int64())])


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestWorld]:
    """A partitioned key table of many small files, with rows deleted in each round."""
    with (
        KeyTableWorld(tmp_path_factory.mktemp("pages")) as world,
        RestWorld(world.tiering, host="pages") as rest,
    ):
        world.create_key_table(_KEYED, bucket_count=2, partitioned_by=["truncate(1, kind)"])
        for start in range(0, 40, 8):
            world.upsert(*({"id": n, "kind": "abc"[n % 3]} for n in range(start, start + 12)))
            world.tiering.tier()
        yield rest


@pytest.fixture
def rest(tmp_path: Any) -> Iterator[RestWorld]:
    with TieringWorld(tmp_path) as world, RestWorld(world, host="foreign") as rest:
        rest.client().create_namespace("db")
        yield rest


def _foreign(rest: RestWorld, appends: int) -> Table:
    table = rest.client().create_table("db.t", _FOREIGN)
    for n in range(appends):
        table.append(pa.table({"id": [n], "n": [n]}, schema=_FOREIGN))
    return table


def _behind(rest: RestWorld) -> Table:
    """The table for changes that the service does not see."""
    return load_catalog(rest.world.catalog.name, **rest.world.catalog.properties).load_table("db.t")


def _call(rest: RestWorld, route: str, body: Any) -> dict[str, Any]:
    status, answer = rest.call("POST", f"namespaces/db/tables/t/{route}", body)
    assert status == 200, answer
    return answer


def _paths(answer: dict[str, Any]) -> list[str]:
    return [task["data-file"]["file-path"] for task in answer["file-scan-tasks"]]


def _files(table: Table, condition: str) -> list[tuple[str, list[str]]]:
    return sorted(
        (task.file.file_path, sorted(file.file_path for file in task.delete_files))
        for task in table.scan(row_filter=condition).plan_files()
    )


@given(
    files=st.integers(1, 6),
    manifests=st.integers(1, 4),
    references=st.integers(1, 9),
    judged=st.sampled_from([1, 20, 10**6]),
    condition=st.sampled_from(["true", "id < 20", "kind = 'a' or id > 30", "kind > 'b'", "false"]),
)
def test_the_pages_of_a_plan_are_the_plan(
    keyed: RestWorld, files: int, manifests: int, references: int, judged: int, condition: str
) -> None:
    condition = {"true": "id >= 0", "false": "id < 0"}.get(condition, condition)
    served = keyed.client(**{"scan-planning-mode": "server"}).load_table("db.t")
    with pytest.MonkeyPatch.context() as patch:
        lower(patch, "plan-files", files)
        lower(patch, "plan-manifests", manifests)
        lower(patch, "plan-references", references)
        lower(patch, "plan-judged", judged)
        paged = _files(served, condition)
        page = _call(keyed, "plan", {})
        assert len(_paths(page)) <= files
        assert "plan-tasks" in page
    assert paged == _files(keyed.client().load_table("db.t"), condition)
    assert len({path for path, _ in paged}) == len(paged)


def test_a_plan_goes_on_with_the_table_as_it_was(
    rest: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _foreign(rest, appends=4)
    before = sorted(task.file.file_path for task in table.scan().plan_files())
    lower(monkeypatch, "plan-files", 1)
    body = {"filter": {"type": "lt", "term": "n", "value": 9}, "select": ["n"]}
    page = _call(rest, "plan", body)
    paths = _paths(page)
    commit_compaction(table)
    with table.update_schema() as update:
        update.rename_column("n", "m")
    rest.reopen()
    while tasks := page.get("plan-tasks"):
        page = _call(rest, "tasks", {"plan-task": tasks[0]})
        assert page == _call(rest, "tasks", {"plan-task": tasks[0]})
        assert "status" not in page
        paths += _paths(page)
    assert sorted(paths) == before


def test_a_long_condition_makes_short_pages(rest: RestWorld) -> None:
    _foreign(rest, appends=20)
    values = [int(f"1{n:017}") for n in range(10_000)]
    long = {"type": "not-in", "term": "id", "values": values}
    condition = {"type": "and", "left": long, "right": long}
    condition = {"type": "and", "left": condition, "right": condition}
    page = _call(rest, "plan", {"filter": condition})
    assert 1 <= len(_paths(page)) <= 20
    assert len(json.dumps(page["file-scan-tasks"])) < 17 << 20


def _token(*parts: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode()


def test_a_plan_task_that_the_service_did_not_give_out_finds_nothing(
    rest: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _foreign(rest, appends=2)
    other = rest.client().create_table("db.other", _FOREIGN)
    lower(monkeypatch, "plan-files", 1)
    (task,) = _call(rest, "plan", {})["plan-tasks"]
    path, place, request = json.loads(base64.b64decode(task, b"-_"))
    assert table.metadata_location.endswith(path)
    name = path.removeprefix("metadata/")
    for wrong in (
        *("", "x", "\ud800", task[:-5], _token(), _token(path, place), _token(path, place, [])),
        _token({"a": 1, "b": 2, "c": 3}),
        *(_token(path, at, request) for at in ([0], [0, -1], ["0", 0], [0, 0, 0], [0, True], None)),
        *(
            _token(where, place, request)
            for where in (
                f"metadata/../metadata/{name}",
                f"../other/metadata/{other.metadata_location.rsplit('/', 1)[1]}",
                other.metadata_location,
                "metadata/live/..-0/x.metadata.json",
                "metadata/nothing.metadata.json",
                f"metadata/%2e%2e/{name}",
                None,
                [path],
            )
        ),
    ):
        status, answer = rest.call("POST", "namespaces/db/tables/t/tasks", {"plan-task": wrong})
        assert (status, answer["error"]["type"]) == (404, "NotFoundException"), wrong
        assert "plan the scan again" in answer["error"]["message"]
        assert "other" not in answer["error"]["message"]
    status, _ = rest.call("POST", "namespaces/db/tables/other/tasks", {"plan-task": task})
    assert status == 404
    for body in ({}, {"plan-task": 1}, {"plan-task": [task]}):
        status, answer = rest.call("POST", "namespaces/db/tables/t/tasks", body)
        assert (status, answer["error"]["message"]) == (400, "plan-task must be a text")
    status, answer = rest.call(
        "POST", "namespaces/db/tables/t/tasks", {"plan-task": _token(path, place, {"select": 1})}
    )
    assert (status, answer["error"]["message"]) == (400, "select must be of JSON type array")
    assert _paths(_call(rest, "tasks", {"plan-task": _token(path, [9, 9], {})})) == []


def test_a_table_dropped_and_made_again_has_no_part_of_the_old_plan(
    rest: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    _foreign(rest, appends=3)
    lower(monkeypatch, "plan-files", 1)
    page = _call(rest, "plan", {})
    rest.client().drop_table("db.t")
    body = {"plan-task": page["plan-tasks"][0]}
    for route, sent in (("plan", {}), ("tasks", body)):
        assert rest.call("POST", f"namespaces/db/tables/t/{route}", sent)[0] == 404
    _foreign(rest, appends=1)
    assert len(_paths(_call(rest, "plan", {}))) == 1
    assert not {*_paths(page)} & {*_paths(_call(rest, "plan", {}))}
    status, answer = rest.call("POST", "namespaces/db/tables/t/tasks", body)
    assert status == 404
    assert "plan the scan again" in answer["error"]["message"]


def test_a_scan_of_branches_tags_and_snapshots(rest: RestWorld) -> None:
    table = _foreign(rest, appends=3)
    first, second, last = (snapshot.snapshot_id for snapshot in table.snapshots())
    table.manage_snapshots().create_tag(first, "old").create_branch(second, "work").commit()
    served = rest.client(**{"scan-planning-mode": "server"}).load_table("db.t")
    for ref, count in (("old", 1), ("work", 2), ("main", 3)):
        for condition, ids in (("id >= 0", range(count)), ("id = 1", range(1, min(count, 2)))):
            rows = served.scan(condition).use_ref(ref).to_arrow()["id"].to_pylist()
            assert sorted(rows) == [*ids]
    for snapshot_id, count in ((first, 1), (second, 2), (last, 3)):
        assert len(_paths(_call(rest, "plan", {"snapshot-id": snapshot_id}))) == count


def test_an_incremental_scan_has_the_files_appended_between_two_snapshots(rest: RestWorld) -> None:
    table = _foreign(rest, appends=3)
    commit_compaction(table)
    table = rest.client().load_table("db.t")
    table.append(pa.table({"id": [7], "n": [7]}, schema=_FOREIGN))
    table.delete("id = 1")
    table.append(pa.table({"id": [8], "n": [8]}, schema=_FOREIGN))
    snapshots = [snapshot.snapshot_id for snapshot in table.snapshots()]
    for condition in (None, {"type": "gt", "term": "id", "value": 1}):
        for start, first in enumerate(snapshots):
            for last in snapshots[start + 1 :]:
                body = {
                    "start-snapshot-id": first,
                    "end-snapshot-id": last,
                    **({} if condition is None else {"filter": condition}),
                }
                local = table.incremental_append_scan(
                    from_snapshot_id_exclusive=first,
                    to_snapshot_id_inclusive=last,
                    **({} if condition is None else {"row_filter": "id > 1"}),
                )
                answer = _call(rest, "plan", body)
                files = [task.file.file_path for task in local.plan_files()]
                assert sorted(_paths(answer)) == sorted(files)
                assert answer["delete-files"] == []
    for start, end in ((2, 1), (1, 1)):
        body = {"start-snapshot-id": snapshots[start], "end-snapshot-id": snapshots[end]}
        status, answer = rest.call("POST", "namespaces/db/tables/t/plan", body)
        assert status == 400
        assert "is not an ancestor of end-snapshot-id" in answer["error"]["message"]


def test_equality_deletes_go_with_the_older_files(rest: RestWorld) -> None:
    table = _foreign(rest, appends=2)
    deletes = equality_delete_file(table, pa.table({"id": [0]}), partition=Record())
    judge = _behind(rest)
    commit_delete_files(judge, [deletes])
    rest.client().load_table("db.t").append(pa.table({"id": [0], "n": [5]}, schema=_FOREIGN))
    answer = _call(rest, "plan", {})
    (file,) = answer["delete-files"]
    assert (file["content"], file["equality-ids"]) == ("equality-deletes", [1])
    assert file["file-path"] == deletes.file_path
    references = [task.get("delete-file-references") for task in answer["file-scan-tasks"]]
    assert sorted(references, key=str) == [None, [0], [0]]
    newest = answer["file-scan-tasks"][references.index(None)]
    assert newest["data-file"]["file-path"] not in {
        task.file.file_path for task in table.scan().plan_files()
    }


def test_a_deletion_vector_stands_for_the_older_deletes_of_its_file(rest: RestWorld) -> None:
    table = _foreign(rest, appends=3)
    paths = sorted(task.file.file_path for task in table.scan().plan_files())
    judge = _behind(rest)
    deleted = [(path, 0) for path in paths]
    commit_delete_files(judge, [position_delete_file(judge, deleted, partition=Record())])
    vectors: list[DataFile] = [
        deletion_vector(judge, path, offset=4 + 40 * n, partition=Record())
        for n, path in enumerate(paths[:2])
    ]
    commit_delete_files(judge, vectors)
    answer = _call(rest, "plan", {})
    references = {}
    for task in answer["file-scan-tasks"]:
        (number,) = task["delete-file-references"]
        references[task["data-file"]["file-path"]] = answer["delete-files"][number]
    for n, path in enumerate(paths[:2]):
        file = references[path]
        assert (file["content"], file["file-format"]) == ("position-deletes", "puffin")
        assert file["referenced-data-file"] == path
        assert (file["content-offset"], file["content-size-in-bytes"]) == (4 + 40 * n, 40)
    assert references[paths[2]]["file-format"] == "parquet"
    assert "content-offset" not in references[paths[2]]


def test_very_many_delete_files_are_refused(
    rest: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _foreign(rest, appends=2)
    judge = _behind(rest)
    paths = [task.file.file_path for task in table.scan().plan_files()]
    commit_delete_files(
        judge, [position_delete_file(judge, [(path, 0)], partition=Record()) for path in paths]
    )
    lower(monkeypatch, "plan-delete-files", 1)
    status, answer = rest.call("POST", "namespaces/db/tables/t/plan", {})
    assert status == 501
    assert answer["error"]["message"] == (
        "a scan of lake table 'db.t' needs more than 1 delete files for 2 data files: compact the"
        " table, or plan locally"
    )


def test_a_plan_names_no_file_outside_the_table(rest: RestWorld) -> None:
    table = _foreign(rest, appends=1)
    outside = rest.client().create_table("db.other", _FOREIGN)
    outside.append(pa.table({"id": [1], "n": [1]}, schema=_FOREIGN))
    snapshot = outside.current_snapshot()
    assert snapshot is not None

    def spoil(metadata: dict[str, Any]) -> None:
        metadata["snapshots"][-1]["manifest-list"] = snapshot.manifest_list

    rewrite_metadata(rest.world.folder / "catalog.db", "db.t", spoil)
    status, answer = rest.call("POST", "namespaces/db/tables/t/plan", {})
    assert (status, answer["error"]["type"]) == (403, "ForbiddenException")
    assert "does not lie below the table's location" in answer["error"]["message"]
    assert table.name() == ("db", "t")
