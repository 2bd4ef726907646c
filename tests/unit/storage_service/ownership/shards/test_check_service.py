"""A check of all shards says what they and the directory do not agree on, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamhouse.cli import cli
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.directory.service_state import ServiceState, TableEntry
from streamhouse.storage_service.directory.state_file import StateIdentity, seal
from streamhouse.storage_service.operations.check_service import ServiceReport, check_service
from streamhouse.storage_service.operations.findings import Severity
from streamhouse.storage_service.ownership.journal._writer import JournalWriter, WriterOptions
from streamhouse.storage_service.ownership.journal.epochs import newest_epoch, take
from streamhouse.storage_service.ownership.journal.names import ShardNames
from streamhouse.storage_service.ownership.journal.operations import Replace
from streamhouse.storage_service.ownership.journal.steps import do, run
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.ownership.shards.chain import DirectoryObjects
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory, ShardRecord

_X, _Y, _Z = (TablePath("default", name) for name in "xyz")


class _World:
    """Shards `a`, which has x under id 1, and `b-1`, which has y under its first claimed id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = FileObjectStore(path)
        self.a, self.b = (
            ShardDirectory(DirectoryObjects(self.store), shard=shard) for shard in ("a", "b-1")
        )
        self.service_id, _ = self.a.join(None)
        self.b.join(None)
        self.y_id = self.b.claim_ids().first
        self.a.hold(_X, 1)
        self.b.hold(_Y, self.y_id)
        for directory, tables in ((self.a, {_X: 1}), (self.b, {_Y: self.y_id})):
            self.serve(directory.shard, tables)
            directory.record(ShardRecord(shard=directory.shard))

    def serve(self, shard: str, tables: Mapping[TablePath, int]) -> None:
        """Be the owner of a shard once, and say in its `service.json` that it has these tables."""
        names = ShardNames(shard)
        newest = run(newest_epoch(names), lambda step: do(self.store, step))
        steps = take(names, after=newest, endpoint="http://here", lease_ms=1_000, nonce=b"n" * 16)
        tenure = run(steps, lambda step: do(self.store, step))
        writer = JournalWriter(
            self.store, tenure, on_fenced=lambda why: None, options=WriterOptions(linger_ms=0)
        )
        state = ServiceState(tables={number: TableEntry(path) for path, number in tables.items()})
        identity = StateIdentity(kind="service", service_id=self.service_id)
        writer.record(Replace("service.json", seal(identity, state.to_json())))
        assert writer.stop(timeout_s=60)

    def check(self) -> ServiceReport:
        return check_service(self.store)

    def problem(self) -> str:
        """Return the one error there is."""
        report = self.check()
        assert not report.is_sound
        (found,) = [f for f in report.findings if f.severity is Severity.ERROR]
        return f"{found.where}: {found.problem}"


@pytest.fixture
def world(tmp_path: Path) -> _World:
    return _World(tmp_path / "store")


def test_shards_that_agree_are_sound(world: _World) -> None:
    report = world.check()

    assert report.is_sound
    assert report.findings == []
    assert [shard.shard for shard in report.shards] == ["a", "b-1"]
    assert report.names == 2


def test_a_table_in_two_shards_is_found(world: _World) -> None:
    world.serve("b-1", {_Y: world.y_id, _X: 1})

    assert world.problem() == (
        "table 'default.x': shard 'b-1' has it under id 1, but the directory says that shard 'a'"
        " has it under id 1"
    )


def test_a_table_without_a_name_is_found(world: _World) -> None:
    world.serve("a", {_X: 1, _Z: 2})

    assert "'a' has it under id 2, but the directory says that there is no such" in world.problem()


def test_an_id_of_two_tables_is_found(world: _World) -> None:
    world.a.hold(_Z, world.y_id)
    world.serve("a", {_X: 1, _Z: world.y_id})

    assert "it is of 2 tables: 'default.y', 'default.z'" in world.problem()


def test_an_id_that_nobody_claimed_is_found(world: _World) -> None:
    world.a.hold(_Z, 5_001)
    world.serve("a", {_X: 1, _Z: 5_001})

    assert "no shard ever claimed ids from 5000 on" in world.problem()


def test_a_name_of_a_shard_without_a_journal_is_found(world: _World) -> None:
    ShardDirectory(DirectoryObjects(world.store), shard="c").hold(_Z, 2)

    assert "shard 'c' has no journal, but the directory says it has 'default.z'" in world.problem()


def test_what_a_crash_leaves_is_no_error(world: _World) -> None:
    world.a.hold(_Z, 2)
    world.a.assign(TablePath("default", "w"), "d", is_live=lambda shard: False)
    report = world.check()

    assert report.is_sound
    assert sorted(finding.problem for finding in report.findings) == [
        "shard 'a' holds the name for no table: its next start frees it",
        "shard 'd' has no journal and no table: nobody ever served it",
    ]


def test_a_journal_whose_beginning_is_damaged_is_there(world: _World) -> None:
    world.serve("e", {})
    ShardDirectory(DirectoryObjects(world.store), shard="e").record(ShardRecord(shard="e"))
    (world.path / "shards/e/journal/00000001/000000000000").write_bytes(b"no object")

    report = world.check()

    assert [shard.shard for shard in report.shards if not shard.is_sound] == ["e"]
    assert report.findings == []


def test_a_shard_that_the_directory_has_lost_is_checked(world: _World) -> None:
    world.serve("e", {})
    (world.path / "shards/e/journal/00000001/000000000000").write_bytes(b"no object")

    report = world.check()
    assert [shard.shard for shard in report.shards if not shard.is_sound] == ["e"]
    assert not report.is_sound


@pytest.mark.parametrize(
    "key", ["service", "tables/default/y/00000001", "ids/00000001", "databases/d/00000001"]
)
def test_a_damaged_object_of_the_directory_is_found(world: _World, key: str) -> None:
    world.a.create_database("d")
    path = world.path / "directory" / key
    path.write_bytes(path.read_bytes().replace(b"crc32c", b"crc32d"))

    assert world.problem().startswith(f"directory/{key}: ")


def test_a_version_that_is_missing_is_found(world: _World) -> None:
    world.a.release(_X, 1)
    world.a.hold(_X, 1)
    (world.path / "directory/tables/default/x/00000002").unlink()

    assert "directory/tables/default/x/00000002: it is missing" in world.problem()


def test_the_command_checks_all_shards_or_one(world: _World) -> None:
    world.serve("b-1", {_Y: world.y_id, _X: 1})
    arguments = ["check", "--journal", f"file://{world.path}"]
    everything = CliRunner().invoke(cli, arguments)
    assert everything.exit_code == 1, everything.output
    assert "of shard 'b-1' is sound" in everything.output
    assert "is DAMAGED: 2 shards, 2 names in its directory, 1 findings" in everything.output
    one = CliRunner().invoke(cli, [*arguments, "--shard", "b-1"])
    assert one.exit_code == 0, one.output
    assert "of shard 'b-1' is sound" in one.output


def test_where_no_service_is_nothing_is_sound(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert not check_service(FileObjectStore(tmp_path / "none")).is_sound
