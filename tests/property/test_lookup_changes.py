"""A looked-up table that is brought up to a cut is the one that would be read at it.

One example is a table's life: upserts, partial updates, deletes and new keys, rounds and retention,
and between them lookups by tasks that share their files. What each finds is compared with a dict,
for all keys that were ever there and some that were not. A file is damaged now and then.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.lookup_life import KEYS, ROWS, LookupLife
from tests.support.union_world import Tiers


def _live(world: LookupLife, random: Random) -> None:
    """Do to the table what may come between two lookups."""
    tiers = Tiers(world.table.union, ())
    what = random.choice(["write"] * 9 + ["tier", "expire", "damage", "nothing"])
    if what == "tier" and tiers.lacks_rows():
        world.table.tiering.tier()
    elif what == "expire":
        tiers.expire(random.random())
    elif what == "damage":
        path = random.choice(sorted(world.directory.iterdir()))
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
    elif what == "write":
        span = random.choice([ROWS, ROWS + 20, 2 * ROWS])
        for _ in range(random.choice([1, 1, 2, 3, 9])):
            row = world.row(random.randrange(span), name=f"a{random.random()}", n=None)
            kind = random.choice(["upsert", "upsert", "partial", "delete", "delete then upsert"])
            if kind == "partial":
                row.pop("n")
                world.table.change([("upsert", row)], [*world.names, "name"])
            if kind.startswith("delete"):
                world.table.delete({name: row[name] for name in world.names})
            if kind.endswith("upsert"):
                world.table.upsert(row)


@pytest.mark.parametrize("kind", KEYS)
@settings(max_examples=examples(4), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_brought_is_what_would_be_read(kind: str, seed: int) -> None:
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder, LookupLife(Path(folder), kind) as world:
        world.fill()
        for _ in range(8):
            world.looked_up()
            _live(world, random)
        world.looked_up()
