"""Expired snapshots and orphans: what goes, and whose files never do."""

from __future__ import annotations

import time
from pathlib import Path

from streamhouse.lake.files.lake_filesystem import file_identity
from tests.support.log_table_world import LogTableWorld

SHORT = {
    "table.datalake.snapshot.max-age": "1ms",
    "table.datalake.snapshot.min-count": "2",
    "table.datalake.orphan.min-age": "1h",
}


def _lake_files(lake: LogTableWorld) -> set[str]:
    return {
        f"file://{path}"
        for path in (lake.tiering.folder / "warehouse").rglob("*")
        if path.is_file()
    }


def test_old_snapshots_are_expired_and_their_files_deleted(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=SHORT)
    lake.tier_small_files(12)

    report = lake.tiering.maintain(policy=lake.tiering.on_demand())

    assert report.expired.snapshots == 11
    assert report.expired.failed_files == 0
    table = lake.tiering.lake_table()
    assert len(table.metadata.snapshots) == 2
    lake.check()
    for snapshot in table.metadata.snapshots:
        assert table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows == 120


def test_all_files_that_are_left_belong_to_a_snapshot(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties={**SHORT, "table.datalake.snapshot.min-count": "1"})
    lake.tier_small_files(12)

    lake.tiering.maintain(policy=lake.tiering.on_demand())

    assert [path.name for path in lake.tiering.orphans()] == []
    avro = {path for path in _lake_files(lake) if path.endswith(".avro")}
    snapshot = lake.tiering.lake_table().current_snapshot()
    assert snapshot is not None
    manifests = {m.manifest_path for m in snapshot.manifests(lake.tiering.lake_table().io)}
    assert avro == {snapshot.manifest_list, *manifests}


def test_age_counts_from_when_a_snapshot_was_replaced(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties={**SHORT, "table.datalake.snapshot.max-age": "1h"})
    lake.tier_rows(10)
    lake.tier_rows(10)
    lake.tier_rows(10)
    table = lake.tiering.lake_table()
    last_ms = table.metadata.snapshots[-1].timestamp_ms
    replaced_ms = table.metadata.snapshots[1].timestamp_ms
    hour_ms = 3_600_000

    early = lake.tiering.maintainer(clock_ms=lambda: replaced_ms + hour_ms)
    assert lake.tiering.maintain(early, policy=lake.tiering.on_demand()).expired.snapshots == 0
    late = lake.tiering.maintainer(clock_ms=lambda: last_ms + hour_ms + 1)
    assert lake.tiering.maintain(late, policy=lake.tiering.on_demand()).expired.snapshots == 2


def test_pinned_tagged_and_branched_snapshots_stay_readable(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=SHORT)
    ids = [lake.tier_rows(10).snapshot_id for _ in range(12)]
    lake.tiering.service.pin_snapshot("db.t", ids[3], holder="reader")
    with lake.tiering.lake_table().manage_snapshots() as change:
        change.create_tag(ids[5], "audit")
        change.create_branch(ids[6], "test")

    lake.tiering.maintain(policy=lake.tiering.on_demand())

    table = lake.tiering.lake_table()
    kept = [snapshot.snapshot_id for snapshot in table.metadata.snapshots]
    assert kept[:3] == [ids[3], ids[5], ids[6]]
    assert len(kept) == 5
    for number in (3, 5, 6):
        assert table.scan(snapshot_id=ids[number]).to_arrow().num_rows == (number + 1) * 10

    lake.tiering.service.unpin_snapshot("db.t", holder="reader")
    assert lake.tiering.maintain(policy=lake.tiering.on_demand()).expired.snapshots == 1
    table = lake.tiering.lake_table()
    assert table.scan(snapshot_id=ids[5]).to_arrow().num_rows == 60
    lake.check()


def test_a_snapshot_pinned_while_it_expires_keeps_its_files(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=SHORT)
    ids = [lake.tier_rows(10).snapshot_id for _ in range(12)]
    planned = list(lake.tiering.lake_table().scan(snapshot_id=ids[4]).plan_files())

    def pin_meanwhile(step: str) -> None:
        if step == "snapshots-expired":
            lake.tiering.service.pin_snapshot("db.t", ids[4], holder="reader")

    lake.tiering.maintain(
        lake.tiering.maintainer(checkpoint=pin_meanwhile), policy=lake.tiering.on_demand()
    )

    assert all(Path(t.file.file_path.removeprefix("file://")).exists() for t in planned)


def test_orphans_go_when_they_are_old_and_nothing_else_does(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=SHORT)
    lake.tier_small_files(3)
    data = next(iter((lake.tiering.folder / "warehouse").rglob("*.parquet"))).parent.parent
    metadata = data.parent / "metadata"
    strangers = [
        data / "lost.parquet",
        metadata / "lost-m0.avro",
        data / "round-000001-x" / "b.parquet",
    ]
    notes = data / "README.txt"
    for path in (*strangers, notes):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")

    assert lake.tiering.maintain(policy=lake.tiering.on_demand()).orphans.files == 0

    later = lake.tiering.maintainer(clock_ms=lambda: _now_ms() + 7_200_000)
    plan = later.plan(lake.tiering.open(), lake.tiering.on_demand(), path="db.t")
    assert plan.orphans >= 3
    report = lake.tiering.maintain(later, policy=lake.tiering.on_demand())

    assert report.orphans.files == plan.orphans
    assert not any(path.exists() for path in strangers)
    assert notes.exists()
    lake.check()


def test_files_named_in_another_style_are_no_orphans() -> None:
    assert file_identity("file:///a/b") == file_identity("file:/a/b") == file_identity("/a/b")
    assert file_identity("s3://a/b") == file_identity("s3a://a/b") != file_identity("/a/b")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
