"""What is planned lies over what is stored, the newest first, however many rows came at once."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest

from streamhouse.storage_service.kv.cache._planned_rows import FEW_ROWS, PlannedRows


def key(number: int) -> bytes:
    return b"\x01" + number.to_bytes(8, "big")


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_dict_over_what_is_stored(seed: int) -> None:
    random = Random(seed)
    planned = PlannedRows()
    model: dict[int, bytes | None] = {}
    for step in range(12):
        count = random.choice([0, 3, 40, FEW_ROWS + 1])
        changes = {
            number: None if random.random() < 0.2 else b"%d %d" % (number, step)
            for number in random.sample(range(2 * FEW_ROWS), count)
        }
        planned.put(
            pa.array([key(number) for number in changes], pa.binary()),
            pa.array(list(changes.values()), pa.binary()),
        )
        model |= changes
        asked = random.sample(range(2 * FEW_ROWS), 50)
        keys = [key(number) for number in asked]
        stored = [None if number % 3 == 0 else b"stored" for number in asked]
        expected = [model.get(number, stored[i]) for i, number in enumerate(asked)]

        assert planned.over_few(keys, stored) == expected
        many = planned.over(pa.array(keys, pa.binary()), pa.array(stored, pa.binary()))
        assert many.to_pylist() == expected
