"""What a write means is settled, or refused by one sentence, before its first row."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from streamhouse.connector.write._write_options import WriteMode, write_options
from streamhouse.connector.write._write_target import WriteTarget, resolve_target
from streamhouse.core.errors import StreamhouseError
from tests.support.described_tables import DescribedTables

ID = pa.field("id", pa.int64(), nullable=False)
NAME = pa.field("name", pa.string())
AT = pa.field("at", pa.timestamp("us", tz="UTC"))
CHANGE = pa.field("__change_type", pa.string())
POSITION = [
    pa.field("__bucket", pa.int32()),
    pa.field("__offset", pa.int64()),
    pa.field("__timestamp", pa.timestamp("us", tz="UTC")),
]
ROWS = pa.schema([ID, NAME, AT])
VERSIONED = {
    "table.merge-engine": "versioned",
    "table.merge-engine.versioned.ver-column": "at",
}


def client() -> DescribedTables:
    tables = DescribedTables()
    tables.create_table("db.log", ROWS)
    tables.create_table("db.keyed", ROWS, primary_key=["id"])
    tables.create_table("db.versioned", ROWS, primary_key=["id"], properties=VERSIONED)
    return tables


def resolve(
    table: str, fields: list[pa.Field], *, mode: str = "", sequence: str = ""
) -> WriteTarget:
    given = {"path": f"db.{table}", "write.mode": mode, "sequence.column": sequence}
    options = {key: value for key, value in given.items() if value}
    return resolve_target(client(), write_options(options), pa.schema(fields), is_stream=False)


def test_rows_are_appended_or_upserted_as_the_table_is() -> None:
    assert resolve("log", [ID, NAME, AT]).mode is WriteMode.APPEND
    assert resolve("keyed", [AT, NAME, ID]).mode is WriteMode.UPSERT


def test_a_changelog_is_applied_without_its_positions() -> None:
    target = resolve("keyed", [ID, NAME, AT, CHANGE, *POSITION])
    rows = pa.record_batch(
        [[1], ["a"], [0], ["+I"], [0], [7], [0]],
        schema=pa.schema([ID, NAME, pa.field("at", pa.timestamp("us", "US/Eastern")), CHANGE,
                          *POSITION]),
    )  # fmt: skip

    sent = pickle.loads(pickle.dumps(target)).shape.apply(rows)

    assert sent.schema.names == ["id", "name", "at", "__change_type"]
    assert sent.schema.field("at").type == AT.type


def test_deletes_alone_need_the_key_alone() -> None:
    assert resolve("keyed", [ID, CHANGE]).columns is None
    assert resolve("keyed", [ID], mode="delete").mode is WriteMode.DELETE


def test_a_partial_update_names_the_frames_columns() -> None:
    assert resolve("keyed", [ID, NAME], mode="partial").columns == ("id", "name")
    assert resolve("keyed", [CHANGE, ID, AT], mode="partial").columns == ("id", "at")


def test_who_keeps_the_sequence() -> None:
    lsn = pa.field("lsn", pa.int64())

    assert resolve("versioned", [ID, NAME, AT], sequence="at").ordered_by is None
    assert resolve("keyed", [ID, NAME, AT], sequence="at").ordered_by == "at"
    # A sequence that the table does not keep only decides.
    target = resolve("keyed", [ID, NAME, AT, lsn], sequence="lsn")
    assert target.shape.dropped == {"lsn"}
    assert resolve("keyed", [ID, NAME, AT, CHANGE, *POSITION], sequence="__offset").columns is None


@pytest.mark.parametrize(
    ("table", "fields", "options", "sentence"),
    [
        ("log", [ID, NAME, AT], {"mode": "upsert"}, "'db.log' has no primary key, so write.mode"),
        ("log", [ID, NAME, AT, CHANGE], {}, "'db.log' has no primary key, so changes cannot"),
        ("log", [ID, NAME, AT], {"sequence": "at"}, "'sequence.column' has nothing to decide"),
        ("keyed", [ID, NAME, AT], {"mode": "append"}, "use write.mode = 'upsert'"),
        ("keyed", [ID, NAME], {}, "column 'at' is missing"),
        ("keyed", [ID, NAME, AT, POSITION[1]], {}, "no column '__offset'"),
        ("keyed", [ID, NAME], {"mode": "delete"}, "key columns only (id); drop column 'name'"),
        ("keyed", [ID, CHANGE], {"mode": "delete"}, "drop '__change_type'"),
        ("keyed", [NAME, AT], {"mode": "partial"}, "needs the key column 'id'"),
        ("keyed", [ID, CHANGE.with_name("x")], {"mode": "partial"}, "no column 'x'"),
        ("keyed", [ID, NAME, AT], {"sequence": "ta"}, "'ta': the DataFrame has no such column"),
        ("keyed", [ID], {"mode": "delete", "sequence": "id"}, "no meaning for write.mode"),
        ("versioned", [ID, NAME, AT], {"sequence": "name"}, "the greater 'at' wins already"),
        ("versioned", [ID, AT], {"mode": "partial"}, "takes whole rows"),
        ("versioned", [ID], {"mode": "delete"}, "table.delete.behavior = ignore"),
        ("keyed", [ID, NAME, AT], {"mode": "upsrt"}, "did you mean 'upsert'"),
    ],
)
def test_what_cannot_work_is_refused(
    table: str, fields: list[pa.Field], options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(StreamhouseError) as caught:
        resolve(table, fields, **options)

    assert sentence in caught.value.message
