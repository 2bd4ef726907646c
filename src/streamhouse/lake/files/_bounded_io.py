"""A table's file IO, limited to the table's own files for opening, writing and deleting.

Metadata names files by path, and any writer of metadata chooses the paths. Every path is checked
before opening: of lists and manifests here, of data and delete files where a manifest is decoded,
which is once.
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
    """A mixin to the class of a catalog's file IO, whose own methods stay."""

    # An existing file IO can only change to a class without slots of its own.
    __slots__ = ()
    bounds: Bounds
    own_bounds: Bounds
    table: str
    metadata_location: str | None

    def check(self, location: str, bounds: Bounds | None = None) -> None:
        # Only the catalog decides the place of the table's metadata.
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
    """Limit `io` to opening files in `bounds`, and to deleting files in `own`.

    The metadata file named by the catalog is opened in any place.
    """
    if not isinstance(io, _BoundedIO):
        io.__class__ = _bounded(type(io))
    bounded = cast(_BoundedIO, io)
    bounded.bounds = bounds
    bounded.own_bounds = own
    bounded.table = table
    bounded.metadata_location = metadata_location


def check_paths(io: FileIO, paths: Iterable[str]) -> None:
    """Raise `ForbiddenError` for the first path outside the table's own files."""
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
