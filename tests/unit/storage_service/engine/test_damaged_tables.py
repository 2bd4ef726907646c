"""One damaged table is out of use and says why; the others are served as if it were not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    TableDamagedError,
    TableExistsError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.server.service_tables import ServiceTables
from tests.support.in_process_service import (
    event_rows,
    in_process_service,
    open_manager,
    table_descriptor,
)

PATH = TablePath("default", "events")


async def _two_tables(data_dir: Path, *, key: tuple[str, ...] = ()) -> Path:
    """Make `events` and `other`, with rows; return the directory of `events`."""
    async with in_process_service(data_dir) as service:
        await service.create_table("events", primary_key=key)
        await service.create_table("other")
        if not key:
            await service.append([(0, 0, event_rows(0, 5))])
        await service.append([(0, 0, event_rows(5, 9))], path="other")
    return data_dir / "tables" / "1"


def _cut_log(table: Path) -> None:
    log = table / "bucket-0" / f"{0:020d}.log"
    log.write_bytes(log.read_bytes()[:-8])


def _break_lake_state(table: Path) -> None:
    (table / "lake.json").write_text("{")


def _break_header(table: Path) -> None:
    log = table / "bucket-0" / f"{0:020d}.log"
    log.write_bytes(b"XXXX" + log.read_bytes()[4:])


@pytest.mark.parametrize("damage", [_cut_log, _break_lake_state, _break_header])
async def test_the_other_tables_are_served(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(await _two_tables(tmp_path))

    async with in_process_service(tmp_path) as service:
        answer = await service.append([(0, 0, event_rows(9, 12))], path="other")
        assert answer.json()["buckets"] == {"0": [4, 7]}
        fetched = await service.call(
            "GET", "/v1/tables/other/buckets/0/fetch", query={"offset": "0"}
        )
        assert fetched.status == 200
        listed = (await service.call("GET", "/v1/tables")).json()["tables"]
        assert listed == ["default.events", "default.other"]

        status = (await service.call("GET", "/v1/status")).json()
        assert [table["table"] for table in status["tables"]] == ["default.other"]
        (damaged,) = status["damaged_tables"]
        assert damaged["table"] == "default.events"
        assert damaged["code"] == "corrupt_data"
        assert str(tmp_path) in damaged["reason"]
        metrics = (await service.call("GET", "/metrics")).body.decode()
        assert (
            'streamhouse_damaged_table{code="corrupt_data",table="default.events"} 1.0' in metrics
        )
        assert "streamhouse_damaged_tables 1.0" in metrics


@pytest.mark.parametrize("key", [(), ("id",)])
async def test_every_call_that_names_a_damaged_table_says_why(
    tmp_path: Path, key: tuple[str, ...]
) -> None:
    _break_header(await _two_tables(tmp_path, key=key))
    routes = [
        ("GET", "", None),
        ("GET", "/state", None),
        ("GET", "/offsets?timestamp_us=0", None),
        ("GET", "/buckets/0/fetch?offset=0", None),
        ("GET", "/subscribe?start=earliest", None),
        ("GET", "/count", None),
        ("GET", "/rows/1", None),
        ("GET", "/sizes", None),
        ("GET", "/lake/pins", None),
        ("DELETE", "", None),
        ("POST", "/lookup", None),
        ("POST", "/upsert", None),
        ("POST", "/append", None),
        ("GET", "/transactions", None),
        ("POST", "/transactions", {"operation": "append"}),
        ("PATCH", "/properties", {"set": {"table.log.ttl": "1d"}}),
        ("PATCH", "/schema", {"changes": [{"add": "n", "type": "int"}]}),
        ("PUT", "/partitioning", {"partitioned_by": []}),
    ]

    async with in_process_service(tmp_path) as service:
        for method, route, body in routes:
            path, _, query = route.partition("?")
            answer = await service.call(
                method,
                f"/v1/tables/default.events{path}",
                query=dict([query.split("=")]) if query else None,
                json_body=body,
            )
            status, code, message = answer.error()
            assert (status, code) == (500, "table_damaged"), (method, route, message)
            assert message.startswith("table 'default.events' is unavailable: ")
            assert answer.json()["error"]["retriable"] is False
        claim = {"worker_id": "w", "tables": ["default.events"], "force": True}
        answer = await service.call("POST", "/v1/tiering/claim", json_body=claim)
        assert answer.error()[1] == "table_damaged"
        claim["tables"] = ["default.events", "default.other"]
        answer = await service.call("POST", "/v1/tiering/claim", json_body=claim)
        assert answer.json()["assignment"]["state"]["table"]["path"] == "default.other"
        # Its lake tables are its own, and nobody's to take.
        with pytest.raises(TableDamagedError):
            ServiceTables(service.service).with_id(1)
        with pytest.raises(TableDamagedError):
            ServiceTables(service.service).named("default.events")


async def test_a_backup_has_what_is_damaged_as_it_is(tmp_path: Path) -> None:
    table = await _two_tables(tmp_path / "data")
    _break_header(table)
    (tmp_path / "data" / "tables" / "lost").mkdir()

    async with in_process_service(tmp_path / "data") as service:
        answer = await service.call("POST", "/v1/admin/backup", json_body={"with_lake": False})
        assert answer.status == 201, answer.body
        assert [found["table"] for found in answer.json()["damaged_tables"]] == ["default.events"]
        status = (await service.call("GET", "/v1/status")).json()
        assert len(status["strangers"]) == 1

    staged = tmp_path / "data" / "backup.staged"
    assert (staged / "tables" / "1" / "bucket-0" / f"{0:020d}.log").read_bytes() == (
        table / "bucket-0" / f"{0:020d}.log"
    ).read_bytes()
    staged.rename(tmp_path / "restored")
    async with in_process_service(tmp_path / "restored") as service:
        status = (await service.call("GET", "/v1/status")).json()
        assert [found["table"] for found in status["damaged_tables"]] == ["default.events"]
        state = (await service.call("GET", "/v1/tables/other/state")).json()
        assert state["positions"]["0"]["high_watermark"] == 4


async def test_the_strict_service_does_not_start(tmp_path: Path) -> None:
    _break_header(await _two_tables(tmp_path))

    with pytest.raises(CorruptDataError, match=r"table 'default\.events' cannot be opened: .*SHLG"):
        async with in_process_service(tmp_path, is_strict=True):
            pass
    async with in_process_service(tmp_path):
        pass


async def test_a_mended_table_is_served_from_the_next_start_on(tmp_path: Path) -> None:
    table = await _two_tables(tmp_path)
    log = table / "bucket-0" / f"{0:020d}.log"
    whole = log.read_bytes()
    _break_header(table)
    async with in_process_service(tmp_path):
        pass

    log.write_bytes(whole)

    async with in_process_service(tmp_path) as service:
        state = (await service.call("GET", "/v1/tables/events/state")).json()
        assert state["positions"]["0"]["high_watermark"] == 5


async def test_a_damaged_table_is_given_up_by_name_only_and_its_files_stay(tmp_path: Path) -> None:
    _break_header(await _two_tables(tmp_path))

    async with open_manager(tmp_path) as manager:
        with pytest.raises(TableExistsError, match="already exists, and is damaged"):
            await manager.create_table(table_descriptor("events"))
        with pytest.raises(InvalidRequestError, match="is not damaged"):
            await manager.drop_damaged(TablePath("default", "other"))
        await manager.drop_damaged(PATH)
        assert manager.damaged_tables() == []
        await manager.create_table(table_descriptor("events"))
    async with open_manager(tmp_path) as manager:
        assert manager.damaged_tables() == []
        assert [str(path) for path in manager.list_tables(None)] == [
            "default.events",
            "default.other",
        ]
        assert manager.table(PATH).info.table_id == 3
    assert (tmp_path / "tables" / "1.given-up" / "bucket-0" / f"{0:020d}.log").exists()
