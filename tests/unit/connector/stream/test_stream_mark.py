"""Streams of our format are marked, others are left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from streamhouse.connector._spark_versions import GIVES_READ_LIMITS
from streamhouse.connector.format._spark_readers import mark_streams
from streamhouse.reading.options.options import STEPS_MARK, STREAM_MARK, ZONE_MARK, shape_options


def reader_class() -> Any:
    class Reader:
        """As much of Spark's `DataStreamReader` as is used."""

        def __init__(self) -> None:
            self.given: dict[str, str] = {}
            self._spark = SimpleNamespace(
                conf={"spark.sql.session.timeZone": "Asia/Tokyo"}, catalog=None
            )

        def options(self, **given: str) -> Reader:
            self.given |= given
            return self

        def format(self, source: str) -> Reader:
            return self

        def load(
            self,
            path: str | None = None,
            format: str | None = None,  # noqa: A002  Spark's name
            schema: str | None = None,
            **options: str,
        ) -> dict[str, str]:
            return {**self.given, **options, "path": str(path)}

    return Reader


def test_a_stream_of_our_format_is_marked_once() -> None:
    reader = reader_class()
    mark_streams(reader)
    load = reader.load
    mark_streams(reader)

    assert reader.load is load
    options = reader().format("Streamhouse").load("db.t", where="id > 1")
    # Before PySpark 4.2 the mark has a name, by which a query leaves its note.
    assert (options.pop(STEPS_MARK, None) is None) == GIVES_READ_LIMITS
    assert options == {
        STREAM_MARK: "true",
        ZONE_MARK: "Asia/Tokyo",
        "path": "db.t",
        "where": "id > 1",
    }
    assert shape_options(options).is_stream
    assert STREAM_MARK in reader().load("db.t", "streamhouse")
    assert STREAM_MARK in reader().load(format="streamhouse")


def test_other_streams_are_left_alone() -> None:
    reader = reader_class()
    mark_streams(reader)

    assert reader().format("kafka").load("x") == {"path": "x"}
    assert reader().load("x") == {"path": "x"}
