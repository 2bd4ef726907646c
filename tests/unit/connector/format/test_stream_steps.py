"""The notes by which a Spark before 4.2 reads a stream in steps."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkFiles
from pyspark.sql.connect.functions import col

from streamhouse.connector._spark_versions import GIVES_READ_LIMITS, OwnStepReader
from streamhouse.connector.format import _stream_steps
from streamhouse.connector.format._stream_steps import (
    ENDING,
    STEPS,
    as_spark_calls,
    in_own_steps,
    named_load,
    run_in_steps,
)
from streamhouse.reading.options.options import STEPS_MARK

ADAPTIVE = "spark.sql.adaptive.streaming.stateless.enabled"


class Node:
    """A node of a plan of Spark Connect."""

    def __init__(self, child: Node | None = None, *, options: dict[str, str] | None = None) -> None:
        self._child = child
        self._columns = [col("id")]
        self._options = options
        if options is not None:
            self._is_streaming = True

    def to_proto(self) -> None: ...


class Query:
    def __init__(self, triggers: list[dict[str, Any]]) -> None:
        self.triggers = triggers
        self.calls: list[str] = []
        self.is_stopped = threading.Event()

    def processAllAvailable(self) -> None:
        self.calls.append("processAllAvailable")

    def stop(self) -> None:
        self.calls.append("stop")
        self.is_stopped.set()


class Settings(dict[str, str]):
    """The settings of a session, and those that a query has kept."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def unset(self, key: str) -> None:
        del self[key]


def writer_of(plan: Node) -> tuple[Any, list[str | None]]:
    """Return a writer of Spark Connect, and the notes in its plan at each start."""
    noted: list[str | None] = []

    class Writer:
        def __init__(self) -> None:
            self.triggers: list[dict[str, Any]] = []
            self._write_stream = Node(plan)

        def trigger(self, **named: Any) -> Any:
            self.triggers.append(named)
            return self

        def start(self) -> Query:
            node: Node | None = plan
            while node is not None:
                if getattr(node, "_is_streaming", False):
                    noted.append((node._options or {}).get(STEPS_MARK))
                node = node._child
            return Query(self.triggers)

    run_in_steps(Writer)
    return Writer(), noted


def test_a_query_is_noted_while_it_starts_and_reads_in_steps() -> None:
    load = named_load()
    writer, noted = writer_of(Node(options=dict(load)))

    query = writer.trigger(processingTime="1 second").start()

    assert noted == [STEPS]
    assert (query.triggers, query.calls) == ([{"processingTime": "1 second"}], [])
    assert writer._write_stream._child._options == load


def test_available_now_becomes_plain_triggers_that_end() -> None:
    writer, noted = writer_of(Node(Node(options=named_load())))

    query = writer.trigger(availableNow=True).start()

    assert noted == [ENDING]
    assert query.is_stopped.wait(30)
    assert query.triggers == [{"availableNow": True}, {"processingTime": "0 seconds"}]
    assert query.calls == ["processAllAvailable", "stop"]


def test_a_query_with_a_stream_of_another_kind_is_left_to_spark() -> None:
    load = named_load()
    writer, noted = writer_of(Node(Node(options={}), options=dict(load)))

    query = writer.trigger(availableNow=True).start()

    assert noted == [load[STEPS_MARK], None]
    assert (query.triggers, query.calls) == ([{"availableNow": True}], [])


@pytest.mark.parametrize("folder", ["", "streaming_job"])
def test_a_reader_finds_the_note_of_its_load_alone(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda: str(tmp_path / folder))
    load, other = named_load(), named_load()
    _stream_steps._file(tmp_path, load[STEPS_MARK]).write_text(ENDING)

    reader: Any = object()
    made = [in_own_steps(reader, options) for options in (load, other, {})]

    assert all(isinstance(reader, OwnStepReader) for reader in made)
    assert [vars(r)["_in_steps"] for r in made] == [True, False, False]
    assert [vars(r)["_is_unprepared"] for r in made] == [True, False, False]


def test_a_spark_that_gives_limits_calls_the_reader_itself() -> None:
    reader: Any = object()

    assert not GIVES_READ_LIMITS or as_spark_calls(reader, {}) is reader


@pytest.mark.parametrize("before", [{}, {ADAPTIVE: "true"}])
@pytest.mark.parametrize("has_table", [False, True])
def test_a_stream_with_a_table_beside_it_starts_without_adaptive_execution(
    before: dict[str, str], has_table: bool
) -> None:
    kept: list[dict[str, str]] = []
    session = SimpleNamespace(conf=Settings(before), catalog=None)
    table = Node()
    table._is_streaming = False

    class Writer:
        _write_stream = Node(Node(table if has_table else None, options=dict(named_load())))
        _session = session

        def trigger(self, **_: Any) -> Any:
            return self

        def start(self) -> Query:
            kept.append(dict(session.conf))
            return Query([])

    run_in_steps(Writer)
    Writer().start()

    assert kept == [{ADAPTIVE: "false"} if has_table else before]
    assert session.conf == before
