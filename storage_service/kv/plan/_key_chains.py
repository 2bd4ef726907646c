"""The changes of one batch by key: rows of the same key, and their order.

A chain is the changes of one key in the order of the batch. `KeyChains` lists all rows chain by
chain: "place" s is a position in this list, so the previous change of the chain, if any, is at s -
1. Almost always every key occurs once, and places equal rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER, HashedKeys, Hashes
from streamhouse.core.model.values.sorted_values import distinct

__all__ = ["KeyChains", "chains_of"]

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChains:
    """Rows of a batch, chain by chain.

    `hashed`: each key once, in order of first appearance; chain g is the changes of the key g.
    `row`, `chain`, `first`: by place, the row, its chain, and whether the chain starts here.
    `distinct`: no key occurs twice, so that `row` and `chain` are 0..n-1 and all are first.
    """

    hashed: HashedKeys
    row: npt.NDArray[np.int64]
    chain: npt.NDArray[np.int64]
    first: npt.NDArray[np.bool_]
    distinct: bool

    def of_rows(self, values: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """Return `values` by place, given by row."""
        return values if self.distinct else values[self.row]

    def of_chains(self, values: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """Return `values` by place, given by chain."""
        return values if self.distinct else values[self.chain]

    def last(self) -> npt.NDArray[np.int64]:
        """Return the last place of every chain."""
        if self.distinct:
            return self.row
        return np.append(np.flatnonzero(self.first)[1:], len(self.row)) - 1

    def latest(self, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return, by place, the nearest marked place of the same chain up to this place, or -1."""
        places = np.arange(len(marked))
        if self.distinct:
            return np.where(marked, places, -1)
        # A chain's start stops the search: starts are marked, too, and filtered afterwards.
        nearest = np.maximum.accumulate(np.where(marked | self.first, places, 0))
        return np.where(marked[nearest], nearest, -1)

    def latest_before(self, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return, by place, the nearest earlier marked place of the same chain, or -1."""
        if self.distinct:
            return np.full(len(marked), -1)
        latest = np.concatenate([[-1], self.latest(marked)[:-1]])
        latest[self.first] = -1
        return latest


def chains_of(keys: pa.Array) -> KeyChains:
    """Return the chains of rows with these binary keys."""
    count = len(keys)
    hashed = PROCESS_HASHER.hashed(keys)
    if _are_distinct(hashed.first):
        rows = np.arange(count)
        first = np.ones(count, dtype=np.bool_)
        return KeyChains(hashed=hashed, row=rows, chain=rows, first=first, distinct=True)
    encoded = keys.dictionary_encode()
    chain_of_row = encoded.indices.to_numpy()
    row = np.argsort(chain_of_row, kind="stable")
    chain = chain_of_row[row].astype(np.int64)
    first = np.empty(count, dtype=np.bool_)
    first[0] = True
    np.not_equal(chain[1:], chain[:-1], out=first[1:])
    at = row[first]
    each = HashedKeys(encoded.dictionary, hashed.first[at], hashed.second[at])
    return KeyChains(hashed=each, row=row, chain=chain, first=first, distinct=False)


def _are_distinct(hashes: Hashes) -> bool:
    """Whether all hashes differ, in a sixth of the time of sorting."""
    rows = np.arange(len(hashes), dtype=np.int32)
    last = np.empty(1 << (4 * len(hashes)).bit_length(), dtype=np.int32)
    places = (hashes & np.uint64(len(last) - 1)).astype(np.int64)
    last[places] = rows
    later = last[places]
    # Rows sharing a place with a later row; few, if all hashes are distinct.
    shared = np.flatnonzero(later != rows)
    other_hashes = hashes[shared]
    if (other_hashes == hashes[later[shared]]).any():
        return False
    return len(shared) < 2 or len(distinct(other_hashes)) == len(other_hashes)
