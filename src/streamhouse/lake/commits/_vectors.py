"""The deletion vectors of a round's commit, in format version 3.

A data file has one vector at most. A new one has the positions of the vector that it replaces too,
or those of position delete files from before the upgrade to version 3; what is replaced goes in the
same commit. So vectors are made for the very state that the commit asserts.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from streamhouse.core.model.values.sorted_values import distinct
from streamhouse.lake.files._written_files import vector_files
from streamhouse.lake.files.deletes._deletion_vectors import (
    decode_positions,
    write_deletion_vectors,
)
from streamhouse.lake.files.deletes.deleted_positions import (
    data_paths_of,
    read_deleted_positions,
)
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.position_deletes import DeletedRows
from streamhouse.lake.snapshots.live_files import (
    LiveFiles,
    deletes_of,
    is_vector,
    live_position_deletes,
    may_name,
    path_bounds,
)

__all__ = ["NewVectors", "write_vectors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVectors:
    """New vectors, all in the Puffin file `path`, and the entries of the deletes they replace."""

    path: str
    added: Sequence[DataFile]
    removed: Sequence[DataFile]


def write_vectors(
    table: Table, deleted: Sequence[DeletedRows], *, files: LakeFilesystem, live: LiveFiles
) -> NewVectors:
    """Write the vectors of the data files in `deleted` for the table's current snapshot.

    `live` are the data files of that snapshot.
    """
    parts: dict[str, list[npt.NDArray[np.int64]]] = defaultdict(list)
    for rows in deleted:
        parts[rows.data_path].append(decode_positions(rows.positions, rows.data_path))
    deletes = live_position_deletes(table)
    vectors = {path_bounds(file)[0]: file for file in deletes if is_vector(file)}
    replaced = [vectors[path] for path in parts if path in vectors]
    # The vector of a data file has all positions of delete files, too.
    uncovered = [path for path in parts if path not in vectors]
    older = [
        file
        for file in deletes
        if not is_vector(file) and any(may_name(file, p) for p in uncovered)
    ]
    for some, paths in ((replaced, list(parts)), (older, uncovered)):
        found = read_deleted_positions(files, map(deletes_of, some), data_paths=paths)
        for path, positions in found.items():
            parts[path].append(positions)
    covered = vectors.keys() | parts.keys()
    for file in older:
        names = set(data_paths_of(files, file.file_path))
        if names - live.missing(names) <= covered:
            replaced.append(file)
    path = f"{table.location_provider().data_path}/{uuid.uuid4()}-deletes.puffin"
    written = write_deletion_vectors(
        files, path, {path: distinct(np.concatenate(some)) for path, some in parts.items()}
    )
    places = {rows.data_path: rows for rows in deleted}
    return NewVectors(path=path, added=vector_files(written, places), removed=replaced)
