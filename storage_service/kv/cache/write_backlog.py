"""Applied changes that RocksDB does not have yet, in order.

Handing over large runs makes RocksDB four times cheaper than handing over every batch. Small pieces
are joined as they come, so that there are few however small the writes are. The writing thread
changes it; any thread may ask for the rows under a prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.storage_service.kv.rocksdb_store import Marker
from streamhouse.storage_service.kv.rows.key_order import nearly_sorted

__all__ = ["Piece", "WriteBacklog"]

_SMALL_ROWS = 4_096


class Piece(NamedTuple):
    """Changes in order: a null value deletes; `marker` is where they lead to."""

    keys: pa.Array
    values: pa.Array
    marker: Marker


class WriteBacklog:
    """Pieces, oldest first. The list is replaced, never changed, so that readers see it whole."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._rows = 0
        self._bytes = 0

    @property
    def rows(self) -> int:
        """How many changes wait."""
        return self._rows

    @property
    def memory_bytes(self) -> int:
        """The bytes of the changes that wait."""
        return self._bytes

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: Piece) -> None:
        """Append changes."""
        self._rows += len(piece.keys)
        self._bytes += int(piece.keys.nbytes + piece.values.nbytes)
        pieces = list(self._pieces)
        # Joining only what is not larger copies each row few times.
        while pieces and len(pieces[-1].keys) <= min(len(piece.keys), _SMALL_ROWS):
            before = pieces.pop()
            piece = Piece(
                pa.concat_arrays([before.keys, piece.keys]),
                pa.concat_arrays([before.values, piece.values]),
                piece.marker,
            )
        self._pieces = [*pieces, piece]

    def as_run(self) -> Piece:
        """Return everything as one piece, nearly in the order of keys."""
        keys = pa.concat_arrays([piece.keys for piece in self._pieces])
        values = pa.concat_arrays([piece.values for piece in self._pieces])
        order = pa.array(nearly_sorted(keys))
        return Piece(keys.take(order), values.take(order), self._pieces[-1].marker)

    def clear(self) -> None:
        """Forget everything: RocksDB has it."""
        self._pieces = []
        self._rows = self._bytes = 0

    def changes_under(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """Return the latest value of each key that starts with `prefix`; None was deleted."""
        found: dict[bytes, bytes | None] = {}
        for piece in self._pieces:
            matches = pc.starts_with(piece.keys, pattern=prefix)
            keys = piece.keys.filter(matches).to_pylist()
            found.update(zip(keys, piece.values.filter(matches).to_pylist(), strict=True))
        return found
