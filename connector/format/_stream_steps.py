"""Micro-batches of a bounded size, and `availableNow`, for the streams of a Spark before 4.2.

Such a Spark tells a source neither a size nor the trigger, and runs `availableNow` as a single
micro-batch. Therefore the load of a stream gets a name, and the start of the query leaves a note
under this name for the reader: to read in steps, or to read in steps and stay at the table's
present end. A query with the second note runs in plain triggers, and is stopped when the reader
stays. A query without a note reads all rows in each micro-batch: a query started by another
language, of a stream by a SQL name, or with a source that is not ours.

The note is a file beside the files of `SparkContext.addFile`, in the driver's own folder, for as
long as the query makes its reader. Under Spark Connect the client's plan has the note itself.

A stream joined with a table runs without adaptive execution. PySpark 4.1 shows the plan of a
micro-batch again after each adaptive stage, and plans all scans again to show them. The scans of
later stages would read a later cut than the scans of earlier stages.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkFiles
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSourceStreamReader

from streamhouse.connector._spark_versions import GIVES_READ_LIMITS, OwnStepReader
from streamhouse.connector.names._wrapped_methods import has_jvm, session_of, wrap_method
from streamhouse.core.threads import NamedThread
from streamhouse.reading.options.options import PLANNED_COLUMN, STEPS_MARK

__all__ = ["ENDING", "STEPS", "as_spark_calls", "in_own_steps", "named_load", "run_in_steps"]

STEPS: Final = "steps"
ENDING: Final = "ending"
"""The notes: a query in steps, and a query that ends at the newest row of its start."""

_MARK: Final = "_without_streamhouse_steps"
_START_MS: Final = 60_000
_ADAPTIVE: Final = "spark.sql.adaptive.streaming.stateless.enabled"
_start: Final = threading.Lock()


def named_load() -> dict[str, str]:
    """Return the option with the name of a load."""
    return {STEPS_MARK: uuid.uuid4().hex}


def as_spark_calls(
    reader: DataSourceStreamReader, options: Mapping[str, str]
) -> DataSourceStreamReader:
    """Return a reader of PySpark 4.2's kind with the methods that this version of PySpark calls.

    `options` are those of the load.
    """
    return reader if GIVES_READ_LIMITS else in_own_steps(reader, options)


def in_own_steps(reader: DataSourceStreamReader, options: Mapping[str, str]) -> OwnStepReader:
    """Return the reader for a Spark before 4.2, in steps if the query has left a note."""
    note = _note_of(options.get(STEPS_MARK))
    return OwnStepReader(reader, in_steps=note is not None, is_ending=note == ENDING)


def _note_of(name: str | None) -> str | None:
    if name is None or name in (STEPS, ENDING):
        return name
    root = Path(SparkFiles.getRootDirectory())
    # Spark gives a stream's reader a folder below the driver's.
    for folder in (root, root.parent):
        with contextlib.suppress(OSError):
            return _file(folder, name).read_text(encoding="utf-8")
    return None


def run_in_steps(writer_class: Any) -> None:
    """Make `writer_class`, Spark's `DataStreamWriter`, leave the notes; idempotent."""

    def recorded(self: Any, choose: Any, **trigger: Any) -> Any:
        self._streamhouse_ends = bool(trigger.get("availableNow") or trigger.get("once"))
        return choose(self, **trigger)

    def noted(self: Any, start: Any, *arguments: Any, **options: Any) -> Any:
        return _started(self, lambda: start(self, *arguments, **options))

    wrap_method(writer_class, "trigger", recorded, mark=_MARK)
    wrap_method(writer_class, "start", noted, mark=_MARK)
    wrap_method(writer_class, "toTable", noted, mark=_MARK)


def _started(writer: Any, start: Any) -> Any:
    ends = getattr(writer, "_streamhouse_ends", False)
    noted = _noted_in_plan if hasattr(writer, "_write_stream") else _noted_in_files
    note = ENDING if ends else STEPS
    with _start, _in_one_cut(writer), noted(writer, note) as is_noted:
        if not (ends and is_noted):
            query = start()
        else:
            writer.trigger(processingTime="0 seconds")
            query = start()
            writer._streamhouse_ends = True
        if has_jvm(getattr(writer, "_spark", None)):
            # The reader is made by the query's own thread.
            with contextlib.suppress(PySparkException, Py4JError):
                query._jsq.streamingQuery().awaitInitialization(_START_MS)
    if ends and is_noted:
        NamedThread("streamhouse-ending", _end, (query,)).start()
    return query


@contextlib.contextmanager
def _in_one_cut(writer: Any) -> Iterator[None]:
    """Start a query that reads a table beside its stream without adaptive execution."""
    if not _has_table(writer):
        yield
        return
    conf = session_of(writer).conf
    before = conf.get(_ADAPTIVE, None)
    # The query keeps a copy of the session's settings.
    conf.set(_ADAPTIVE, "false")
    try:
        yield
    finally:
        conf.unset(_ADAPTIVE) if before is None else conf.set(_ADAPTIVE, before)


def _has_table(writer: Any) -> bool:
    if hasattr(writer, "_write_stream"):
        nodes = _nodes(writer._write_stream)
        return any(getattr(node, "_is_streaming", True) is False for node in nodes)
    return any(PLANNED_COLUMN in leaf.output().mkString(" ") for leaf in _leaves(writer))


def _end(query: Any) -> None:
    """Stop the query when its sources have no further row; a failed query has ended."""
    with contextlib.suppress(PySparkException):
        query.processAllAvailable()
        query.stop()


@contextlib.contextmanager
def _noted_in_files(writer: Any, note: str) -> Iterator[bool]:
    """Leave the note if all streams of a query are ours; yield whether the note is left."""
    names = [leaf.extraOptions().get(STEPS_MARK) for leaf in _leaves(writer) if leaf.isStreaming()]
    if not names or None in names:
        yield False
        return
    root = Path(SparkFiles.getRootDirectory())
    files = [_file(root, name) for name in names]
    for file in files:
        file.write_text(note, encoding="utf-8")
    try:
        yield True
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def _leaves(writer: Any) -> list[Any]:
    leaves = writer._df._jdf.queryExecution().analyzed().collectLeaves()
    return [leaves.apply(place) for place in range(leaves.size())]


@contextlib.contextmanager
def _noted_in_plan(writer: Any, note: str) -> Iterator[bool]:
    """Do the same under Spark Connect, in the plan that the start sends."""
    sources = [
        node for node in _nodes(writer._write_stream) if getattr(node, "_is_streaming", False)
    ]
    options = [getattr(node, "_options", None) or {} for node in sources]
    if not sources or any(STEPS_MARK not in of_source for of_source in options):
        yield False
        return
    names = [of_source[STEPS_MARK] for of_source in options]
    for of_source in options:
        of_source[STEPS_MARK] = note
    try:
        yield True
    finally:
        for of_source, name in zip(options, names, strict=True):
            of_source[STEPS_MARK] = name


def _nodes(plan: Any) -> Iterator[Any]:
    """Yield the nodes of a plan of Spark Connect."""
    yield plan
    for value in vars(plan).values():
        for child in value if isinstance(value, list | tuple) else (value,):
            # The class tells: a column has a field of every name.
            if hasattr(type(child), "to_proto"):
                yield from _nodes(child)


def _file(folder: Path, name: str) -> Path:
    return folder / f"streamhouse-{name}"
