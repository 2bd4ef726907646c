"""The schema registry: schemas kept beside tables, tables made of them and changed by them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.storage_service.operations.check_directory import check_directory
from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.in_process_service import (
    InProcessService,
    append_body,
    in_process_service,
    table_descriptor,
)
from tests.support.registry_world import ORDER, ask, register, with_field


def columns(service: InProcessService, path: str) -> dict[str, tuple[str, bool]]:
    table = service.service.table(path)
    return {c.name: (str(c.type), c.nullable) for c in table.info.schema.columns}


async def test_a_schema_of_a_topic_without_a_table_makes_it(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, kafka_partitions=3) as service:
        status, made = await register(service, "orders-value", ORDER)

        assert (status, made["version"]) == (200, 1)
        assert columns(service, "orders") == {"id": ("int64", False), "note": ("string", True)}
        table = service.service.table("orders")
        assert table.info.bucket_count == 3
        assert table.info.descriptor.properties == {"kafka.value.format": "avro"}
        assert made["id"] == table.info.table_id * 1000 + 1


async def test_a_schema_is_found_by_id_version_and_text(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        _, made = await register(service, "orders-value", ORDER)
        again = await register(service, "orders-value", {**ORDER})
        assert again == (200, made)
        wanted = (200, made)
        path = "/subjects/orders-value"

        assert await ask(service, "GET", f"{path}/versions/1") == wanted
        assert await ask(service, "GET", f"{path}/versions/latest") == wanted
        assert await ask(service, "POST", path, {"schema": json.dumps(ORDER, indent=4)}) == wanted
        assert await ask(service, "GET", f"{path}/versions") == (200, [1])
        assert await ask(service, "GET", "/subjects") == (200, ["orders-value"])
        _, by_id = await ask(service, "GET", f"/schemas/ids/{made['id']}?subject=orders-value")
        assert json.loads(by_id["schema"]) == ORDER
        assert await ask(service, "GET", f"/schemas/ids/{made['id']}/versions") == (
            200,
            [{"subject": "orders-value", "version": 1}],
        )
        assert await ask(service, "GET", "/schemas/types") == (200, ["AVRO"])


async def test_what_there_is_not_has_the_codes_that_clients_know(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await register(service, "orders-value", ORDER)
        found = [
            ("GET", "/subjects/other-value/versions/latest", None, 40401),
            ("GET", "/subjects/orders-key/versions", None, 40401),
            ("GET", "/subjects/orders-value/versions/2", None, 40402),
            ("GET", "/subjects/orders-value/versions/two", None, 42202),
            ("GET", "/schemas/ids/99", None, 40403),
            ("GET", "/schemas/ids/1002", None, 40403),
            ("POST", "/subjects/orders-value", {"schema": '"string"'}, 40403),
            ("POST", "/subjects/orders-value/versions", {"schema": "{"}, 42201),
            ("POST", "/subjects/orders-value/versions", {"schema": '"string"'}, 42201),
            ("POST", "/subjects/shop.Order/versions", {"schema": json.dumps(ORDER)}, 42208),
            ("PUT", "/config", {"compatibility": "NONE"}, 42203),
            ("DELETE", "/subjects/orders-value", None, 42205),
            ("GET", "/exporters", None, 40400),
        ]
        for method, path, body, code in found:
            status, answer = await ask(service, method, path, body)

            assert (answer["error_code"], status) == (code, code // 100), (path, answer)
        assert await ask(service, "GET", "/subjects") == (200, ["orders-value"])


async def test_another_schema_changes_the_table_as_far_as_schemas_change(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        narrow = with_field("id", "int")
        await register(service, "orders-value", narrow)
        assert columns(service, "orders")["id"] == ("int32", False)

        status, made = await register(service, "orders-value", with_field("at", "double"))

        assert (status, made["version"]) == (200, 2)
        assert columns(service, "orders") == {
            "note": ("string", True),
            "id": ("int64", False),
            "at": ("double", True),
        }
        # What was registered before the column has no value in rows before.
        _, newest = await ask(service, "GET", "/subjects/orders-value/versions/latest")
        assert newest["version"] == 3
        fields = {one["name"]: one["type"] for one in json.loads(newest["schema"])["fields"]}
        assert fields == {"id": "long", "note": ["null", "string"], "at": ["null", "double"]}
        assert json.loads(newest["schema"])["name"] == "Order"


async def test_a_schema_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await register(service, "orders-value", ORDER)
        before = columns(service, "orders")
        wrong = with_field("more", "string", with_field("id", "boolean"))

        status, answer = await register(service, "orders-value", wrong)

        assert (status, answer["error_code"]) == (409, 409)
        assert "field 'id' of the schema is boolean" in answer["message"]
        assert columns(service, "orders") == before
        assert await ask(service, "GET", "/subjects/orders-value/versions") == (200, [1])
        body = {"schema": json.dumps(wrong)}
        path = "/compatibility/subjects/orders-value/versions/latest"
        status, answer = await ask(service, "POST", path, body)
        assert (status, answer["is_compatible"]) == (200, False)


async def test_a_field_that_is_left_out_may_be_null_from_then_on(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await register(service, "orders-value", with_field("at", "double"))
        status, _ = await register(service, "orders-value", ORDER)

        assert status == 200
        assert columns(service, "orders")["at"] == ("double", True)


async def test_keys_have_schemas_and_columns_of_their_own(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        assert (await register(service, "a-key", "string"))[0] == 200
        assert (await register(service, "a-value", ORDER))[0] == 200
        assert (await register(service, "b-value", ORDER))[0] == 200
        assert (await register(service, "b-key", "string"))[0] == 200

        for path in ("a", "b"):
            table = service.service.table(path).info
            assert table.descriptor.record_format().key_columns == ("key",)
            assert set(table.schema.names) == {"id", "note", "key"}
        # The newest schema of values has no column that keys alone have.
        _, newest = await ask(service, "GET", "/subjects/b-value/versions/latest")
        assert newest["version"] == 1
        wrong = await register(service, "b-key", {**ORDER, "name": "Key"})
        assert wrong[0] == 409
        assert "kafka.key.columns" in wrong[1]["message"]


def _key(*fields: tuple[str, Any]) -> dict[str, Any]:
    named = [{"name": name, "type": kind} for name, kind in fields]
    return {"type": "record", "name": "Key", "fields": named}


def _enum(*symbols: str) -> dict[str, Any]:
    return {"type": "enum", "name": "E", "symbols": list(symbols)}


def _time(unit: str) -> dict[str, Any]:
    return {"type": "long", "logicalType": f"timestamp-{unit}"}


@pytest.mark.parametrize(
    ("first", "wider", "narrower", "why"),
    [
        ("int", "long", "int", ""),
        ("double", None, "long", "narrower type"),
        (["null", "string"], None, "string", "has no null"),
        (_key(("a", "int"), ("b", "string")), None, _key(("a", "int")), "is left out"),
        (
            _key(("a", ["null", "int"]), ("b", "string")),
            _key(("a", ["null", "long"]), ("b", "string")),
            _key(("a", "long"), ("b", "string")),
            "has no null",
        ),
        (_enum("A", "B"), _enum("A", "B", "C"), _enum("C"), "lacks A, B in its enum"),
        ("string", None, _enum("A"), "lacks other texts in its enum"),
        (_time("millis"), _time("micros"), _time("millis"), ""),
        (_time("micros"), None, _time("millis"), "milliseconds"),
    ],
)
async def test_a_key_schema_that_says_less_than_the_newest_is_refused(
    tmp_path: Path, first: Any, wider: Any, narrower: Any, why: str
) -> None:
    async with in_process_service(tmp_path) as service:
        assert (await register(service, "t-key", first))[0] == 200
        if wider is not None:
            assert (await register(service, "t-key", wider))[0] == 200
        before = columns(service, "t")

        status, answer = await register(service, "t-key", narrower)

        # One that was registered before is found, and is not the newest again.
        assert status == (409 if why else 200)
        assert not why or (why in answer["message"] and "'t-key'" in answer["message"])
        assert columns(service, "t") == before
        asked = {"schema": json.dumps(narrower)}
        _, fits = await ask(service, "POST", "/compatibility/subjects/t-key/versions/latest", asked)
        assert fits["is_compatible"] is not bool(why)


async def test_an_enum_that_lacks_texts_which_rows_may_have_is_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await register(service, "t-value", _key(("e", _enum("A", "B")), ("s", "string")))

        more, _ = await register(service, "t-value", _key(("e", _enum("B", "A", "C"))))
        fewer, why = await register(service, "t-value", _key(("e", _enum("A"))))
        text, _ = await register(service, "t-value", _key(("e", "string")))
        again, lost = await register(service, "t-value", _key(("e", _enum("A", "B", "C", "D"))))

        assert (more, fewer, text, again) == (200, 409, 200, 409)
        assert "field 'e' of the schema lacks B, C in its enum" in why["message"]
        assert "other texts" in lost["message"]


async def test_an_enum_that_is_named_has_the_symbols_of_the_one_that_it_names(
    tmp_path: Path,
) -> None:
    async with in_process_service(tmp_path) as service:
        other = {**_enum("X"), "name": "F"}
        await register(service, "t-value", _key(("a", _enum("A", "B")), ("b", other)))

        named, why = await register(service, "t-value", _key(("b", _enum("A", "X")), ("a", "E")))
        optional, _ = await register(
            service, "t-value", _key(("b", _enum("A", "X")), ("a", ["null", "E"]))
        )
        more, answer = await register(
            service, "t-value", _key(("a", _enum("A", "X", "B")), ("b", "E"))
        )

        assert (named, optional, more) == (409, 409, 200), answer
        assert "field 'a' of the schema lacks B in its enum" in why["message"]
        again, _ = await register(
            service, "t-value", _key(("b", _enum("A", "X", "B", "Y")), ("a", "E"))
        )
        assert again == 200


@pytest.mark.parametrize("wrapped", [1, 2])
async def test_a_record_in_a_type_of_its_own_is_the_record(tmp_path: Path, wrapped: int) -> None:
    schema: Any = ORDER
    for _ in range(wrapped):
        schema = {"type": schema}
    async with in_process_service(tmp_path) as service:
        assert (await register(service, "orders-value", schema))[0] == 200
        change = {"changes": [{"add": "more", "type": "string"}]}
        await service.call("PATCH", "/v1/tables/orders/schema", json_body=change)

        status, _ = await register(service, "orders-value", with_field("at", ["null", "long"]))

        _, newest = await ask(service, "GET", "/subjects/orders-value/versions/latest")
        found = json.loads(newest["schema"])
        assert status == 200
        assert (found["name"], [one["name"] for one in found["fields"]]) == (
            "Order",
            ["id", "note", "at", "more"],
        )


async def test_a_schema_of_the_service_defines_a_type_before_it_names_it(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        other = {**_enum("C"), "name": "F"}
        await register(service, "u-value", _key(("a", _enum("A", "B")), ("b", other)))
        # Another order than that of the columns.
        swapped = _key(("b", _enum("A", "B", "C")), ("a", "E"))
        assert (await register(service, "u-value", swapped))[0] == 200
        change = {"changes": [{"add": "more", "type": "string"}]}
        await service.call("PATCH", "/v1/tables/u/schema", json_body=change)

        wider = _key(("b", _enum("A", "B", "C", "D")), ("a", "E"), ("more", ["null", "string"]))
        assert (await register(service, "u-value", swapped))[0] == 200
        _, newest = await ask(service, "GET", "/subjects/u-value/versions/latest")
        assert [one["type"] for one in json.loads(newest["schema"])["fields"]] == [
            _enum("A", "B", "C"),
            "E",
            ["null", "string"],
        ]
        assert (await register(service, "u-value", wider))[0] == 200


async def test_a_unit_of_time_that_cuts_what_rows_may_have_is_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        times = {"type": "array", "items": _time("micros")}
        await register(service, "t-value", _key(("at", _time("micros")), ("more", times)))

        coarse, why = await register(service, "t-value", _key(("at", _time("millis"))))
        times = {"type": "array", "items": _time("millis")}
        inner, whys = await register(service, "t-value", _key(("more", times)))

        assert (coarse, inner) == (409, 409)
        assert "field 'at' of the schema has milliseconds instead of micro" in why["message"]
        assert "field 'more' of the schema has milliseconds instead of micro" in whys["message"]


@pytest.mark.parametrize(
    ("arrow", "kind", "why"),
    [
        (pa.string(), _enum("A"), "lacks other texts in its enum"),
        (pa.list_(pa.string()), {"type": "array", "items": _enum("A")}, "lacks other texts"),
        (pa.struct([("e", pa.string())]), _key(("e", _enum("A"))) | {"name": "In"}, "lacks other"),
        (pa.map_(pa.string(), pa.string()), {"type": "map", "values": _enum("A")}, "lacks other"),
        (pa.timestamp("us", tz="UTC"), _time("millis"), "has milliseconds"),
    ],
)
async def test_a_first_schema_says_all_rows_that_a_table_has(
    tmp_path: Path, arrow: pa.DataType, kind: Any, why: str
) -> None:
    async with in_process_service(tmp_path) as service:
        schema = pa.schema([pa.field("c", arrow)])
        for name in ("full", "empty"):
            await service.create_table(
                name, schema, bucket_count=1, properties={"kafka.value.format": "avro"}
            )
        rows = pa.record_batch([pa.array([None], arrow)], schema=schema)
        body = append_body(schema, [(0, 0, rows)])
        assert (await service.call("POST", "/v1/tables/full/append", body=body)).status == 200

        status, answer = await register(service, "full-value", _key(("c", ["null", kind])))
        made, _ = await register(service, "empty-value", _key(("c", ["null", kind])))

        assert (status, made) == (409, 200)
        assert f"field 'c' of the schema {why}" in answer["message"]
        assert "table 'default.full' has rows" in answer["message"]
        assert await ask(service, "GET", "/subjects") == (200, ["empty-value"])


async def test_a_table_of_another_format_is_left_as_it_is(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table("events")

        status, answer = await register(service, "events-value", ORDER)

        assert status == 409
        assert "kafka.value.format = json" in answer["message"]


async def test_schemas_are_there_after_a_restart_and_numbers_go_on(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        _, first = await register(service, "orders-value", ORDER)
    async with in_process_service(tmp_path) as service:
        assert await register(service, "orders-value", ORDER) == (200, first)
        _, second = await register(service, "orders-value", with_field("at", ["null", "double"]))
        assert second["id"] == first["id"] + 1


async def test_ids_of_a_dropped_table_are_not_given_again(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        _, first = await register(service, "orders-value", ORDER)
        assert (await service.call("DELETE", "/v1/tables/orders")).status == 204
        assert (await ask(service, "GET", f"/schemas/ids/{first['id']}"))[0] == 404

        _, second = await register(service, "orders-value", ORDER)

        assert second["id"] != first["id"]
        assert (await ask(service, "GET", f"/schemas/ids/{first['id']}"))[0] == 404


async def test_damaged_schemas_give_nothing_out_and_leave_the_table_served(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        _, first = await register(service, "orders-value", ORDER)
    [file] = tmp_path.glob("tables/*/record_schemas.json")
    file.write_bytes(file.read_bytes().replace(b"shop", b"shup"))
    damaged = file.read_bytes()
    async with in_process_service(tmp_path) as service:
        for status, answer in (
            await register(service, "orders-value", ORDER),
            await ask(service, "GET", f"/schemas/ids/{first['id']}"),
        ):
            assert status == 500
            assert "unreadable" in answer["message"]
        assert (await service.call("GET", "/v1/tables/orders")).status == 200
    assert file.read_bytes() == damaged


async def test_who_may_do_what(tmp_path: Path) -> None:
    grants = tmp_path / "grants.toml"
    tokens = {
        "boss": ["admin:*"],
        "writer": ["write:default.orders", "write:default.clicks"],
        "reader": ["read:default.orders"],
        "other": ["admin:sales.*"],
    }
    entries = (
        f'[[token]]\nname = "{name}"\ngrants = {json.dumps(given)}\n'
        f'sha256 = "{token_hash(f"{name}-token-long-enough".encode())}"\n'
        for name, given in tokens.items()
    )
    grants.write_text("".join(entries))
    grants.chmod(0o600)

    def basic(name: str) -> dict[str, str]:
        text = base64.b64encode(f"anybody:{name}-token-long-enough".encode()).decode()
        return {"authorization": f"Basic {text}"}

    async with in_process_service(tmp_path / "data", grants_file=grants) as service:
        assert (await register(service, "orders-value", ORDER))[0] == 401
        assert (await register(service, "orders-value", ORDER, **basic("nobody")))[0] == 401
        # It would make a table.
        assert (await register(service, "orders-value", ORDER, **basic("writer")))[0] == 403
        # It would give a table other columns.
        raw = {"kafka.value.format": "raw", "kafka.on.schema": "replace"}
        clicks = table_descriptor("clicks", RAW_TOPIC, properties=raw)
        await service.service.manager.create_table(clicks)
        assert (await register(service, "clicks-value", ORDER, **basic("writer")))[0] == 403
        assert columns(service, "clicks")["value"] == ("binary", True)
        assert (await register(service, "clicks-value", ORDER, **basic("boss")))[0] == 200
        assert columns(service, "clicks") == {"id": ("int64", False), "note": ("string", True)}
        status, found = await register(
            service, "orders-value", ORDER, authorization="Bearer boss-token-long-enough"
        )
        assert status == 200
        assert await register(service, "orders-value", ORDER, **basic("writer")) == (200, found)
        wider = with_field("at", ["null", "double"])
        assert (await register(service, "orders-value", wider, **basic("writer")))[0] == 403
        assert (await register(service, "orders-value", ORDER, **basic("reader")))[0] == 403
        by_id = f"/schemas/ids/{found['id']}"
        assert (await ask(service, "GET", by_id, **basic("reader")))[0] == 200
        assert (await ask(service, "GET", by_id, **basic("other")))[0] == 404
        assert await ask(service, "GET", "/subjects", **basic("other")) == (200, [])
        status, answer = await ask(
            service, "GET", "/subjects/orders-value/versions", **basic("other")
        )
        assert (status, answer["error_code"]) == (403, 40301)
        # Before anything of the schema is looked at, which may take long.
        status, answer = await ask(
            service,
            "POST",
            "/compatibility/subjects/orders-value/versions/latest",
            {"schema": "{"},
            **basic("other"),
        )
        assert (status, answer["error_code"]) == (403, 40301)
        # Basic is for serializers alone: browsers send it by themselves.
        answer = await service.call("GET", "/v1/tables", headers=basic("boss"))
        assert answer.status == 401


async def test_limits(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        large = {**ORDER, "doc": "x" * (256 << 10)}
        status, answer = await register(service, "orders-value", large)
        assert (status, answer["error_code"]) == (422, 42209)
        assert (await ask(service, "GET", "/subjects")) == (200, [])
        deep: Any = "long"
        for _ in range(40):
            deep = {"type": "array", "items": deep}
        status, answer = await register(service, "orders-value", with_field("deep", deep))
        assert (status, answer["error_code"]) == (422, 42201)


async def test_a_table_made_otherwise_has_a_schema_of_its_columns_once_it_is_read(
    tmp_path: Path,
) -> None:
    async with in_process_service(tmp_path) as service:
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
        await service.create_table(
            "people", schema, properties={"kafka.value.format": "avro"}, primary_key=("id",)
        )
        status, _ = await register(
            service,
            "people-value",
            with_field("name", "string", {**ORDER, "fields": ORDER["fields"][:1]}),
        )
        assert status == 200
        _, newest = await ask(service, "GET", "/subjects/people-value/versions/latest")
        fields = {one["name"]: one["type"] for one in json.loads(newest["schema"])["fields"]}
        assert fields == {"id": "long", "name": ["null", "string"]}
        _, key = await ask(service, "GET", "/subjects/people-key/versions/latest")
        assert json.loads(key["schema"]) == "long"


async def test_a_backup_has_them(tmp_path: Path) -> None:
    async with in_process_service(tmp_path / "data") as service:
        _, made = await register(service, "orders-value", ORDER)
        answer = await service.call("POST", "/v1/admin/backup", json_body={"with_lake": False})
        assert answer.status == 201, answer.body
    (tmp_path / "data" / "backup.staged").rename(tmp_path / "restored")
    async with in_process_service(tmp_path / "restored") as service:
        assert await register(service, "orders-value", ORDER) == (200, made)


async def test_a_check_tells_of_damaged_schemas(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await register(service, "orders-value", ORDER)
    assert check_directory(tmp_path, lake_check=None).is_sound
    [file] = tmp_path.glob("tables/*/record_schemas.json")
    file.write_bytes(file.read_bytes().replace(b"shop", b"shup"))

    report = check_directory(tmp_path, lake_check=None)
    assert not report.is_sound
    assert any("record_schemas.json is damaged" in str(found) for found in report.findings)
