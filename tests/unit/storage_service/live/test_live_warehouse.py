"""The warehouse `live` as the server answers: names, grants, refusals, versions, shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import StaticTable

from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.held_step import lower
from tests.support.in_process_service import (
    InProcessService,
    event_rows,
    in_process_service,
    table_descriptor,
)
from tests.support.shard_world import ShardWorld

CATALOG = "/iceberg/v1"
LIVE = f"{CATALOG}/live"
TABLES = f"{LIVE}/namespaces/default/tables"
KEYED: dict[str, Any] = {"primary_key": ("id",), "properties": {"table.datalake.changelog": "true"}}


async def _names(service: InProcessService, path: str = TABLES) -> list[str]:
    answer = await service.call("GET", path)
    assert answer.status == 200, answer.body
    return sorted(identifier["name"] for identifier in answer.json()["identifiers"])


async def _ids(service: InProcessService, name: str = "events") -> list[int]:
    """The rows of a live table, as stock pyiceberg reads them."""
    answer = await service.call("GET", f"{TABLES}/{name}")
    assert answer.status == 200, answer.body
    table = StaticTable.from_metadata(answer.json()["metadata-location"])
    ids: list[int] = table.scan().to_arrow()["id"].to_pylist()
    return sorted(ids)


async def test_the_configuration_of_each_warehouse(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        configurations = [
            (await service.call("GET", f"{CATALOG}/config", query=query)).json()
            for query in ({"warehouse": "live"}, {"warehouse": "Live"}, {"warehouse": "other"}, {})
        ]
        live_prefix = {"prefix": "live"}
        assert [c["overrides"] for c in configurations] == [live_prefix, live_prefix, {}, {}]
        live, capital, other, none = ({*c["endpoints"]} for c in configurations)
        assert (live, other) == (capital, none)
        assert live < none
        changing = {endpoint for endpoint in live if not endpoint.startswith(("GET", "HEAD"))}
        table = "POST /v1/{prefix}/namespaces/{namespace}/tables/{table}"
        assert changing == {f"{table}/{route}" for route in ("metrics", "plan", "tasks")}
        service.app.close()


async def test_a_scan_of_a_live_table_is_planned_with_its_newest_rows(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        for start, end in ((0, 3), (3, 7)):
            await service.append([(0, 0, event_rows(start, end))])
            planned = await service.call("POST", f"{TABLES}/events/plan", json_body={})
            assert planned.status == 200, planned.body
            tasks = planned.json()["file-scan-tasks"]
            assert sum(task["data-file"]["record-count"] for task in tasks) == end
        for path in ("events$changelog", "nothing"):
            assert (await service.call("POST", f"{TABLES}/{path}/plan", json_body={})).status == 404
        for method in ("GET", "DELETE"):
            assert (await service.call(method, f"{TABLES}/events/plan/1")).status == 404
        service.app.close()


async def test_a_plan_of_a_live_table_goes_on_with_the_rows_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "plan-files", 1)
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=3)
        await service.append([(bucket, 0, event_rows(0, 2)) for bucket in range(3)])
        planned = await service.call("POST", f"{TABLES}/events/plan", json_body={})
        tasks = planned.json()["file-scan-tasks"]
        for start in (2, 3):
            (name,) = planned.json()["plan-tasks"]
            await service.append([(0, 0, event_rows(start, start + 1))])
            for table, status in (("other", 404), ("events", 200)):
                planned = await service.call(
                    "POST", f"{TABLES}/{table}/tasks", json_body={"plan-task": name}
                )
                assert planned.status == status, planned.body
            tasks += planned.json()["file-scan-tasks"]
        assert "plan-tasks" not in planned.json()
        assert [task["data-file"]["record-count"] for task in tasks] == [2, 2, 2]
        # The table of that name now is another one.
        assert (await service.call("DELETE", "/v1/tables/events")).status == 204
        await service.create_table(bucket_count=3)
        await service.append([(0, 0, event_rows(0, 1))])
        again = await service.call("POST", f"{TABLES}/events/tasks", json_body={"plan-task": name})
        assert again.status == 404
        assert "plan the scan again" in again.json()["error"]["message"]
        service.app.close()


async def test_the_current_snapshot_of_a_live_table_is_planned_by_its_id(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 3))])
        loaded = await service.call("GET", f"{TABLES}/events")
        written = sorted(tmp_path.glob("**/live/*/*"))
        body = {"snapshot-id": loaded.json()["metadata"]["current-snapshot-id"]}
        planned = await service.call("POST", f"{TABLES}/events/plan", json_body=body)
        assert len(planned.json()["file-scan-tasks"]) == 1
        # The load has written what the plan needs.
        assert written
        assert sorted(tmp_path.glob("**/live/*/*")) == written
        await service.append([(0, 0, event_rows(3, 4))])
        planned = await service.call("POST", f"{TABLES}/events/plan", json_body=body)
        assert planned.status == 404
        assert "has no snapshot" in planned.json()["error"]["message"]
        service.app.close()


async def test_every_table_of_the_service_is_listed_and_loaded(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.call("POST", "/v1/databases", json_body={"name": "empty"})
        await service.create_table()
        await service.create_table("keyed", **KEYED)
        await service.append([(0, 0, event_rows(0, 3))])

        namespaces = (await service.call("GET", f"{LIVE}/namespaces")).json()["namespaces"]
        assert namespaces == [["default"], ["empty"]]
        assert await _names(service) == ["events", "keyed", "keyed$changelog"]
        assert await _names(service, f"{LIVE}/namespaces/empty/tables") == []
        for name, status in {
            "events": 204,
            "keyed%24changelog": 204,
            "events%24changelog": 404,
            "keyed%24batch": 404,
            "nothing": 404,
        }.items():
            assert (await service.call("HEAD", f"{TABLES}/{name}")).status == status
            loaded = await service.call("GET", f"{TABLES}/{name}")
            assert loaded.status == (200 if status == 204 else 404)
            if status == 404:
                assert loaded.json()["error"]["type"] == "NoSuchTableException"
        for namespace, is_there in {"empty": True, "nowhere": False}.items():
            path = f"{LIVE}/namespaces/{namespace}"
            assert (await service.call("HEAD", path)).status == (204 if is_there else 404)
            assert (await service.call("GET", f"{path}/tables")).status == (
                200 if is_there else 404
            )
        assert await _ids(service) == [0, 1, 2]
        assert await _ids(service, "keyed%24changelog") == []
        # The other warehouse shows what was committed: nothing.
        assert await _names(service, f"{CATALOG}/namespaces/default/tables") == []
        service.app.close()


async def test_a_namespace_may_have_the_name_of_the_prefix(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.call("POST", "/v1/databases", json_body={"name": "live"})
        await service.create_table("live.namespaces")
        created = {"name": "own", "schema": {"type": "struct", "schema-id": 0, "fields": []}}
        namespaces = f"{CATALOG}/namespaces"
        made = await service.call("POST", namespaces, json_body={"namespace": ["live"]})
        assert made.status == 200
        made = await service.call("POST", f"{namespaces}/live/tables", json_body=created)
        assert made.status == 200, made.body

        # A table that is none of the service is in both warehouses.
        assert await _names(service, f"{namespaces}/live/tables") == ["own"]
        assert await _names(service, f"{LIVE}/namespaces/live/tables") == ["namespaces", "own"]
        for name in ("namespaces", "own"):
            loaded = await service.call("GET", f"{LIVE}/namespaces/live/tables/{name}")
            assert loaded.status == 200
        # A namespace of the catalog need not be a database.
        await service.call("POST", namespaces, json_body={"namespace": ["elsewhere"]})
        made = await service.call("POST", f"{namespaces}/elsewhere/tables", json_body=created)
        own = f"{LIVE}/namespaces/elsewhere/tables/own"
        assert (await service.call("GET", own)).status == 200
        assert (await service.call("POST", f"{own}/plan", json_body={})).status == 200
        service.app.close()


async def test_what_rounds_committed_of_a_dropped_table_is_in_the_other_warehouse_alone(
    tmp_path: Path,
) -> None:
    async with in_process_service(tmp_path) as service:
        own, plan = service.service.manager.service_id, {"case-sensitive": True}
        tables = f"{CATALOG}/namespaces/default/tables"
        await service.call("POST", f"{CATALOG}/namespaces", json_body={"namespace": ["default"]})
        for name, properties in {
            "dropped": {"streamhouse.table-id": "99", "streamhouse.service-id": own},
            "dropped$changelog": {"streamhouse.changelog-of-table-id": "99"},
            "neighbour": {"streamhouse.table-id": "99", "streamhouse.service-id": "ab"},
            "foreign": {},
        }.items():
            schema = {"type": "struct", "schema-id": 0, "fields": []}
            body = {"name": name, "schema": schema, "properties": properties}
            assert (await service.call("POST", tables, json_body=body)).status == 200
            path = name.replace("$", "%24")
            is_live = not name.startswith("dropped")
            for method, tail, sent in (("GET", "", None), ("POST", "/plan", plan)):
                answer = await service.call(method, f"{TABLES}/{path}{tail}", json_body=sent)
                assert answer.status == (200 if is_live else 404)
                assert is_live or "of a dropped table" in answer.json()["error"]["message"]
                other = await service.call(method, f"{tables}/{path}{tail}", json_body=sent)
                assert other.status == 200
            head = await service.call("HEAD", f"{TABLES}/{path}")
            assert head.status == (204 if is_live else 404)
        service.app.close()


async def test_every_change_is_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        for method, path in (
            ("POST", "/namespaces"),
            ("DELETE", "/namespaces/default"),
            ("POST", "/namespaces/default/properties"),
            ("POST", "/namespaces/default/tables"),
            ("POST", "/namespaces/default/register"),
            ("POST", "/namespaces/default/tables/events"),
            ("DELETE", "/namespaces/default/tables/events"),
            ("POST", "/namespaces/default/views"),
            ("POST", "/tables/rename"),
            ("POST", "/transactions/commit"),
            ("PUT", "/namespaces/default/tables/events/credentials"),
        ):
            answer = await service.call(method, LIVE + path, json_body={})
            assert answer.status == 403
            assert answer.json()["error"]["type"] == "ForbiddenException"
            assert "the warehouse 'live' only reads" in answer.json()["error"]["message"]
        metrics = await service.call("POST", f"{TABLES}/events/metrics", json_body={})
        assert (metrics.status, metrics.body) == (204, b"")
        service.app.close()


async def test_what_is_no_route_is_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        for path in ("", "/", "/config", "/oauth/tokens", "/tables", "/live/namespaces"):
            answer = await service.call("GET", LIVE + path)
            assert answer.status == 501
            assert answer.json()["error"]["type"] == "UnsupportedOperationException"
        assert (await service.call("GET", f"{LIVE}/namespaces/a%2Fb")).status == 400
        views = await service.call("GET", f"{LIVE}/namespaces/default/views")
        assert views.json() == {"identifiers": []}
        service.app.close()


async def test_the_grants_are_those_of_reading_the_table(tmp_path: Path) -> None:
    grants = tmp_path / "grants.toml"
    entry = '[[token]]\nname = "r"\nsha256 = "{}"\ngrants = ["read:default.events"]\n'
    grants.write_text(entry.format(token_hash(b"r")))
    grants.chmod(0o600)
    async with in_process_service(tmp_path / "data", token="owner", grants_file=grants) as service:
        headers = {"authorization": "Bearer r"}
        for path in ("default.events", "default.other"):
            await service.service.manager.create_table(table_descriptor(path))
        statuses = {
            path: (await service.call("GET", LIVE + path, headers=headers)).status
            for path in (
                "/namespaces",
                "/namespaces/default",
                "/namespaces/default/tables",
                "/namespaces/default/tables/events",
                "/namespaces/default/tables/other",
                "/namespaces/default/tables/events/credentials",
            )
        }
        assert [*statuses.values()] == [200, 403, 403, 200, 403, 403]
        assert (await service.call("GET", f"{LIVE}/namespaces")).status == 401
        change = await service.call("DELETE", f"{TABLES}/events", headers=headers)
        assert "only reads" in change.json()["error"]["message"]
        service.app.close()


async def test_planning_needs_the_grant_of_reading_the_table(tmp_path: Path) -> None:
    grants = tmp_path / "grants.toml"
    entry = '[[token]]\nname = "{0}"\nsha256 = "{1}"\ngrants = ["{2}"]\n'
    tokens = {"r": "read:default.events", "w": "write:default.other", "lake": "read:lake"}
    grants.write_text(
        "".join(entry.format(name, token_hash(name.encode()), g) for name, g in tokens.items())
    )
    grants.chmod(0o600)
    async with in_process_service(tmp_path / "data", token="owner", grants_file=grants) as service:
        for path in ("default.events", "default.other"):
            await service.service.manager.create_table(table_descriptor(path))
        for method, route in (("POST", "plan"), ("POST", "tasks"), ("DELETE", "plan/1")):
            answered = set()
            for tables in (TABLES, f"{CATALOG}/namespaces/default/tables"):
                for table in ("events", "other", "nothing"):
                    for token, is_allowed in (
                        ("r", table == "events"),
                        ("w", table == "other"),
                        ("lake", False),
                    ):
                        answer = await service.call(
                            method,
                            f"{tables}/{table}/{route}",
                            json_body={"plan-task": "x"} if route == "tasks" else {},
                            headers={"authorization": f"Bearer {token}"},
                        )
                        assert (answer.status == 403) != is_allowed, (token, table, answer.body)
                        if is_allowed:
                            answered.add(answer.status)
                        else:
                            # The refusal of a table that is there and of one that is not.
                            assert "no grant 'read:default." in answer.json()["error"]["message"]
                answer = await service.call(method, f"{tables}/events/{route}")
                assert answer.status == 401
            # What was never tiered is only in the warehouse `live`.
            assert answered == ({200, 404} if route == "plan" else {404})
        service.app.close()


async def test_an_unchanged_table_is_not_answered_again(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        first = await service.call("GET", f"{TABLES}/events")
        etag = first.headers["etag"]
        for sent in (etag, f"W/{etag}", f'"x", {etag}'):
            again = await service.call("GET", f"{TABLES}/events", headers={"if-none-match": sent})
            assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
        alone = await service.call("GET", f"{TABLES}/events", query={"snapshots": "refs"})
        assert alone.headers["etag"] != etag
        await service.append([(0, 0, event_rows(0, 3))])
        changed = await service.call("GET", f"{TABLES}/events", headers={"if-none-match": etag})
        assert changed.status == 200
        assert changed.headers["etag"] != etag
        service.app.close()


async def test_what_a_read_says_of_a_damaged_table_is_said_here(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        service.app.close()
    for file in tmp_path.glob("tables/*/lake.json"):
        file.write_bytes(file.read_bytes()[:-9])
    async with in_process_service(tmp_path) as service:
        read = await service.call("GET", "/v1/tables/events/state")
        assert read.json()["error"]["code"] == "table_damaged"
        live = await service.call("GET", f"{TABLES}/events")
        assert live.status == read.status
        assert live.json()["error"]["message"] == read.json()["error"]["message"]
        # A damaged table is not gone.
        assert await _names(service) == ["events"]
        service.app.close()


async def test_errors_of_a_cut_hide_the_secrets_of_the_catalog(tmp_path: Path) -> None:
    in_the_way = tmp_path / "hush-hush"
    in_the_way.write_text("a file where the warehouse would be")
    properties = {"warehouse": in_the_way.as_uri(), "my.api-token": in_the_way.name}
    async with in_process_service(tmp_path / "data", catalog_properties=properties) as service:
        await service.create_table()
        answer = await service.call("GET", f"{TABLES}/events")
        message = answer.json()["error"]["message"]
        assert answer.status >= 500
        assert "***" in message
        assert "hush" not in message
        service.app.close()


async def test_any_shard_answers_for_the_live_tables_of_all(tmp_path: Path) -> None:
    world = ShardWorld(tmp_path, FileObjectStore(tmp_path / "store"))
    async with world.shard("a") as a:
        await a.create_table()
        async with world.shard("b") as b:
            await a.append([(0, 0, event_rows(0, 3))])
            for service in (a, b):
                assert await _names(service) == ["events"]
                assert await _ids(service) == [0, 1, 2]
                assert (await service.call("HEAD", f"{TABLES}/events")).status in (200, 204)
            plans = [await s.call("POST", f"{TABLES}/events/plan", json_body={}) for s in (a, b)]
            assert plans[0].json() == plans[1].json()
            assert plans[0].json()["file-scan-tasks"][0]["data-file"]["record-count"] == 3
            for service in (a, b):
                body = {"plan-task": "x"}
                tasks = await service.call("POST", f"{TABLES}/events/tasks", json_body=body)
                assert (tasks.status, tasks.json()["error"]["type"]) == (404, "NotFoundException")
            etag = (await a.call("GET", f"{TABLES}/events")).headers["etag"]
            headers = {"if-none-match": etag}
            again = await b.call("GET", f"{TABLES}/events", headers=headers)
            assert (again.status, again.headers["etag"]) == (304, etag)
            refused = await b.call("DELETE", f"{TABLES}/events")
            assert "only reads" in refused.json()["error"]["message"]
            # Whose process is gone answers nothing, and nobody shows older rows in its place.
            del world.services["http://a:1"]
            assert (await b.call("GET", f"{TABLES}/events")).status == 503
            world.services["http://a:1"] = a
