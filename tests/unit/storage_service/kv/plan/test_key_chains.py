"""The changes of a batch by key: every key once, its changes in order, however often it comes."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest

from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER
from streamhouse.storage_service.kv.plan._key_chains import chains_of


@pytest.mark.parametrize("count", [0, 1, 2, 9, 300, 5_000])
@pytest.mark.parametrize("repeated", [0, 1, 3, 100])
def test_chains_are_the_rows_of_each_key_in_order(count: int, repeated: int) -> None:
    random = Random(count + repeated)
    keys = [b"\x01" + n.to_bytes(4, "big") for n in random.sample(range(1 << 20), count)]
    keys += [random.choice(keys) for _ in range(repeated) if keys]
    random.shuffle(keys)
    model: dict[bytes, list[int]] = {}
    for row, key in enumerate(keys):
        model.setdefault(key, []).append(row)

    chains = chains_of(pa.array(keys, pa.binary()))

    assert chains.distinct == (len(model) == len(keys))
    assert chains.hashed.keys.to_pylist() == list(model)
    first, second = PROCESS_HASHER.many(chains.hashed.keys)
    assert (chains.hashed.first == first).all()
    assert (chains.hashed.second == second).all()
    assert chains.row.tolist() == [row for rows in model.values() for row in rows]
    assert chains.chain.tolist() == [g for g, rows in enumerate(model.values()) for _ in rows]
    assert chains.first.tolist() == [row == rows[0] for rows in model.values() for row in rows]
