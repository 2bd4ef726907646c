"""Rows in the order of a batch layout: sorted by columns, or along a Z-order curve of several.

A run of rows is ordered as a whole and written to separate files: each file has a narrow part of
the run's values. Ties keep the order of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.partitioning import Clustering
from streamhouse.lake.files.parquet_writer import PartitionedParquetWriter

__all__ = ["ClusteredWriter", "clustered"]

RUN_BYTES_MAX: Final = 192 << 20
_CURVE_BITS: Final = 16


def clustered(rows: pa.Table, clustering: Clustering) -> pa.Table:
    """Return the rows in the order of `clustering`, nulls last; without columns as they are."""
    if not clustering.columns or rows.num_rows < 2:
        return rows
    if clustering.is_z_order:
        columns = [rows.column(name) for name in clustering.columns]
        order = pa.array(np.argsort(_curve_positions(columns), kind="stable"))
    else:
        keys = [(name, "ascending") for name in clustering.columns]
        order = pc.sort_indices(rows, sort_keys=keys)
    return rows.take(order)


def _curve_positions(columns: list[pa.ChunkedArray]) -> npt.NDArray[np.uint64]:
    """Return where each row lies on the curve: the bits of its columns' ranks, interleaved."""
    positions = np.zeros(len(columns[0]), dtype=np.uint64)
    count = np.uint64(len(columns))
    for place, column in enumerate(columns):
        ranks = _ranks(column)
        for bit in range(_CURVE_BITS):
            bits = (ranks >> np.uint64(bit)) & np.uint64(1)
            positions |= bits << (np.uint64(bit) * count + np.uint64(place))
    return positions


def _ranks(column: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """Return the rank of every value among the distinct values, spread over all `_CURVE_BITS`.

    Ranks instead of values: any type has ranks, and skewed values spread evenly.
    """
    order = pc.sort_indices(column)
    values = column.take(order).combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks)
    differs = pc.fill_null(pc.not_equal(values[1:], values[:-1]), False)
    null_ends = pc.not_equal(values[1:].is_null(), values[:-1].is_null())
    steps = pc.or_(differs, null_ends).to_numpy(zero_copy_only=False)
    sorted_ranks = np.concatenate([[0], np.cumsum(steps)]).astype(np.uint64)
    highest = max(int(sorted_ranks[-1]), 1)
    ranks = np.empty(len(values), dtype=np.uint64)
    scale = np.uint64((1 << _CURVE_BITS) - 1)
    ranks[order.to_numpy()] = sorted_ranks * scale // np.uint64(highest)
    return ranks


@dataclass(kw_only=True)
class ClusteredWriter:
    """Collects runs of rows and writes each in the order of `clustering`, through `writer`.

    Without columns to order by, rows keep their order.
    """

    writer: PartitionedParquetWriter
    clustering: Clustering
    run_bytes_max: int = RUN_BYTES_MAX
    _run: list[pa.Table] = field(default_factory=list)
    _run_bytes: int = 0

    def write(self, rows: pa.Table) -> None:
        """Add rows; they may be written later."""
        if not self.clustering.columns:
            self.writer.write(rows)
            return
        self._run.append(rows)
        self._run_bytes += rows.nbytes
        if self._run_bytes >= self.run_bytes_max:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows, into files closed to later rows."""
        if self._run:
            run = pa.concat_tables(self._run)
            self._run, self._run_bytes = [], 0
            self.writer.write(clustered(run, self.clustering))
            self.writer.finish_files()
