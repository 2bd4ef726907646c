"""Folders of live cuts below a lake table's location; the name of a folder says how long it lives.

A folder `data/live/<seconds>-<id>` has data and delete files, `metadata/live/<seconds>-<id>` the
metadata of a cut. `<seconds>` is the Unix time of the folder's making. A cut is handed out for 15
minutes after its oldest folder was made, and a reader has 15 more for reading: any process may
delete the folders older than that, and knows nothing but their names.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from typing import Final, NamedTuple

from streamhouse.core.errors import StreamhouseError
from streamhouse.lake.files.lake_filesystem import LakeFilesystem

__all__ = [
    "HANDED_OUT_S",
    "READABLE_S",
    "LiveFolders",
    "SweptFolders",
    "delete_expired",
    "is_in_live_folder",
]

HANDED_OUT_S: Final = 15 * 60
READABLE_S: Final = 30 * 60
_PARENTS: Final = ("data/live", "metadata/live")
_NAME: Final = re.compile(r"([0-9]{1,12})-[0-9a-f]{32}")


class SweptFolders(NamedTuple):
    """How many folders were deleted, how many may still be read, and the bytes of the latter."""

    deleted_count: int
    folder_count: int
    size_bytes: int


class LiveFolders:
    """The two folders of one step of a live cut, which was made at `made_s`."""

    def __init__(self, location: str, *, made_s: float) -> None:
        self.made_s = int(made_s)
        name = f"{self.made_s}-{uuid.uuid4().hex}"
        self.data, self.metadata = (f"{location.rstrip('/')}/{p}/{name}" for p in _PARENTS)

    def delete(self, files: LakeFilesystem) -> None:
        """Delete both folders with their files; what cannot be deleted goes when it expires."""
        for folder in (self.data, self.metadata):
            with contextlib.suppress(StreamhouseError):
                files.delete_tree(folder)


def delete_expired(files: LakeFilesystem, location: str, *, now_s: float) -> SweptFolders:
    """Delete the folders of live cuts of the table at `location` which nobody may read any more.

    Folders with other names stay, and are not counted. Raises `StorageFailedError` or
    `UnavailableError`; a later call goes on.
    """
    deleted_count = folder_count = size_bytes = 0
    for parent in _PARENTS:
        place, count_before = f"{location.rstrip('/')}/{parent}", folder_count
        for folder in files.list_subfolders(place):
            name = _NAME.fullmatch(folder.rsplit("/", 1)[-1])
            if name is None:
                continue
            if int(name[1]) + READABLE_S < now_s:
                files.delete_tree(folder)
                deleted_count += 1
            else:
                folder_count += 1
        if folder_count > count_before:
            # One listing: a store takes a request for each folder, and there may be thousands.
            size_bytes += sum(file.size_bytes for file in files.walk(place))
    return SweptFolders(deleted_count, folder_count, size_bytes)


def is_in_live_folder(location: str, uri: str) -> bool:
    """Whether a file lies in a folder of a live cut of the table at `location`."""
    parts = uri.removeprefix(location.rstrip("/") + "/").split("/")
    return len(parts) > 3 and "/".join(parts[:2]) in _PARENTS and bool(_NAME.fullmatch(parts[2]))
