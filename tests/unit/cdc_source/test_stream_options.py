"""Which tables of a database can be followed, and why the others cannot."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pytest

from streamhouse.cdc_source._source_types import SourceColumn
from streamhouse.cdc_source._target_table import OldRows, SourceTable
from streamhouse.cdc_source.stream_options import StreamOptions
from streamhouse.core.errors import InvalidRequestError, SchemaMismatchError

OPTIONS: Final = StreamOptions(patterns=["public.*"], database="db", name="db")
COLUMNS: Final = (SourceColumn("id", "int4"), SourceColumn("n", "text"))
GOOD: Final = SourceTable("public", "t", COLUMNS, ("id",), old_rows=(OldRows("public.t"),))


def _old(identity: str, *columns: str, is_logged: bool = True) -> dict[str, Any]:
    return {"old_rows": (OldRows("public.t", identity, frozenset(columns), is_logged),)}


@pytest.mark.parametrize(
    "change",
    [{}, _old("f"), _old("i", "id"), _old("i", "n", "id"), {"left_out": ("n",)}],
)
def test_a_table_whose_old_rows_have_the_key_is_followed(change: dict[str, Any]) -> None:
    OPTIONS.check_new(dataclasses.replace(GOOD, **change))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_old("n"), "REPLICA IDENTITY is NOTHING"),
        # The index of the identity was dropped.
        (_old("i"), "REPLICA IDENTITY is NOTHING"),
        (_old("i", "n"), "an index without column 'id'"),
        (_old("d", is_logged=False), "unlogged or foreign"),
        ({"has_deferrable_key": True}, "DEFERRABLE"),
        ({"has_heirs": True}, "inherit"),
        ({"is_owned": False}, "only its owner may publish it"),
        ({"hides_rows": True}, "row level security"),
        ({"primary_key": ()}, "no primary key"),
        ({"primary_key": ("x",), "left_out": ("x",)}, "column 'x' of its primary key is generated"),
        ({"columns": (SourceColumn("id", "float4"),)}, "primary key is float4"),
        ({"columns": (SourceColumn("id", "_int4"),)}, "primary key is _int4"),
        ({"columns": (SourceColumn("id", "varbit"),)}, "primary key is varbit"),
        ({"columns": (SourceColumn("id", "timetz"),)}, "primary key is timetz"),
    ],
)
def test_a_table_that_cannot_be_followed_says_why(change: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        OPTIONS.check_new(dataclasses.replace(GOOD, **change))


def test_a_table_without_a_key_needs_a_replica_identity() -> None:
    appending = dataclasses.replace(OPTIONS, keyless=True)
    keyless = dataclasses.replace(GOOD, primary_key=())

    appending.check_new(dataclasses.replace(keyless, **_old("f")))
    with pytest.raises(InvalidRequestError, match="REPLICA IDENTITY FULL"):
        appending.check_new(keyless)


def test_a_table_that_is_followed_is_looked_at_again() -> None:
    OPTIONS.check_followed(dataclasses.replace(GOOD, is_owned=False))
    with pytest.raises(SchemaMismatchError, match=r"'public\.t' cannot be followed any longer"):
        OPTIONS.check_followed(dataclasses.replace(GOOD, **_old("i", "n")))
