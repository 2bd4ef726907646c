"""Planned, unapplied rows layered over a bucket's rows.

Layers are in order, the newest last: many rows as arrays, few rows in a dict joined by the next
few. Few layers exist at any time; a search for keys in a layer is one call of any size.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["FEW_ROWS", "PlannedRows"]

FEW_ROWS = 1_000
"""The most rows of a dict layer: most write groups, joined by the next."""

_Few = dict[bytes, bytes | None]
_Many = tuple[pa.Array, pa.Array]


class PlannedRows:
    """Newest rows by key; other keys are unknown."""

    def __init__(self) -> None:
        self._layers: list[_Few | _Many] = []

    def put(self, keys: pa.Array, values: pa.Array) -> None:
        """Make `values` the newest rows of distinct `keys`; a null deletes."""
        if len(keys) > FEW_ROWS:
            self._layers.append((keys, values))
            return
        if not self._layers or isinstance(self._layers[-1], tuple):
            self._layers.append({})
        layer = self._layers[-1]
        assert isinstance(layer, dict)
        layer.update(zip(keys.to_pylist(), values.to_pylist(), strict=True))

    def over(self, keys: pa.Array, values: pa.Array) -> pa.Array:
        """Return `values`, stored under `keys`, replaced by planned values."""
        for layer in self._layers:
            if isinstance(layer, dict):
                layer = (
                    pa.array(list(layer), pa.binary()),
                    pa.array(list(layer.values()), pa.binary()),
                )
            at = pc.index_in(keys, value_set=layer[0])
            if at.null_count < len(at):
                values = pc.if_else(at.is_valid(), layer[1].take(at), values)
        return values

    def over_few(
        self, keys: Sequence[bytes], values: Sequence[bytes | None]
    ) -> Sequence[bytes | None]:
        """As `over`, for few keys."""
        if any(isinstance(layer, tuple) for layer in self._layers):
            stored = pa.array(values, pa.binary())
            return list(self.over(pa.array(keys, pa.binary()), stored).to_pylist())
        for layer in self._layers:
            assert isinstance(layer, dict)
            values = [layer.get(key, value) for key, value in zip(keys, values, strict=True)]
        return values
