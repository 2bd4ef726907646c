"""Position deletes that another engine wrote: which rows of one data file are gone."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.connector.scan.scan import DeleteFile, LakePiece
from streamhouse.storage_service.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.storage_service.model.sorted_values import distinct

__all__ = ["read_deleted_positions"]

_PATH: Final = "file_path"
_POSITION: Final = "pos"


def read_deleted_positions(
    filesystem: LakeFilesystem, piece: LakePiece
) -> npt.NDArray[np.int64] | None:
    """Return the deleted positions of the piece's file, sorted, each once; None without deletes.

    A delete file may name many data files: only row groups that can name this one are read.
    """
    if not piece.deletes:
        return None
    found = [_positions_in(filesystem, delete, data_path=piece.path) for delete in piece.deletes]
    return distinct(np.concatenate(found))


def _positions_in(
    filesystem: LakeFilesystem, delete: DeleteFile, *, data_path: str
) -> npt.NDArray[np.int64]:
    parts = [np.empty(0, dtype=np.int64)]
    with filesystem.open_parquet(delete.path, file_bytes=delete.file_bytes) as file:
        names = file.schema_arrow.names
        path_index = names.index(_PATH)
        for group in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(group).column(path_index).statistics
            if statistics is not None and statistics.has_min_max:
                wanted = data_path.encode()
                low, high = bytes(statistics.min_raw), bytes(statistics.max_raw)
                if not low <= wanted <= high:
                    continue
            for batch in file.iter_batches(row_groups=[group], columns=[_PATH, _POSITION]):
                is_ours = pc.equal(batch.column(_PATH).cast(pa.string()), data_path)
                positions = batch.column(_POSITION).filter(is_ours).cast(pa.int64())
                parts.append(positions.to_numpy(zero_copy_only=False))
    return np.concatenate(parts)
