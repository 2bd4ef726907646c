"""The folders of live cuts: the name of a folder says when it was made, and so when it goes."""

from __future__ import annotations

import re
import uuid
from typing import Final

from streamhouse.lake.files.lake_filesystem import LakeFilesystem

__all__ = ["LIVE", "READABLE_S", "delete_expired", "new_folder"]

LIVE: Final = "live"
READABLE_S: Final = 30 * 60
_NAME: Final = re.compile(r"/live/(\d{1,12})-[0-9a-f]{32}/[^/]+$")


def new_folder(now_s: float) -> str:
    """Return the relative name of a new folder, made at `now_s` (unix seconds)."""
    return f"{LIVE}/{int(now_s)}-{uuid.uuid4().hex}"


def delete_expired(files: LakeFilesystem, location: str, *, now_s: float) -> int:
    """Delete the folders below `location`/live that are older than 30 minutes; return the files.

    `location` is the folder of a lake table's data or metadata. Everything with another name stays.
    """
    count = 0
    folders = set()
    for file in files.walk(f"{location}/{LIVE}"):
        name = _NAME.search(file.uri)
        if name is not None and int(name[1]) + READABLE_S < now_s:
            folders.add(file.uri.rpartition("/")[0])
            count += 1
    for folder in sorted(folders):
        files.delete_folder(folder)
    return count
