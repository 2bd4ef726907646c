"""Rows that are planned but not applied yet, over those of a bucket.

They lie in layers, the newest last: many rows as the arrays they came in, few in a dict, which the
next few join. Few layers wait at any time; looking for keys in one is one call, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["FEW_ROWS", "PlannedRows"]

FEW_ROWS = 1_000
"""Up to so many rows are kept in a dict: most rounds, which the next one joins."""

_Few = dict[bytes, bytes | None]
_Many = tuple[pa.Array, pa.Array]


class PlannedRows:
    """Newest rows by key; of keys that were not put, nothing is known."""

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
        """Return `values`, which are stored under `keys`, with what was put under any of them."""
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
