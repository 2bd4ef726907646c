"""The messages between the service and the process for live cuts.

A conversation is a `Build` and the end of the build: the next cut, `Unchanged`, or `Failed`. Before
the end the process asks questions. The answer to `ReadPage` is a `Page` with the payloads of the
batches; the answer to other questions is None. `Failed` answers a question without an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from streamhouse.core.errors import InternalError, StreamhouseError, error_for_code
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeCatalog, LakeRole
from streamhouse.lake.guards.served_tables import ServedTable

__all__ = [
    "Build",
    "CheckHistory",
    "Failed",
    "Line",
    "LineEndedError",
    "Opening",
    "Page",
    "PrepareWriting",
    "ReadPage",
    "Unchanged",
]


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message to the process: the lake."""

    described: LakeCatalog
    service_id: str
    data_directory: str


@dataclass(frozen=True, slots=True)
class Build:
    """A request for the next cut of a lake table.

    The table keeps the `number` for the life of the service. `shown_at` is the metadata file of the
    service's present cut, None without a cut.
    """

    number: int
    role: LakeRole
    served: ServedTable
    now_s: float
    shown_at: str | None


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Stored batches of a bucket; see `ServiceLog.page`."""

    bucket: int
    start: int
    end: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class CheckHistory:
    """See `ServiceLog.check_history`."""

    covered: CoveredOffsets
    table_id: int


@dataclass(frozen=True, slots=True)
class PrepareWriting:
    """Files will be written below `location`."""

    location: str


@dataclass(frozen=True, slots=True)
class Page:
    """Stored batches; the payloads follow as one piece of bytes.

    A batch is (first offset, number of rows, timestamp, schema id, bytes of the payload).
    """

    batches: Sequence[tuple[int, int, int, int, int]]


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The answer that the cut at `Build.shown_at` has all rows."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An error of ours, or a bug."""

    code: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Return the message of an error."""
        if isinstance(error, StreamhouseError):
            return cls(error.code, error.message)
        return cls(InternalError.code, f"{type(error).__name__}: {error}")

    def error(self) -> StreamhouseError:
        """Return the error again."""
        return error_for_code(self.code, self.message)


class LineEndedError(Exception):
    """The other process is gone."""


class Line:
    """An end of a line between the two processes. The owner locks."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    @property
    def is_open(self) -> bool:
        """Whether the end is open."""
        return not self._connection.closed

    def send(self, message: Any) -> None:
        """Send a message; raises `LineEndedError`, as all methods."""
        with _ended():
            self._connection.send(message)

    def receive(self) -> Any:
        """Return the next message."""
        with _ended():
            return self._connection.recv()

    def send_bytes(self, data: Any) -> None:
        """Send the bytes of a buffer."""
        with _ended():
            self._connection.send_bytes(data)

    def receive_bytes(self) -> bytes:
        """Return the next bytes."""
        with _ended():
            return self._connection.recv_bytes()

    def close(self) -> None:
        """Close the line."""
        self._connection.close()


@contextmanager
def _ended() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise LineEndedError from error
