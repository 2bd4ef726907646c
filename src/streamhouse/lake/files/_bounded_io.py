"""A table's file IO that opens, writes and deletes nothing but the table's own files.

Metadata names files by path, and whoever writes metadata writes paths. So every path is looked at
before it is opened: of lists and manifests here, of data and delete files where a manifest is
decoded, which is once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any, cast

from pyiceberg.io import FileIO, InputFile, OutputFile

from streamhouse.lake._policy import Bounds

__all__ = ["bind", "check_paths", "only_own"]

_logger = logging.getLogger(__name__)


class _BoundedIO(FileIO):
    """Mixed into the class of the file IO that a catalog made, which stays what it is."""

    # A file IO that exists can only become one of a class without room of its own.
    __slots__ = ()
    bounds: Bounds
    own_bounds: Bounds
    table: str
    metadata_location: str | None

    def check(self, location: str, bounds: Bounds | None = None) -> None:
        # Where its own metadata is the catalog says, and nobody else.
        if location != self.metadata_location:
            (bounds or self.bounds).check(f"lake table '{self.table}'", location)

    def new_input(self, location: str) -> InputFile:
        self.check(location)
        above: Any = super()
        file: InputFile = above.new_input(location)
        return file

    def new_output(self, location: str) -> OutputFile:
        self.check(location)
        above: Any = super()
        file: OutputFile = above.new_output(location)
        return file

    def delete(self, location: str | InputFile | OutputFile) -> None:
        uri = location if isinstance(location, str) else location.location
        self.check(uri, self.own_bounds)
        above: Any = super()
        above.delete(location)


@functools.lru_cache(maxsize=32)
def _bounded(kind: type[FileIO]) -> type[FileIO]:
    return type(kind.__name__, (_BoundedIO, kind), {"__module__": kind.__module__})


def bind(
    io: FileIO, table: str, bounds: Bounds, *, own: Bounds, metadata_location: str | None
) -> None:
    """Make `io` open only what lies in `bounds`, and delete only what lies in `own`.

    The metadata file that the catalog named is opened wherever it is.
    """
    if not isinstance(io, _BoundedIO):
        io.__class__ = _bounded(type(io))
    bounded = cast(_BoundedIO, io)
    bounded.bounds = bounds
    bounded.own_bounds = own
    bounded.table = table
    bounded.metadata_location = metadata_location


def check_paths(io: FileIO, paths: Iterable[str]) -> None:
    """Raise `ForbiddenError` for the first path that is not one of the table's own."""
    if isinstance(io, _BoundedIO):
        has = io.bounds.has
        for path in paths:
            if not has(path):
                io.check(path)


def only_own(io: FileIO, paths: Iterable[str]) -> list[str]:
    """Return the paths that are the table's own; log that the foreign files stay."""
    if not isinstance(io, _BoundedIO):
        return list(paths)
    folders: dict[Any, bool] = {}
    own_paths: list[str] = []
    foreign_paths: list[str] = []
    for path in paths:
        is_own = io.own_bounds.really_has(path, folders=folders)
        (own_paths if is_own else foreign_paths).append(path)
    if foreign_paths:
        _logger.warning(
            "event=foreign_lake_files_stay table=%s files=%d first=%r",
            *(io.table, len(foreign_paths), foreign_paths[0][:300]),
        )
    return own_paths
