"""Spark's worker offers a filter with a literal that Python cannot hold, and nothing fails."""

from __future__ import annotations

import base64
import datetime
import struct

import pytest

from streamhouse.connector._partition_reader import accept_offered_values

# PySpark 4.0 offers no filters.
pytest.importorskip("pyspark.sql.worker.data_source_pushdown_filters")
from pyspark.sql.worker import data_source_pushdown_filters as worker

YEAR_10000_US = 253_402_318_799_000_000


@pytest.fixture(autouse=True)
def _as_spark_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "deserializeVariant", worker.deserializeVariant)


def offered(kind: int, packed: bytes) -> object:
    """Return the literal of `column = literal`, which is of this primitive type of a VARIANT."""
    value = {
        "value": base64.b64encode(bytes([kind << 2]) + packed).decode(),
        "metadata": base64.b64encode(b"\x01\x00\x00").decode(),
    }
    given = {"name": "EqualTo", "columnPath": ["at"], "value": value, "isNegated": False}
    found: object = worker.deserializeFilter(given).value
    return found


@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        pytest.param(12, struct.pack("<q", YEAR_10000_US), id="timestamp"),
        pytest.param(13, struct.pack("<q", YEAR_10000_US), id="timestamp_ntz"),
        pytest.param(11, struct.pack("<i", 3_000_000), id="date"),
    ],
)
def test_a_literal_beyond_python(kind: int, packed: bytes) -> None:
    # When PySpark takes such a literal by itself, this fails: then the change can go.
    with pytest.raises((OverflowError, ValueError)):
        offered(kind, packed)

    accept_offered_values()
    accept_offered_values()

    assert type(offered(kind, packed)) is object


def test_other_literals_stay_what_they_are() -> None:
    accept_offered_values()

    assert offered(11, struct.pack("<i", 1)) == datetime.date(1970, 1, 2)
